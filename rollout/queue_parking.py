"""Requests that wait in the queue server: tried again when something has changed, told why when their wait is over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollout.errors import HeadraceError
from rollout.queue_core import QueueCore, Reply
from rollout.queue_protocol import Request, error_row
from rollout.selection import Waiting


@dataclass(slots=True)
class Parked:
    """A request that waits."""

    request: Request
    route: bytes
    until: float
    why: str
    before: dict[str, Any] | None  # what was answered to the request that this one followed

    def try_again(self, core: QueueCore, now: float) -> Reply | Waiting | HeadraceError:
        if self.before is not None:
            return handle_second(core, self.request, now)
        try:
            return core.handle(self.request, now)
        except HeadraceError as error:
            return error


def handle_second(core: QueueCore, follow: Request, now: float) -> Reply | Waiting:
    """The request before it is done, so what is wrong with this one is no error of the whole."""
    try:
        return core.handle(follow, now)
    except HeadraceError as error:
        return Reply({"end": error_row(error)})


class Parking:
    """Everybody who waits, in the order they came."""

    def __init__(self) -> None:
        self.parked: dict[tuple[str, int], Parked] = {}
        self._seen_changes = -1

    def compare(self, beat: Request, route: bytes) -> list[int]:
        """Requests that a client waits for and that are not parked here: lost, or answered by a lost reply.

        Those that are parked will be answered to where it is now; those it no longer waits for are forgotten.
        """
        asks = set(beat.ints("outstanding", 0, 1 << 62))
        parked = {seq: p for (client, seq), p in self.parked.items() if client == beat.client}
        for seq, request in parked.items():
            if seq in asks:
                request.route = route
            elif seq < beat.seq:
                del self.parked[beat.client, seq]
        return [seq for seq in asks if seq not in parked]

    def served(self, core: QueueCore, now: float, thorough: bool) -> Iterator[tuple[Parked, Reply | HeadraceError]]:
        """Those whose wait is over, with their answers.

        `thorough`, once per tick: all are tried, for a lease that has run out is no fact, and what they wait for is put
        into words afresh. Otherwise those who may be served, and only if anything has changed.
        """
        changed, self._seen_changes = core.changes != self._seen_changes, core.changes
        for key, parked in list(self.parked.items()) if thorough or changed else ():
            if not (thorough or core.ledger.may_serve(parked.request.op, parked.request.value.get("step", 0))):
                continue
            answer = parked.try_again(core, now)
            if isinstance(answer, Waiting):
                parked.why = answer.why
            else:
                del self.parked[key]
                yield parked, answer
        for key in [k for k, p in self.parked.items() if now >= p.until]:
            parked = self.parked.pop(key)
            yield parked, Reply({"waiting": parked.why})

    def who_waits(self) -> list[str]:
        return [f"{p.request.holder} waits for {p.why}" for p in self.parked.values()]
