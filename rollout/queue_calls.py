"""What each call of a queue client does, whatever way the client waits (rollout/queue_asking.py).

Whoever goes round in circles asks for the next thing as it hands in the last: `submit_then_lease`, `score_then_lease`
and `trained_then_take` are two calls each, in one message.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from rollout import queue_said as said
from rollout.errors import DeadlineError, Drained, QueueError, WireError
from rollout.journal_segments import Ref
from rollout.ledger_states import Lease
from rollout.local_payloads import LocalPayloads
from rollout.placed_payloads import PayloadWriter
from rollout.queue_asking import Asking, Plan, Work
from rollout.queue_connection import BEAT, Connection
from rollout.queue_keys import ClientKeys
from rollout.queue_protocol import WAIT_SLICE, Answer, split_blobs
from rollout.types import Group, Verdict
from rollout.wire import Buffer, Encoded, GroupHeader, encode_briefly, read_header
from rollout.wire_brief import Brief
from rollout.wire_decode import with_arrays
from rollout.wire_verdicts import read_verdicts_table

log = logging.getLogger(__name__)
PORTION = 256 << 10  # bytes of token ids that are written at once


class Calls(Asking):
    """Every call, as a plan that a client drives. `patience_s` bounds the calls that have no wait of their own."""

    def __init__(
        self,
        endpoint: str,
        holder: str,
        keys: ClientKeys | None = None,
        patience_s: float = 3600.0,
        beat_s: float = BEAT,
    ) -> None:
        super().__init__(Connection(endpoint, holder, keys, beat_s), patience_s)
        self._local: LocalPayloads | bool | None = None  # None: not yet looked
        self._writer: PayloadWriter | None = None
        self._place_from = 0

    def close(self) -> None:
        self.connection.close()
        if self._writer:
            self._writer.abandon()

    def _drive(self, plan: Plan[Any]) -> Any:
        raise QueueError("use QueueClient or AsyncQueueClient")

    # ---- rollout actors

    def lease(self, n: int, wait_s: float) -> Any:
        """list[Lease], [] if no slot was free within wait_s. Raises Drained when there will never be another."""
        return self._drive(self._lease(n, wait_s))

    def submit(self, groups: Iterable[Group]) -> Any:
        """{ordinal: "accepted" | "duplicate" | "late"}; blocks while the queue is out of memory.

        "late": the lease had ended and the group was not needed. Raises LedgerError, WireError; then none was stored.
        """
        return self._drive(self._submit(list(groups)))

    def submit_then_lease(self, groups: Iterable[Group], n: int, wait_s: float) -> Any:
        """`submit`, then `lease`: list[Lease]. What `lease` raises comes after the groups were stored."""
        return self._drive(self._submit_then_lease(list(groups), n, wait_s))

    def give_back(self, ordinals: Iterable[int], reason: str, failed: bool = True) -> Any:
        """End leases without a group. `failed` counts against the ordinal; False is for a worker that goes away."""
        return self._drive(self._give_back(list(ordinals), reason, failed))

    # ---- reward actors

    def lease_scoring(self, n: int, wait_s: float, full: bool = False) -> Any:
        """list[Group] to score; only prompt and token ids travel, unless `full`. Raises Drained."""
        return self._drive(self._lease_scoring(n, wait_s, full))

    def score(self, verdicts: Mapping[int, Sequence[Verdict]]) -> Any:
        """{ordinal: "accepted" | "duplicate" | "late"}. Raises LedgerError; then none was stored."""
        return self._drive(self._score(verdicts))

    def score_then_lease(
        self, verdicts: Mapping[int, Sequence[Verdict]], n: int, wait_s: float, full: bool = False
    ) -> Any:
        """`score`, then `lease_scoring`: list[Group]. What the second raises comes after the verdicts were stored."""
        return self._drive(self._score_then_lease(verdicts, n, wait_s, full))

    # ---- the learner

    def take(self, step: int, rank: int = 0, world: int = 1, wait_s: float = 600.0) -> Any:
        """list[Group]: this rank's share of the step, the same whenever it is asked. Raises DeadlineError, Drained."""
        return self._drive(self._take(step, rank, world, wait_s))

    def trained(self, step: int, version: int, skipped_ordinals: Iterable[int] = (), live: bool = False) -> Any:
        """The step is done. `live`: the engines serve `version` already, so release it in the same breath."""
        return self._drive(self._do("trained", **said.trained(step, version, skipped_ordinals, live)))

    def trained_then_take(
        self,
        step: int,
        version: int,
        skipped_ordinals: Iterable[int] = (),
        live: bool = False,
        rank: int = 0,
        world: int = 1,
        wait_s: float = 600.0,
    ) -> Any:
        """`trained(step, ...)`, then `take(step + 1, ...)`: list[Group]."""
        done = said.trained(step, version, skipped_ordinals, live)
        return self._drive(self._trained_then_take(done, rank, world, wait_s))

    def release(self, version: int) -> Any:
        return self._drive(self._do("release", version=version))

    def commit(self, step: int) -> Any:
        return self._drive(self._do("commit", step=step))

    def restarted(self, version: int) -> Any:
        """The learner starts from the checkpoint of `version`; call it once, before the first take."""
        return self._drive(self._do("restarted", version=version, key=uuid.uuid4().hex))

    # ---- anybody

    def drop(self, ordinals: Iterable[int], reason: str) -> Any:
        return self._drive(self._do("drop", ordinals=list(ordinals), reason=reason))

    def drain(self, reason: str) -> Any:
        return self._drive(self._do("drain", reason=reason))

    def stats(self) -> Any:
        """Counts by state, slots, bytes, staleness, what others wait for: a plain dict."""
        return self._drive(self._stats())

    # ---- the plans

    def _lease(self, n: int, wait_s: float) -> Plan[list[Lease]]:
        answer, _ = yield from self._await("lease", {"n": n}, wait_s)
        return [Lease(*row) for row in answer.ok["leases"]] if answer else []

    def _submit(self, groups: list[Group]) -> Plan[dict[int, str]]:
        answer, _ = yield from self._hand_in(groups, lambda args, blobs: self._insist_alone("submit", args, blobs))
        return dict(zip([g.ordinal for g in groups], answer.ok["outcomes"], strict=True))

    def _submit_then_lease(self, groups: list[Group], n: int, wait_s: float) -> Plan[list[Lease]]:
        def both(args: dict[str, Any], blobs: Sequence[Buffer]) -> Plan[tuple[Answer, str]]:
            return self._insist_then("submit", args, "lease", {"n": n}, wait_s, blobs)

        answer, _ = yield from self._hand_in(groups, both)
        return [Lease(*row) for row in answer.ok.get("leases", ())]

    def _hand_in(
        self, groups: list[Group], ask: Callable[[dict[str, Any], Sequence[Buffer]], Plan[tuple[Answer, str]]]
    ) -> Plan[tuple[Answer, str]]:
        """Submit by `ask` until the server has room, and end the leases."""
        args, blobs = (yield from self._placed(groups)) or said.sent(groups)
        while True:
            try:
                answer, why = yield from ask(args, blobs)
            except Drained:  # said to what follows: the groups are in
                self._end_leases(groups)
                raise
            if "unplaced" in answer.ok and self._writer:
                self._writer.abandon()
                args, blobs = said.sent(groups)
                continue
            if "busy" not in answer.ok:
                self._end_leases(groups)
                return answer, why
            room = {"bytes": answer.ok["busy"], "ordinals": [g.ordinal for g in groups]}
            yield from self._await("room", room, WAIT_SLICE)

    def _end_leases(self, groups: Sequence[Group]) -> None:
        for group in groups:
            if self.connection.leases.get(group.ordinal) == group.attempt:
                del self.connection.leases[group.ordinal]

    def _insist_alone(self, op: str, args: dict[str, Any], blobs: Sequence[Buffer]) -> Plan[tuple[Answer, str]]:
        return (yield from self._insist(op, args, blobs)), ""

    def _placed(self, groups: Sequence[Group]) -> Plan[said.Said | None]:
        """Write many bytes where the server would, if this is its host. None: the groups must be sent.

        Portion by portion: what was encoded a moment ago is still in the processor's cache when it is written.
        """
        yield from self._locally()
        if self._writer is None or not said.is_much(groups, self._place_from):
            return None
        briefs: list[Brief] = []
        places: list[Ref] = []
        portion: list[Encoded] = []
        nbytes = 0
        for group in groups:
            encoded, brief = encode_briefly(group)
            briefs.append(brief)
            portion.append(encoded)
            nbytes += brief.tokens_end
            if nbytes >= PORTION or group is groups[-1]:
                written = yield Work(partial(self._writer.place_all, portion))
                if not written:
                    return None
                places += written
                portion, nbytes = [], 0
        return said.placed(briefs, groups, places)

    def _give_back(self, ordinals: list[int], reason: str, failed: bool) -> Plan[None]:
        mine = [[o, a] for o in ordinals if (a := self.connection.leases.get(o)) is not None]
        yield from self._insist("give_back", {"leases": mine, "reason": reason[:4096], "failed": failed})
        for ordinal in ordinals:
            self.connection.leases.pop(ordinal, None)

    def _lease_scoring(self, n: int, wait_s: float, full: bool) -> Plan[list[Group]]:
        local = yield from self._locally()
        answer, _ = yield from self._await("lease_scoring", {"n": n, "full": full, "local": local}, wait_s)
        return (yield from self._opened(answer)) if answer else []

    def _score(self, verdicts: Mapping[int, Sequence[Verdict]]) -> Plan[dict[int, str]]:
        try:
            answer = yield from self._insist("score", said.scored(verdicts))
        finally:
            self.connection.scoring.difference_update(verdicts)
        return dict(zip(verdicts, answer.ok["outcomes"], strict=True))

    def _score_then_lease(
        self, verdicts: Mapping[int, Sequence[Verdict]], n: int, wait_s: float, full: bool
    ) -> Plan[list[Group]]:
        asked = {"n": n, "full": full, "local": (yield from self._locally())}
        try:
            answer, _ = yield from self._insist_then("score", said.scored(verdicts), "lease_scoring", asked, wait_s, ())
        finally:
            self.connection.scoring.difference_update(verdicts)
        return (yield from self._opened(answer)) if "ordinals" in answer.ok else []

    def _take(self, step: int, rank: int, world: int, wait_s: float) -> Plan[list[Group]]:
        local = yield from self._locally()
        asked = {"step": step, "rank": rank, "world": world, "local": local}
        answer, why = yield from self._await("take", asked, wait_s)
        if answer is None:
            raise DeadlineError(f"step {step}", wait_s, why)
        return (yield from self._opened(answer))

    def _trained_then_take(self, done: dict[str, Any], rank: int, world: int, wait_s: float) -> Plan[list[Group]]:
        step = done["step"] + 1
        asked = {"step": step, "rank": rank, "world": world, "local": (yield from self._locally())}
        answer, why = yield from self._insist_then("trained", done, "take", asked, wait_s, ())
        if "ordinals" not in answer.ok:
            raise DeadlineError(f"step {step}", wait_s, why)
        return (yield from self._opened(answer))

    def _locally(self) -> Plan[bool]:
        """Whether the payload can be read where it lies; found out once."""
        if self._local is None:
            answer = yield from self._insist("where", {})
            local = LocalPayloads.find(answer.ok["folder"], answer.epoch)
            self._local = local or False
            if local and "placing" in answer.ok:
                self._place_from, file_bytes, checks = answer.ok["placing"]
                self._writer = PayloadWriter(local.folder, file_bytes, checks)
        return bool(self._local)

    def _opened(self, answer: Answer) -> Plan[list[Group]]:
        """The groups; one whose arrays are not what they must be is taken out of the run, with a reason."""
        ordinals, table = answer.ok["ordinals"], answer.ok.get("verdicts")
        nobody = [None] * len(ordinals)
        judged = nobody if table is None else read_verdicts_table(table, len(ordinals), "reply.verdicts")
        found, read = self._found(answer)
        groups, bad = [], {}
        for ordinal, where, verdicts in zip(ordinals, found, judged, strict=True):
            try:
                header, frames = read(where)
                if header.ordinal != ordinal:
                    raise WireError("group.ordinal", f"{header.ordinal} where {ordinal} should be")
                groups.append(with_arrays(header, frames, verdicts))
            except WireError as error:
                bad[ordinal] = str(error)
        if bad:
            log.error("%s drops groups that cannot be read: %s", self.holder, bad)
            yield from self._insist("drop", {"ordinals": list(bad), "reason": "unreadable"})
        return groups

    def _found(self, answer: Answer) -> tuple[Sequence[Any], Callable[[Any], tuple[GroupHeader, Sequence[Buffer]]]]:
        """Where each group is, in this folder or in the answer, and how it is read there."""
        if isinstance(self._local, LocalPayloads) and "places" in answer.ok:
            self._local.of_life(answer.epoch)
            return answer.ok["places"], self._local.group
        return split_blobs(answer.ok["groups"], answer.blobs, "reply"), _read

    def _do(self, op: str, **args: Any) -> Plan[None]:
        yield from self._insist(op, args)

    def _stats(self) -> Plan[dict[str, Any]]:
        return (yield from self._insist("stats", {})).ok["stats"]


def _read(blob: tuple[Buffer, Sequence[Buffer]]) -> tuple[GroupHeader, Sequence[Buffer]]:
    return read_header(blob[0]), blob[1]
