"""Proves for random runs of any shape, with late, doubled, reordered and senseless calls at every moment:

conservation and the staleness bound hold; replaying the facts, or a snapshot and the facts after it, gives the same
ledger; a call made twice has one effect; and with a fair scheduler the run ends with every step trained exactly once.
"""

from __future__ import annotations

import random
from contextlib import suppress

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rollout.errors import Drained, LedgerError, QueueError
from rollout.ledger import Ledger
from rollout.ledger_facts import Fact, Taken
from rollout.ledger_snapshot import restore, snapshot
from rollout.ledger_states import LedgerSettings, State
from rollout.types import Failed, Scored, Verdict
from rollout.wire import pack, unpack
from rollout.wire_facts import fact_row, read_fact

shapes = st.builds(
    LedgerSettings,
    groups_per_step=st.integers(1, 5),
    group_size=st.just(2),
    bound=st.integers(0, 3),
    mode=st.sampled_from(["wait", "drop"]),
    window=st.sampled_from([0.1, 0.5, 1.0]),
    max_steps=st.integers(0, 6),
    max_attempts=st.integers(1, 3),
    min_viable=st.integers(1, 2),
    max_refills=st.integers(0, 2),
)


class Run:
    """A ledger, and roles that know what they were told."""

    def __init__(self, s: LedgerSettings, rng: random.Random) -> None:
        self.ledger, self.rng, self.now = Ledger(s), rng, 0.0
        self.facts: list[Fact] = []
        self.shots: list[tuple[int, dict[str, object]]] = []

    def verdicts(self) -> tuple[Verdict, ...]:
        return tuple(
            Failed("raised") if self.rng.random() < 0.2 else Scored(float(self.rng.random() < 0.5)) for _ in "ab"
        )

    def anywhere(self) -> int:
        """An ordinal, usually one that exists."""
        return self.rng.randint(-1, self.ledger.issued)

    def step(self) -> None:
        x, rng = self.ledger, self.rng
        some, step = self.anywhere(), rng.randint(0, x.next_step)
        match rng.randrange(14):
            case 0 | 1:
                x.lease(rng.randint(1, 4), rng.choice("ab"), f"c:{rng.randrange(40)}", self.now)
            case 2 | 3:
                entry = x.entries.get(some)
                version = min(x.live, entry.version + rng.randint(0, 1)) if entry else 0
                attempt = entry.attempt - (rng.random() < 0.1) if entry else 0
                x.submit(some, attempt, entry.holder if entry and rng.random() < 0.9 else "a", 3, version, self.now)
            case 4 | 5:
                for o in x.lease_scoring(2, "s", f"c:{rng.randrange(40)}", self.now):
                    x.score(o, self.verdicts(), self.now)
            case 6:
                x.score(some, self.verdicts(), self.now)
            case 7 | 8:
                self.take(x.version if rng.random() < 0.9 else step)
            case 9:
                x.trained(x.version, x.version + 1, [some] if rng.random() < 0.1 else [])
            case 10:
                x.release(rng.randint(0, x.version))
            case 11:
                x.commit(rng.randint(0, max(0, x.version - 1)))
            case 12:
                self.now += rng.choice([1.0, 130.0])
                x.expire(self.now)
            case 13:
                self.rarely(some)

    def rarely(self, some: int) -> None:
        x, rng = self.ledger, self.rng
        match rng.randrange(6):
            case 0:
                x.restarted(rng.randint(x.committed_steps, x.version), f"r{rng.randrange(9)}")
            case 1:
                x.drop([some], "asked")
            case 2:
                x.give_back({some: 0}, "a", "asked", failed=rng.random() < 0.5)
            case 3 if rng.random() < 0.2:
                x.drain("asked")
            case 4:
                x.reconcile("c", rng.randrange(40), {some: 0}, {some}, {rng.randrange(40)})
            case _:
                x.renew("a", {some: 0}, [some], self.now)

    def take(self, step: int) -> None:
        taken = self.ledger.take(step, self.now)
        if isinstance(taken, tuple):
            ages = [step - self.ledger.entries[o].version for o in taken]
            assert max(ages, default=0) <= self.ledger.settings.bound

    def walk(self, n: int) -> None:
        """n random calls; a refused one must have changed nothing."""
        for _ in range(n):
            before = snapshot(self.ledger)
            try:
                self.step()
            except (LedgerError, QueueError) as error:
                if "in a row" not in str(error):
                    assert snapshot(self.ledger) == before and not self.ledger.facts
            except Drained:
                pass
            assert self.ledger.conserved
            self.facts += self.ledger.facts
            self.ledger.facts = []
            if self.rng.random() < 0.05:
                self.shots.append((len(self.facts), snapshot(self.ledger)))


@given(shapes, st.integers(0, 1 << 30))
@hypothesis_settings(deadline=None, max_examples=150)
def test_random_runs(shape: LedgerSettings, seed: int) -> None:
    run = Run(shape, random.Random(seed))
    run.walk(250)
    written = unpack(pack([fact_row(f) for f in run.facts]))
    for start, shot in [(0, snapshot(Ledger(shape))), *run.shots]:
        again = restore(shape, unpack(pack(shot)))
        for row in written[start:]:
            again.apply(read_fact(row))
        assert snapshot(again) == snapshot(run.ledger)
    assert_steps_repeat(run.facts)


def assert_steps_repeat(facts: list[Fact]) -> None:
    """A step that was taken twice had the same groups, but for those dropped in between; no group is in two steps."""
    steps: dict[int, tuple[int, ...]] = {}
    for fact in facts:
        if isinstance(fact, Taken):
            assert set(fact.ordinals) <= set(steps.setdefault(fact.step, fact.ordinals))
    everything = [o for groups in steps.values() for o in groups]
    assert len(everything) == len(set(everything))


@given(shapes, st.integers(0, 1 << 30))
@hypothesis_settings(deadline=None, max_examples=80)
def test_after_any_trouble_a_fair_scheduler_brings_the_run_to_its_end(shape: LedgerSettings, seed: int) -> None:
    run = Run(shape, random.Random(seed))
    run.walk(120)
    x = run.ledger
    for turn in range(2000):
        run.now += 1.0
        x.expire(run.now)
        with suppress(Drained):
            for lease in x.lease(4, "z", f"fair{turn}", run.now):
                x.submit(lease.ordinal, lease.attempt, "z", 3, x.live, run.now)
        for o in [o for o, e in x.untaken.items() if e.state is State.GENERATED]:
            x.score(o, (Scored(0.0), Scored(1.0)), run.now)
        try:
            run.take(x.version)
        except Drained:
            if x.ended and x.version == x.next_step:
                break
        except QueueError as error:
            assert "in a row" in str(error)
            return
        if any(x.entries[o].state is State.TAKEN for o in x.plan.get(x.version, ())) or x.plan.get(x.version) == ():
            x.trained(x.version, x.version + 1)
        x.release(x.version)
    assert x.ended and x.conserved
    if x.version:
        x.commit(x.version - 1)
    assert x.counts[State.COMMITTED] + sum(x.dropped.values()) == x.issued
    assert x.draining or x.version == shape.max_steps
