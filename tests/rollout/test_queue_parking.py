"""Proves that nobody waits in the server for longer than the reason for it lasts."""

from __future__ import annotations

from typing import Any

from rollout.journal import MemoryJournal
from rollout.queue_core import QueueCore, Reply
from rollout.queue_parking import Parked, Parking
from rollout.queue_protocol import Request, pack_blobs, request_frames
from rollout.queue_said import scored
from rollout.wire import Buffer, encode_group
from tests.rollout.queue_samples import GOOD, group, settings


class Desk:
    """A core with people who wait at it."""

    def __init__(self, **changes: object) -> None:
        self.core = QueueCore(settings(**changes), MemoryJournal(), 1 << 30, lambda *_, **__: None, 0.0)
        self.parking, self.seq = Parking(), 0

    def request(self, who: str, op: str, args: dict[str, Any], blobs: list[Buffer]) -> Request:
        self.seq += 1
        return Request(request_frames(op, who, self.seq, who, args, blobs))

    def ask(self, who: str, op: str, blobs: list[Buffer] | None = None, now: float = 0.0, **args: Any) -> Any:
        answer = self.core.handle(self.request(who, op, args, blobs or []), now)
        assert isinstance(answer, Reply), answer
        return answer.ok

    def park(self, who: str, op: str, **args: Any) -> None:
        request = self.request(who, op, args, [])
        assert not isinstance(self.core.handle(request, 0.0), Reply)
        self.parking.parked[who, request.seq] = Parked(request, b"", 30.0, "", None)

    def served(self, now: float = 0.0, thorough: bool = False) -> list[str]:
        return [p.request.client for p, answer in self.parking.served(self.core, now, thorough)]

    def submit(self, ordinal: int) -> None:
        counts, blobs = pack_blobs([encode_group(group(ordinal))])
        self.ask("producer", "submit", blobs, groups=counts)


def test_both_ranks_get_a_step_in_the_moment_it_is_full() -> None:
    desk = Desk()
    for rank in (0, 1):
        desk.park(f"rank-{rank}", "take", step=0, rank=rank, world=2, local=False)
    for ordinal, *_ in desk.ask("producer", "lease", n=2)["leases"]:
        assert desk.served() == []
        desk.submit(ordinal)
        desk.ask("scorer", "score", **scored({ordinal: GOOD}))
    assert desk.served() == ["rank-0", "rank-1"]


def test_a_rank_that_asks_while_the_other_has_its_share_does_not_wait_for_the_next_step() -> None:
    desk = Desk()
    desk.park("rank-0", "take", step=0, rank=0, world=2, local=False)
    for ordinal, *_ in desk.ask("producer", "lease", n=2)["leases"]:
        desk.submit(ordinal)
        desk.ask("scorer", "score", **scored({ordinal: GOOD}))
    desk.ask("rank-1", "take", step=0, rank=1, world=2, local=False)
    assert desk.served() == ["rank-0"]


def test_a_group_whose_scorer_is_silent_goes_to_one_who_waits() -> None:
    desk = Desk(lease_s=5.0)
    ((ordinal, *_),) = desk.ask("producer", "lease", n=1)["leases"]
    desk.submit(ordinal)
    assert desk.ask("silent", "lease_scoring", n=1, full=False, local=False)["ordinals"] == [ordinal]
    desk.park("scorer", "lease_scoring", n=1, full=False, local=False)
    assert desk.served(thorough=True) == []
    desk.core.tick(6.0)
    assert desk.served(6.0, thorough=True) == ["scorer"]
