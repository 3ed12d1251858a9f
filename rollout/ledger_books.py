"""The ledger's books: what is known about each ordinal, and how each fact changes it. Rules are elsewhere.

`apply` is the only code that changes anything; replaying the facts of a run in order gives the same books again.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import get_args

from rollout.errors import LedgerError, QueueError
from rollout.ledger_facts import (
    Committed,
    Draining,
    Dropped,
    Fact,
    Generated,
    Judged,
    Leased,
    Noticed,
    Released,
    Returned,
    Rewound,
    Taken,
    Trained,
)
from rollout.ledger_states import Entry, LedgerSettings, State
from rollout.selection import shares

_APPLIES = {kind: f"_apply_{kind.__name__.lower()}" for kind in get_args(Fact)}
HELD = (State.ISSUED, State.LEASED, State.GENERATED, State.SCORED, State.TAKEN)  # these occupy slots, and more may


class Books:
    """`facts` collects what happened since the owner last cleared it, to be journalled."""

    def __init__(self, settings: LedgerSettings) -> None:
        self.settings = settings
        self.entries: dict[int, Entry] = {}  # live ordinals, oldest first
        self.untaken: dict[int, Entry] = {}  # those of them that belong to no step yet
        self.plan: dict[int, tuple[int, ...]] = {}  # step -> its groups, until committed
        self.unreleased: dict[int, int] = {}  # step -> trained groups that still occupy slots
        self.issued = 0  # ordinals ever leased; also the next new one
        self.next_step = 0  # the first step without groups
        self.version = 0  # steps trained
        self.live = 0  # the version that the engines serve
        self.committed_steps = 0
        self.counts: Counter[State] = Counter()
        self.dropped: Counter[str] = Counter()
        self.refilled: Counter[str] = Counter()  # drops for want of signal since the last new step
        self.noticed = False  # said once per step that nothing has signal
        self.rewinds: list[str] = []
        self.draining: str | None = None
        self.poison: deque[int] = deque(maxlen=100)  # the latest ordinals that failed too often
        self.facts: list[Fact] = []

    # ---- what is so

    @property
    def occupied(self) -> int:
        """Slots in use, counted from what the ledger holds now and from nothing else."""
        return sum(self.counts[state] for state in HELD) + sum(self.unreleased.values())

    @property
    def _all_taken(self) -> bool:
        return self.settings.max_steps is not None and self.next_step >= self.settings.max_steps

    @property
    def ending(self) -> str | None:
        """Why no new ordinal will be issued, or None."""
        return f"all {self.settings.max_steps} steps are taken" if self._all_taken else self.draining

    @property
    def ended(self) -> bool:
        """No group will ever again be generated or taken for a new step."""
        return self.ending is not None and not self.untaken

    def balance(self) -> dict[str, int]:
        """Ordinals by state; `issued_total` equals the sum of the others, at every instant."""
        by_state = {str(s): self.counts[s] for s in State if s is not State.DROPPED}
        return {"issued_total": self.issued, **by_state, "dropped": sum(self.dropped.values())}

    @property
    def conserved(self) -> bool:
        total = self.balance()
        return total.pop("issued_total") == sum(total.values())

    def _unfinished(self, *states: State) -> bool:
        return any(self.counts[s] for s in states)

    def _known(self, ordinal: int, transition: str) -> Entry | None:
        """The entry, or None if it is settled (committed or dropped)."""
        if not 0 <= ordinal < self.issued:
            raise LedgerError(ordinal, "unknown", transition, f"ordinals up to {self.issued - 1} were issued")
        return self.entries.get(ordinal)

    def is_trained(self, ordinal: int) -> bool:
        entry = self.entries.get(ordinal)
        return entry is not None and entry.state is State.TRAINED

    def share(self, step: int, rank: int, world: int) -> tuple[int, ...]:
        """The part of a taken step that `rank` trains: token balanced, oldest first, the same whenever it is asked."""
        if not 0 <= rank < world:
            raise QueueError(f"rank {rank} of {world} does not exist")
        tokens = {o: self.entries[o].n_tokens for o in self.plan[step]}
        return shares(tokens, world)[rank]

    def may_serve(self, call: str, step: int = 0) -> bool:
        """False if it is plain that a waiting call of this kind ("lease", "take" of `step`) must go on waiting."""
        if self.ending:
            return True
        match call:
            case "lease":
                return self.counts[State.ISSUED] > 0 or self.occupied < self.settings.slots
            case "lease_scoring":
                return self.counts[State.GENERATED] > 0
            case "take":
                enough = self.counts[State.SCORED] >= self.settings.groups_per_step
                return enough or step < self.next_step or self.refilled["too_few_scored"] > 0
        return True

    # ---- making it so

    def _record(self, fact: Fact) -> None:
        self.apply(fact)
        self.facts.append(fact)

    def apply(self, fact: Fact) -> None:
        """Make a fact so. Replay calls this too: it checks nothing and decides nothing."""
        getattr(self, _APPLIES[type(fact)])(fact)

    def _move(self, entry: Entry, state: State) -> None:
        self.counts[entry.state] -= 1
        self.counts[state] += 1
        entry.state = state

    def _apply_leased(self, fact: Leased) -> None:
        for ordinal, attempt in zip(fact.ordinals, fact.attempts, strict=True):
            entry = self.entries.get(ordinal)
            if entry is None:
                entry = Entry(ordinal, State.LEASED, attempt, fact.holder, fact.key, fact.version)
                self.entries[ordinal] = self.untaken[ordinal] = entry
                self.counts[State.LEASED] += 1
                self.issued = max(self.issued, ordinal + 1)
            else:
                self._move(entry, State.LEASED)
                entry.attempt, entry.holder, entry.key, entry.version = attempt, fact.holder, fact.key, fact.version

    def _apply_returned(self, fact: Returned) -> None:
        for ordinal in fact.ordinals:
            entry = self.entries[ordinal]
            self._move(entry, State.ISSUED)
            entry.failures += fact.failed

    def _apply_generated(self, fact: Generated) -> None:
        entry = self.entries[fact.ordinal]
        self._move(entry, State.GENERATED)
        entry.n_tokens, entry.version, entry.scorer = fact.n_tokens, fact.oldest_version, ""

    def _apply_judged(self, fact: Judged) -> None:
        entry = self.entries[fact.ordinal]
        self._move(entry, State.SCORED)
        entry.verdicts, entry.scorer, entry.scoring_key = fact.verdicts, "", ""

    def _apply_taken(self, fact: Taken) -> None:
        self.plan[fact.step] = fact.ordinals
        if fact.step >= self.next_step:
            self.next_step = fact.step + 1
            self.refilled.clear()
            self.noticed = False
        for ordinal in fact.ordinals:
            entry = self.entries[ordinal]
            self._move(entry, State.TAKEN)
            entry.step = fact.step
            self.untaken.pop(ordinal, None)

    def _apply_trained(self, fact: Trained) -> None:
        for ordinal in self.plan[fact.step]:
            self._move(self.entries[ordinal], State.TRAINED)
        self.unreleased[fact.step] = len(self.plan[fact.step])
        self.version = fact.step + 1

    def _apply_released(self, fact: Released) -> None:
        self.live = fact.version
        self.unreleased = {s: n for s, n in self.unreleased.items() if s >= fact.version}

    def _apply_committed(self, fact: Committed) -> None:
        for step in range(self.committed_steps, fact.step + 1):
            for ordinal in self.plan.pop(step):
                self._move(self.entries.pop(ordinal), State.COMMITTED)
        self.committed_steps = fact.step + 1

    def _apply_dropped(self, fact: Dropped) -> None:
        for ordinal in fact.ordinals:
            entry = self.entries.pop(ordinal)
            self.untaken.pop(ordinal, None)
            self.counts[entry.state] -= 1
            if entry.step is not None:
                self.plan[entry.step] = tuple(o for o in self.plan[entry.step] if o != ordinal)
        self.dropped[fact.reason] += len(fact.ordinals)
        self.refilled[fact.reason] += len(fact.ordinals)
        if fact.reason == "poison":
            self.poison.extend(fact.ordinals)

    def _apply_rewound(self, fact: Rewound) -> None:
        for step, ordinals in self.plan.items():
            for entry in (self.entries[o] for o in ordinals):
                self._move(entry, State.SCORED if step >= fact.version else State.TRAINED)
        self.unreleased.clear()
        self.version = self.live = fact.version
        self.rewinds.append(fact.key)

    def _apply_draining(self, fact: Draining) -> None:
        self.draining = fact.reason

    def _apply_noticed(self, fact: Noticed) -> None:
        self.noticed = True
