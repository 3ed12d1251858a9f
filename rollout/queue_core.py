"""What the queue server does with a request, free of sockets and threads: ledger + journal + payloads.

handle(request, now) -> Reply      answered, once `flush` has made it durable
                     -> Waiting    cannot be answered yet: ask again when something has happened, or the wait is over
                     raises        a typed error, and nothing has changed

each fact the ledger states is journalled in order (rollout/queue_records.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rollout.errors import QueueError, WireError
from rollout.journal import Journal
from rollout.journal_records import generated
from rollout.journal_segments import Ref
from rollout.ledger import Ledger
from rollout.ledger_facts import Committed, Dropped, Fact, Trained
from rollout.ledger_snapshot import restore, snapshot
from rollout.ledger_states import LedgerSettings, State
from rollout.payloads import Payloads
from rollout.queue_figures import TOLD, describe, tell
from rollout.queue_intake import Placed, Sent, read_groups, read_leases, read_scores
from rollout.queue_protocol import Request, pack_blobs
from rollout.queue_records import Records
from rollout.retention import Retention
from rollout.selection import Waiting
from rollout.wire import Buffer
from rollout.wire_facts import read_fact
from rollout.wire_verdicts import verdicts_table

LETS_GO = (Dropped, Trained, Committed)
Event = Callable[..., object]  # event("dropped", ordinals=[17], reason="stale")


@dataclass(slots=True)
class Reply:
    """What goes back, once it is durable."""

    ok: dict[str, Any] = field(default_factory=dict)
    blobs: Sequence[Buffer] = ()
    done: bool = True  # False: the client must do something first, and ask again


class QueueCore:
    """One run's queue. Made by recovering whatever the journal holds."""

    ledger_type = Ledger
    place_from = 64 << 10  # bytes handed in at once that a client on this host writes into the journal's folder itself

    def __init__(self, settings: LedgerSettings, journal: Journal, max_bytes: int, event: Event, now: float) -> None:
        self.journal, self.event = journal, event
        self.ledger = self.ledger_type(settings)
        self.payloads = Payloads(journal, max_bytes)
        self.retained = Retention(journal.live, journal.retain)
        self.changes = 0  # grows whenever a fact was stated: somebody who waits may be served
        self.staleness: dict[str, float] = {"mean": 0.0, "max": 0.0, "max_ever": 0.0}
        self._records = Records(journal, self.payloads)
        self._recover(settings)
        self.ledger.resume(now)
        journal.begin(self.snapshot())
        journal.collect()
        for ordinal in [o for o, p in self.payloads.held.items() if p.placed and not self.ledger.is_trained(o)]:
            self._readable(ordinal, self.payloads.get)  # the scan has checked those in segments
        self.record({})

    def _recover(self, settings: LedgerSettings) -> None:
        for value, ref in self.journal.recover():
            kind, first = value[0], value[1]
            if kind == "snapshot":
                self.ledger = restore(settings, first["ledger"], self.ledger_type)
                for ordinal, *place in first["payloads"]:
                    self.payloads.put_on_disk(ordinal, Ref(*place[:4]), told=place[-1] if place[4:] else place[0])
                self.retained.restore(first["retained"])
            elif kind == "facts":
                for fact in map(read_fact, first):
                    self.ledger.apply(fact)
                    if type(fact) in LETS_GO:
                        self._let_go(fact)
            else:
                for made, place in generated(value, ref):
                    self.ledger.apply(made)
                    self.payloads.put_on_disk(made.ordinal, place, ref.segment)
        for torn in self.journal.torn:
            self.event("journal_torn", segment=torn.segment, dropped_bytes=torn.dropped, reason=torn.why)
        if self.ledger.issued:
            self.event("queue_recovered", **self.ledger.balance(), step=self.ledger.next_step)

    def forget_clients(self) -> None:
        """Nobody who held a lease before is left; see `Ledger.abandon`."""
        self.ledger.abandon("the run was started again")
        self.record({})

    def snapshot(self) -> dict[str, Any]:
        places = [[o, *p.ref.row, p.told] for o, p in self.payloads.held.items()]
        return {"ledger": snapshot(self.ledger), "payloads": places, "retained": self.retained.rows}

    # ---- requests

    def handle(self, request: Request, now: float) -> Reply | Waiting:
        """Answer one request. What it changed is journalled, though not yet flushed."""
        handler = _HANDLERS.get(request.op)
        if handler is None:
            raise WireError("request.op", f"{request.op!r} is unknown; this server knows {', '.join(_HANDLERS)}")
        try:
            return handler(self, request, now)
        finally:
            self.record({})

    def lease(self, r: Request, now: float) -> Reply | Waiting:
        leases = self.ledger.lease(r.int("n", 1, 1 << 20), r.holder, r.key, now)
        if not leases:
            used, slots = self.ledger.occupied, self.ledger.settings.slots
            return Waiting(f"a free slot: {used} of {slots} are in use ({self._states()})")
        return Reply({"leases": [[x.ordinal, x.attempt, x.deadline] for x in leases]})

    def submit(self, r: Request, now: float) -> Reply | Waiting:
        groups = read_groups(r, self.ledger.settings.group_size)
        outcomes = [self.ledger.check_submit(g.brief.ordinal, g.brief.attempt, r.holder) for g in groups]
        pairs: Iterable[tuple[Sent | Placed, str]] = zip(groups, outcomes, strict=True)
        accepted = {g.brief.ordinal: g for g, outcome in pairs if outcome == "accepted"}
        arriving = sum([g.nbytes for g in accepted.values()])
        if not self._admits(arriving, [g.brief.ordinal for g in groups]):
            return Reply({"busy": arriving}, done=False)
        if not self.journal.placed.holds([g.place for g in accepted.values() if isinstance(g, Placed)]):
            return Reply({"unplaced": True}, done=False)
        for ordinal, g in accepted.items():
            b = g.brief
            self.ledger.submit(ordinal, b.attempt, r.holder, b.n_tokens, b.oldest_version, now)
        for ordinal, g in accepted.items():
            if g.verdicts is not None:
                self.ledger.score(ordinal, g.verdicts, now)
        self.record(accepted, r.client)
        return Reply({"outcomes": outcomes})

    def _admits(self, arriving: int, ordinals: Sequence[int]) -> bool:
        """Room in memory, or a group that the next step needs: those are let in so that the run can go on."""
        if self.payloads.room_for(arriving):
            return True
        untaken, p = iter(self.ledger.untaken), self.ledger.settings.groups_per_step
        needed = {o for o, _ in zip(untaken, range(p), strict=False)}
        return any(o in needed for o in ordinals)

    def room(self, r: Request, now: float) -> Reply | Waiting:
        wanted = r.int("bytes", 0, 1 << 62)
        if self._admits(wanted, r.ints("ordinals", 0, 1 << 62)):
            return Reply()
        held = f"{self.payloads.bytes_waiting} of {self.payloads.max_bytes}"
        return Waiting(f"room for {wanted} bytes: {held} are held until the learner takes groups")

    def give_back(self, r: Request, now: float) -> Reply:
        self.ledger.give_back(read_leases(r), r.holder, r.str("reason", 4096), r.bool("failed"))
        return Reply()

    def beat(self, r: Request, now: float) -> Reply:
        leases, scoring = read_leases(r), set(r.ints("scoring", 0, 1 << 62))
        self.ledger.renew(r.holder, leases, scoring, now)
        self.ledger.reconcile(r.client, r.seq, leases, scoring, set(r.ints("outstanding", 0, 1 << 62)))
        return Reply()

    def lease_scoring(self, r: Request, now: float) -> Reply | Waiting:
        ordinals = self.ledger.lease_scoring(r.int("n", 1, 1 << 20), r.holder, r.key, now)
        if not ordinals:
            return Waiting(f"a generated group to score ({self._states()})")
        return self._send_groups(ordinals, r.bool("local"), r.bool("full"))[1]

    def score(self, r: Request, now: float) -> Reply:
        scored = read_scores(r)
        for ordinal, verdicts in scored:
            self.ledger.check_score(ordinal, len(verdicts))
        return Reply({"outcomes": [self.ledger.score(o, v, now) for o, v in scored]})

    def take(self, r: Request, now: float) -> Reply | Waiting:
        step, rank, world = r.int("step", 0, 1 << 40), r.int("rank", 0, 1 << 16), r.int("world", 1, 1 << 16)
        if isinstance(taken := self.ledger.take(step, now), Waiting):
            return taken
        ages = [step - self.ledger.entries[o].version for o in taken]
        if ages:
            worst = max(self.staleness["max_ever"], *ages)
            self.staleness = {"mean": sum(ages) / len(ages), "max": max(ages), "max_ever": worst}
        found, answer = self._send_groups(self.ledger.share(step, rank, world), r.bool("local"), full=True)
        answer.ok["verdicts"] = verdicts_table([self.ledger.entries[o].verdicts for o in found])
        return answer

    def _send_groups(self, ordinals: Iterable[int], local: bool, full: bool) -> tuple[list[int], Reply]:
        """Groups with their arrays or, for a client on this host, with the places where it finds them."""
        if local and self.payloads.files:
            read: Callable[[int], Any] = partial(self.payloads.place, full=full)
        else:
            read = self.payloads.get if full else self.payloads.tokens_only
        groups = [(o, g) for o in ordinals if (g := self._readable(o, read))]
        found, read_ones = [o for o, _ in groups], [g for _, g in groups]
        if local and self.payloads.files:
            return found, Reply({"ordinals": found, "places": read_ones})
        counts, blobs = pack_blobs(read_ones)
        return found, Reply({"ordinals": found, "groups": counts}, blobs)

    def _readable(self, ordinal: int, read: Callable[[int], Any]) -> Any:
        """The group, or None: what the disk has damaged is dropped with that reason."""
        try:
            return read(ordinal)
        except (QueueError, OSError) as error:
            self.event("alarm", what="journal_damaged", detail=f"ordinal {ordinal}: {error}")
            self.ledger.drop([ordinal], "journal_damaged")
            return None

    def trained(self, r: Request, now: float) -> Reply:
        self.ledger.trained(r.int("step", 0, 1 << 40), r.int("version", 0, 1 << 40), r.ints("skipped", 0, 1 << 62))
        return self.release(r, now) if "live" in r.value and r.bool("live") else Reply()

    def release(self, r: Request, now: float) -> Reply:
        self.ledger.release(r.int("version", 0, 1 << 40))
        return Reply()

    def commit(self, r: Request, now: float) -> Reply:
        self.ledger.commit(r.int("step", 0, 1 << 40))
        return Reply()

    def restarted(self, r: Request, now: float) -> Reply:
        self.ledger.restarted(r.int("version", 0, 1 << 40), r.str("key", 64))
        return Reply()

    def drop(self, r: Request, now: float) -> Reply:
        self.ledger.drop(r.ints("ordinals", 0, 1 << 62), r.str("reason", 256))
        return Reply()

    def drain(self, r: Request, now: float) -> Reply:
        self.ledger.drain(r.str("reason", 4096))
        return Reply()

    def where(self, r: Request, now: float) -> Reply:
        """Where the payload lies. A client that finds the server's epoch there can read it, and add to it."""
        placing = [self.place_from, self.journal.segment_bytes, self.journal.checks]
        return Reply({"folder": str(self.journal.folder.resolve()), "placing": placing})

    def stats(self, r: Request, now: float) -> Reply:
        return Reply({"stats": describe(self)})

    # ---- between requests

    def tick(self, now: float) -> None:
        """Let overdue leases and groups go."""
        self.ledger.expire(now)
        self.record({})

    def record(self, groups: Mapping[int, Sent | Placed], client: str = "") -> None:
        """Journal what the ledger has stated since the last time, and do what follows from it."""
        if not self.ledger.facts:
            return
        facts, self.ledger.facts = self.ledger.facts, []
        self.changes += 1
        self._records.add(facts, groups, client)
        for fact in facts:
            if type(fact) in LETS_GO:
                self._let_go(fact)
            if type(fact) in TOLD:
                tell(self.event, fact)

    def flush(self) -> None:
        """Make everything durable, then open a new segment if it is time to. Raises Stalled."""
        self._records.close()
        self.journal.flush()
        self.payloads.flushed()
        if self.journal.full:
            self.journal.roll(self.snapshot())

    def _let_go(self, fact: Fact) -> None:
        """Payload that nobody will ask for again, or not soon."""
        match fact:
            case Dropped(ordinals):
                self.payloads.forget(ordinals)
            case Trained(step):
                self.payloads.trained(self.ledger.plan.get(step, ()))
            case Committed(step):
                gone = {o: p for o, p in self.payloads.held.items() if o not in self.ledger.entries}
                self.retained.committed(step, [n for p in gone.values() for n in (p.ref.segment, p.told)])
                self.payloads.forget(gone)

    def _states(self) -> str:
        shown = (State.ISSUED, State.LEASED, State.GENERATED, State.SCORED, State.TAKEN, State.TRAINED)
        return ", ".join(f"{self.ledger.counts[s]} {s}" for s in shown if self.ledger.counts[s]) or "nothing yet"


_HANDLERS: dict[str, Callable[[QueueCore, Request, float], Reply | Waiting]] = {
    name: getattr(QueueCore, name)
    for name in (
        *("lease", "submit", "room", "give_back", "beat", "lease_scoring", "score"),
        *("take", "trained", "release", "commit", "restarted", "drop", "drain", "stats", "where"),
    )
}
