"""The ledger: every ordinal is trained exactly once, or dropped with a named reason. No I/O, no clock of its own.

    who            calls                      waits while                               unblocked by
    rollout actor  lease -> submit            the slots are out                         release, a drop
    reward actor   lease_scoring -> score     nothing is generated                      submit
    learner        take -> trained            fewer than P groups with signal, or one   score; expire, which ends
                                              about to grow too old, are ready          every lease sooner or later
    learner        release -> commit          never
    the server     expire (every second)      never

Each command first checks everything it needs, then states what happened as facts; applying them (ledger_books.py) is
all that changes anything. A refused command has changed nothing, and replaying the facts rebuilds the ledger exactly.

Why staleness <= S. Version v means v steps. A group occupies a slot from its first lease until the weights of the step
that trained it are live. At a lease under live version v at most (S+1)*P groups occupy slots, those of steps v, v+1
and so on among them, so the untaken ones fit into the steps up to v+S. `take` keeps it so: it never leaves behind more
groups than the following steps can hold before they are too old (rollout/selection.py), and it drops what is too old
anyhow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from rollout import ledger_facts as fact
from rollout.errors import Drained, LedgerError, QueueError
from rollout.ledger_books import Books
from rollout.ledger_states import Lease, LedgerSettings, State
from rollout.selection import Waiting, choose, forgotten, has_signal, n_scored
from rollout.types import Verdict

__all__ = ["Ledger", "LedgerSettings"]


class Ledger(Books):
    """See the map above."""

    # ---- rollout actors

    def lease(self, n: int, holder: str, key: str, now: float) -> list[Lease]:
        """Up to n ordinals, returned ones first; the same request asked twice gets the same leases.

        [] while the slots are out. Raises Drained when there will never be another.
        """
        found = [e.ordinal for e in self.untaken.values() if e.state is State.LEASED and e.key == key]
        if not found:
            found = self._leasable(n)
            if not found and self.ending and not self._unfinished(State.ISSUED, State.LEASED):
                raise Drained(self.ending)
            if found:
                attempts = tuple(self.entries[o].attempt + 1 if o in self.entries else 0 for o in found)
                self._record(fact.Leased(tuple(found), attempts, holder, key, self.live))
        for ordinal in found:
            entry = self.entries[ordinal]
            entry.deadline = now + self.settings.lease_s
            entry.first_lease = min(entry.first_lease, now)
        return [Lease(o, self.entries[o].attempt, self.settings.lease_s) for o in found]

    def _leasable(self, n: int) -> list[int]:
        """Ordinals that may be leased now, oldest first. A returned one still occupies its slot."""
        room = self.settings.slots - self.occupied
        waiting = (
            [e.ordinal for e in self.untaken.values() if e.state is State.ISSUED] if self.counts[State.ISSUED] else []
        )
        if room < 0:  # a restarted learner must first train what it had taken
            return []
        if self.draining:
            return waiting[:n]
        if self.settings.max_steps is not None:
            still_needed = (self.settings.max_steps - self.next_step) * self.settings.groups_per_step
            room = min(room, still_needed - len(self.untaken))
        new = max(0, min(n - len(waiting), room))
        return (waiting + list(range(self.issued, self.issued + new)))[:n]

    def submit(self, ordinal: int, attempt: int, holder: str, n_tokens: int, oldest_version: int, now: float) -> str:
        """ "accepted" (store the payload), "duplicate" or "late" (both: forget it). Raises LedgerError."""
        outcome = self.check_submit(ordinal, attempt, holder)
        if outcome == "accepted":
            self._record(fact.Generated(ordinal, attempt, n_tokens, oldest_version))
        return outcome

    def check_submit(self, ordinal: int, attempt: int, holder: str) -> str:
        """What `submit` would answer; changes nothing."""
        entry = self._known(ordinal, "submit")
        if entry is None or attempt < entry.attempt:
            return "late"  # dropped meanwhile, or another holds it: normal after an expired lease
        if attempt > entry.attempt:
            raise LedgerError(ordinal, entry.state, "submit", f"attempt {attempt} was never leased")
        if holder != entry.holder:
            raise LedgerError(ordinal, entry.state, "submit", f"leased to {entry.holder}, not to {holder}")
        return "accepted" if entry.state in (State.LEASED, State.ISSUED) else "duplicate"

    def give_back(self, leases: Mapping[int, int], holder: str, reason: str, failed: bool = True) -> None:
        """End leases {ordinal: attempt} without a group. Those that ended already are left alone."""
        mine = []
        for ordinal, attempt in leases.items():
            entry = self._known(ordinal, "give back")
            if entry and entry.state is State.LEASED and (entry.attempt, entry.holder) == (attempt, holder):
                mine.append(ordinal)
        self._return(mine, reason, failed)

    def renew(self, holder: str, leases: Mapping[int, int], scoring: Iterable[int], now: float) -> None:
        """A heartbeat: the holder still works on these. Leases it does not name run out."""
        for ordinal, attempt in leases.items():
            entry = self.entries.get(ordinal)
            if entry and entry.state is State.LEASED and (entry.attempt, entry.holder) == (attempt, holder):
                entry.deadline = now + self.settings.lease_s
        for ordinal in scoring:
            entry = self.entries.get(ordinal)
            if entry and entry.state is State.GENERATED and entry.scorer == holder:
                entry.deadline = now + self.settings.lease_s

    def reconcile(
        self, client: str, beat: int, leases: Mapping[int, int], scoring: Collection[int], asks: Collection[int]
    ) -> None:
        """The same heartbeat, read for what it does not say: leases that never arrived end now."""
        lost = forgotten(self.untaken.values(), client, beat, leases, scoring, asks)
        self._return([e.ordinal for e in lost if e.state is State.LEASED], "never arrived", failed=False)
        for entry in lost:
            entry.scorer = entry.scoring_key = ""

    # ---- reward actors

    def lease_scoring(self, n: int, holder: str, key: str, now: float) -> list[int]:
        """Up to n generated ordinals to score, oldest first. Not journalled: after a restart they are leased again."""
        if self.ending and not self._unfinished(State.ISSUED, State.LEASED, State.GENERATED):
            raise Drained(self.ending)
        if not self.counts[State.GENERATED]:
            return []
        generated = [e for e in self.untaken.values() if e.state is State.GENERATED]
        found = [e for e in generated if e.scoring_key == key] or [e for e in generated if not e.scorer][:n]
        for entry in found:
            entry.scorer, entry.scoring_key, entry.deadline = holder, key, now + self.settings.lease_s
        return [e.ordinal for e in found]

    def check_score(self, ordinal: int, n_verdicts: int) -> str:
        """ "accepted", "duplicate" or "late"; raises LedgerError; changes nothing."""
        entry = self._known(ordinal, "score")
        if entry is None:
            return "late"
        if n_verdicts != self.settings.group_size:
            detail = f"{n_verdicts} verdicts for {self.settings.group_size} trajectories"
            raise LedgerError(ordinal, entry.state, "score", detail)
        if entry.state in (State.ISSUED, State.LEASED):
            raise LedgerError(ordinal, entry.state, "score", "nothing was generated yet")
        return "accepted" if entry.state is State.GENERATED else "duplicate"

    def score(self, ordinal: int, verdicts: Sequence[Verdict], now: float) -> str:
        """The first verdicts win. A group without signal is dropped at once, so that its slot is free at once."""
        outcome = self.check_score(ordinal, len(verdicts))
        if outcome == "accepted":
            self._record(fact.Judged(ordinal, tuple(verdicts) if isinstance(verdicts, list) else verdicts))
            self._want_signal(ordinal, verdicts)
        return outcome

    def _want_signal(self, ordinal: int, verdicts: Sequence[Verdict]) -> None:
        s = self.settings
        if n_scored(verdicts) < s.min_viable:
            self._drop([ordinal], "too_few_scored")
        elif s.zero_signal == "drop" and not has_signal(verdicts, s.metric):
            if self.refilled["zero_signal"] < s.max_refills * s.groups_per_step:
                self._drop([ordinal], "zero_signal")
            elif not self.noticed:
                lost = self.refilled["zero_signal"]
                self._record(fact.Noticed("no_signal", f"step {self.next_step} trains without: {lost} groups had none"))

    # ---- the learner

    def take(self, step: int, now: float) -> tuple[int, ...] | Waiting:
        """The groups of `step`: the same ones whenever it is asked. Raises Drained, QueueError."""
        if step < self.next_step:
            return self._take_again(step)
        if step > self.next_step:
            raise QueueError(f"step {step} cannot be taken: the next one is step {self.next_step}")
        too_old = [
            e.ordinal
            for e in self.untaken.values()
            if e.state in (State.GENERATED, State.SCORED) and step - e.version > self.settings.bound
        ]
        self._drop(too_old, "stale")
        if self.ending and not self.untaken:
            raise Drained(self.ending)
        if self.counts[State.SCORED] < self.settings.groups_per_step:
            self._refuse_hopeless(step)
            return Waiting.for_more(step, self.untaken.values(), self.settings)
        chosen = choose(step, self.untaken.values(), self.live, self.settings)
        if isinstance(chosen, Waiting):
            return chosen
        self._record(fact.Taken(step, chosen))
        self._end_if_nothing_is_left()
        return chosen

    def _refuse_hopeless(self, step: int) -> None:
        """Rewards that always fail would otherwise be waited for, and paid for, for ever."""
        failed, s = self.refilled["too_few_scored"], self.settings
        if failed > s.max_refills * s.groups_per_step:
            raise QueueError(
                f"step {step}: {failed} groups in a row had fewer than min_viable = {s.min_viable} scored answers; "
                "look at the rewards (events.jsonl), then run again with --resume"
            )

    def _take_again(self, step: int) -> tuple[int, ...]:
        groups = self.plan.get(step)
        if groups is None:
            raise QueueError(f"step {step} cannot be taken again: steps before {self.committed_steps} are committed")
        if any(self.entries[o].state is State.SCORED for o in groups):
            self._record(fact.Taken(step, groups))
        return groups

    def trained(self, step: int, version: int, skipped: Iterable[int] = ()) -> None:
        """The optimizer step is done; groups the learner left out are dropped. Saying it twice changes nothing."""
        if version != step + 1:
            raise QueueError(f"step {step} makes version {step + 1}, not {version}")
        if step < self.version:
            return
        if step > self.version or step not in self.plan:
            raise QueueError(f"step {step} cannot be trained: the next one is step {self.version}")
        states = {o: self.entries[o].state for o in self.plan[step]}
        for ordinal in (*skipped, *states):
            if states.get(ordinal) is not State.TAKEN:
                raise LedgerError(ordinal, states.get(ordinal, f"not of step {step}"), "be trained")
        self._drop(skipped, "skipped_by_learner")
        self._record(fact.Trained(step))

    def release(self, version: int) -> None:
        """The engines serve `version`: the slots of the steps before it are free. Never goes back."""
        if version > self.version:
            raise QueueError(f"version {version} cannot be live: the learner has made {self.version}")
        if version > self.live:
            self._record(fact.Released(version))

    def commit(self, step: int) -> None:
        """A durable checkpoint contains `step`: what was trained up to it may be forgotten."""
        if step >= self.version:
            raise QueueError(f"step {step} cannot be committed: steps before {self.version} are trained")
        if step >= self.committed_steps:
            self._record(fact.Committed(step))

    def restarted(self, version: int, key: str) -> None:
        """The learner starts again from the checkpoint of `version`: later steps are to be taken again, unchanged."""
        if key in self.rewinds:
            return
        if version < self.committed_steps:
            raise QueueError(
                f"the learner cannot restart from version {version}: steps before {self.committed_steps} are committed "
                f"and forgotten; resume from a checkpoint of version {self.committed_steps} or later"
            )
        if version > self.next_step:
            raise QueueError(
                f"the learner cannot restart from version {version}: the journal ends before step {self.next_step}; "
                f"it has lost acknowledged records (durability 'os' and a power cut?), or belongs to another run"
            )
        self._record(fact.Rewound(version, key))

    # ---- ends

    def drop(self, ordinals: Iterable[int], reason: str) -> None:
        """Take ordinals out of the run. Those that are settled already are left alone."""
        known = [o for o in dict.fromkeys(ordinals) if self._known(o, "drop")]
        for ordinal in known:
            if self.entries[ordinal].state is State.TRAINED:
                raise LedgerError(ordinal, State.TRAINED, "drop")
        self._drop(known, reason)

    def drain(self, reason: str) -> None:
        """No new ordinals: whole steps are still finished, the rest is dropped as "run_ended"."""
        if not self.draining:
            self._record(fact.Draining(reason))
            self._end_if_nothing_is_left()

    def expire(self, now: float) -> None:
        """End leases past their deadline and drop what takes too long. The owner calls this about once a second."""
        unfinished = [e for e in self.untaken.values() if e.state is not State.SCORED]
        limit = self.settings.group_deadline_s
        self._drop([e.ordinal for e in unfinished if now - e.first_lease > limit], "group_deadline")
        overdue = [e for e in unfinished if now > e.deadline and e.ordinal in self.untaken]
        self._return([e.ordinal for e in overdue if e.state is State.LEASED], "expired", failed=True)
        for entry in overdue:
            if entry.state is State.GENERATED and entry.scorer:
                entry.scorer = entry.scoring_key = ""
                entry.scoring_failures += 1
                if entry.scoring_failures >= self.settings.max_attempts:
                    self._drop([entry.ordinal], "scoring_failed")

    def resume(self, now: float) -> None:
        """After a replay: fresh deadlines, for nobody knows how long the server was away; and rewards may be mended."""
        self.refilled.pop("too_few_scored", None)
        for entry in self.untaken.values():
            entry.first_lease, entry.deadline = now, now + self.settings.lease_s

    def abandon(self, reason: str) -> None:
        """After a replay, if whoever held a lease is gone as well: leases end now instead of running out."""
        self._return([e.ordinal for e in self.untaken.values() if e.state is State.LEASED], reason, failed=False)

    # ---- saying what happened

    def _return(self, ordinals: Sequence[int], reason: str, failed: bool) -> None:
        poisoned = [o for o in ordinals if failed and self.entries[o].failures + 1 >= self.settings.max_attempts]
        returned = tuple(o for o in ordinals if o not in poisoned)
        if returned:
            self._record(fact.Returned(returned, reason, failed))
        self._drop(poisoned, "poison")

    def _drop(self, ordinals: Iterable[int], reason: str) -> None:
        if gone := tuple(o for o in ordinals if o in self.entries):
            self._record(fact.Dropped(gone, reason))
            self._end_if_nothing_is_left()

    def _end_if_nothing_is_left(self) -> None:
        """Once draining, groups that cannot fill a step are dropped: the run ends instead of waiting for ever."""
        too_few = len(self.untaken) < self.settings.groups_per_step
        if self.untaken and (self._all_taken or (self.draining and too_few)):
            self._record(fact.Dropped(tuple(self.untaken), "run_ended"))
