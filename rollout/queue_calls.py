"""What each call of a queue client does, whatever way the client waits.

A plan is a generator: it yields what to ask the server and is sent the answer (None if it did not come in time). So
what a call does, says and retries is written once, and the clients differ only in how they wait.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from rollout.errors import DeadlineError, HeadraceError, QueueError, WireError
from rollout.ledger_states import Lease
from rollout.local_payloads import LocalPayloads, Place
from rollout.placed_payloads import PayloadWriter
from rollout.queue_connection import BEAT, Connection
from rollout.queue_keys import ClientKeys
from rollout.queue_protocol import WAIT_SLICE, Answer, pack_blobs, split_blobs
from rollout.types import Group, Verdict
from rollout.wire import Buffer, decode_group, encode_group, frame_bytes
from rollout.wire_verdicts import read_verdicts, verdicts_row

log = logging.getLogger(__name__)
T = TypeVar("T")
GRACE = 5.0  # seconds an answer may come later than the wait that was asked for


@dataclass(slots=True)
class Ask:
    """One request of a plan, and how long to wait for the answer."""

    op: str
    args: dict[str, Any]
    blobs: Sequence[Buffer] = ()
    timeout: float = WAIT_SLICE


@dataclass(slots=True)
class Work:
    """Something slow on this host, in the middle of a plan: an event loop must not do it itself."""

    do: Callable[[], Any]


Plan = Generator[Ask | Work, Any, T]


class Calls:
    """Every call, as a plan that a client drives. `patience_s` bounds the calls that have no wait of their own."""

    def __init__(
        self,
        endpoint: str,
        holder: str,
        keys: ClientKeys | None = None,
        patience_s: float = 3600.0,
        beat_s: float = BEAT,
    ) -> None:
        self.holder, self.patience_s = holder, patience_s
        self.connection = Connection(endpoint, holder, keys, beat_s)
        self._since_said = time.monotonic()
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

    # ---- the learner

    def take(self, step: int, rank: int = 0, world: int = 1, wait_s: float = 600.0) -> Any:
        """list[Group]: this rank's share of the step, the same whenever it is asked. Raises DeadlineError, Drained."""
        return self._drive(self._take(step, rank, world, wait_s))

    def trained(self, step: int, version: int, skipped_ordinals: Iterable[int] = (), live: bool = False) -> Any:
        """The step is done. `live`: the engines serve `version` already, so release it in the same breath."""
        args = {"step": step, "version": version, "skipped": list(skipped_ordinals)}
        return self._drive(self._do("trained", **args, **({"live": True} if live else {})))

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
        encoded = [encode_group(g) for g in groups]
        ordinals = [g.ordinal for g in groups]
        places = yield from self._placed(encoded)
        while True:
            sent = [(h, () if place else f) for (h, f), place in zip(encoded, places, strict=True)]
            counts, blobs = pack_blobs(sent)
            args = {"groups": counts, "places": places} if any(places) else {"groups": counts}
            answer = yield from self._insist("submit", args, blobs)
            if "unplaced" in answer.ok and self._writer:
                self._writer.abandon()
                places = [None] * len(places)
                continue
            if "busy" not in answer.ok:
                break
            yield from self._await("room", {"bytes": answer.ok["busy"], "ordinals": ordinals}, WAIT_SLICE)
        for ordinal in ordinals:
            self.connection.leases.pop(ordinal, None)
        return dict(zip(ordinals, answer.ok["outcomes"], strict=True))

    def _placed(self, encoded: Sequence[tuple[bytes, list[Buffer]]]) -> Plan[list[list[int] | None]]:
        """Write large groups where the server would, if this is its host: the place of each, None for those to send."""
        places: list[list[int] | None] = [None] * len(encoded)
        yield from self._locally()
        if self._writer is None:
            return places
        large = [i for i, (_, frames) in enumerate(encoded) if frame_bytes(frames) >= self._place_from]
        if large:
            found = yield Work(partial(self._writer.place_all, [encoded[i] for i in large]))
            for i, place in zip(large, found, strict=True):
                places[i] = place
        return places

    def _give_back(self, ordinals: list[int], reason: str, failed: bool) -> Plan[None]:
        mine = [[o, a] for o in ordinals if (a := self.connection.leases.get(o)) is not None]
        yield from self._insist("give_back", {"leases": mine, "reason": reason[:4096], "failed": failed})
        for ordinal in ordinals:
            self.connection.leases.pop(ordinal, None)

    def _lease_scoring(self, n: int, wait_s: float, full: bool) -> Plan[list[Group]]:
        local = yield from self._locally()
        answer, _ = yield from self._await("lease_scoring", {"n": n, "full": full, "local": local}, wait_s)
        if answer is None:
            return []
        blobs = self._bodies(answer)
        return (yield from self._decoded(answer.ok["ordinals"], blobs, [None] * len(blobs)))

    def _score(self, verdicts: Mapping[int, Sequence[Verdict]]) -> Plan[dict[int, str]]:
        rows = [[ordinal, verdicts_row(values)] for ordinal, values in verdicts.items()]
        try:
            answer = yield from self._insist("score", {"verdicts": rows})
        finally:
            self.connection.scoring.difference_update(verdicts)
        return dict(zip(verdicts, answer.ok["outcomes"], strict=True))

    def _take(self, step: int, rank: int, world: int, wait_s: float) -> Plan[list[Group]]:
        local = yield from self._locally()
        asked = {"step": step, "rank": rank, "world": world, "local": local}
        answer, why = yield from self._await("take", asked, wait_s)
        if answer is None:
            raise DeadlineError(f"step {step}", wait_s, why)
        blobs = self._bodies(answer)
        verdicts = [read_verdicts(rows, "reply.verdicts") for rows in answer.ok["verdicts"]]
        return (yield from self._decoded(answer.ok["ordinals"], blobs, verdicts))

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

    def _bodies(self, answer: Answer) -> list[tuple[Buffer, Sequence[Any]]]:
        """(header, frames) of each group; frames that lie in the journal are fetched when they are decoded."""
        if "places" not in answer.ok:
            return split_blobs(answer.ok["groups"], answer.blobs, "reply")
        return [(header, Place(place)) for header, place in zip(answer.blobs, answer.ok["places"], strict=True)]

    def _decoded(
        self,
        ordinals: Sequence[int],
        blobs: Sequence[tuple[Buffer, Sequence[Buffer]]],
        verdicts: Sequence[Sequence[Verdict] | None],
    ) -> Plan[list[Group]]:
        """The groups; one whose arrays are not what they must be is taken out of the run, with a reason."""
        groups, bad = [], {}
        for ordinal, (header, frames), judged in zip(ordinals, blobs, verdicts, strict=True):
            try:
                if isinstance(frames, Place) and self._local:
                    frames = [self._local.body(frames)]
                groups.append(decode_group(header, frames, judged))
            except WireError as error:
                bad[ordinal] = str(error)
        if bad:
            log.error("%s drops groups that cannot be read: %s", self.holder, bad)
            yield from self._insist("drop", {"ordinals": list(bad), "reason": "unreadable"})
        return groups

    def _do(self, op: str, **args: Any) -> Plan[None]:
        yield from self._insist(op, args)

    def _stats(self) -> Plan[dict[str, Any]]:
        return (yield from self._insist("stats", {})).ok["stats"]

    # ---- waiting

    def _insist(self, op: str, args: dict[str, Any], blobs: Sequence[Buffer] = ()) -> Plan[Answer]:
        """The answer to a request that the server answers at once, however long the server is away."""
        since = time.monotonic()
        while (waited := time.monotonic() - since) < self.patience_s:
            answer = yield Ask(op, args, blobs, min(WAIT_SLICE, self.patience_s - waited))
            if answer is not None:
                return answer
            self._say(op, since, "the queue server does not answer")
        raise DeadlineError(f"an answer of the queue server at {self.connection.endpoint} to '{op}'", self.patience_s)

    def _await(self, op: str, args: dict[str, Any], wait_s: float) -> Plan[tuple[Answer | None, str]]:
        """The answer to a request that may have to wait, or (None, what it waited for) once wait_s is over."""
        since, why = time.monotonic(), "the queue server, which is there, but its answers are lost"
        while True:
            left = max(0.0, wait_s - (time.monotonic() - since))
            part = min(left, WAIT_SLICE)
            answer = yield Ask(op, {**args, "wait": part}, (), part + min(GRACE, 1.0 + wait_s))
            if answer is not None and "waiting" not in answer.ok:
                return answer, ""
            if answer is not None:
                why = answer.ok["waiting"]
            elif self.connection.silent:
                why = "the queue server does not answer"
            if time.monotonic() - since >= wait_s:
                return None, why
            self._say(op, since, why)

    def _say(self, op: str, since: float, why: str) -> None:
        """A blocked call says what it waits for, every 30 s."""
        now = time.monotonic()
        if now - max(self._since_said, since) >= WAIT_SLICE - 1.0:
            self._since_said = now
            log.warning("%s has waited %.0f s in '%s': %s", self.holder, now - since, op, why)


def resume(plan: Plan[Any], answer: Answer | HeadraceError | None) -> Ask | Work:
    """Go on with the plan: with the answer, or with the server's error raised where the plan asked."""
    return plan.throw(answer) if isinstance(answer, HeadraceError) else plan.send(answer)
