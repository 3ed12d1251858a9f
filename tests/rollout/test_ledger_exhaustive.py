"""Explores every state the ledger can reach in small runs, with up to two failures at any moment, and proves:

    the staleness bound is never broken            slots are never exceeded (but by a learner that was set back)
    conservation holds in every state              from every state, whatever happens next, the run ends
    a step taken again consists of the same groups

An event is anything a role may do, a failure anything that goes wrong: a lease lost, a group without signal, a scorer
lost, a learner set back to its checkpoint, an operator who drains the run. Time does not pass; deadlines are events.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import pytest

from rollout.errors import Drained
from rollout.ledger import Ledger
from rollout.ledger_states import Entry, LedgerSettings, State
from tests.rollout.queue_samples import FLAT, GOOD

Event = Callable[[Ledger], None]


def clone(old: Ledger) -> Ledger:
    new = Ledger(old.settings)
    new.entries = {o: replace(e) for o, e in old.entries.items()}
    new.untaken = {o: new.entries[o] for o in old.untaken}
    new.plan, new.unreleased = dict(old.plan), dict(old.unreleased)
    new.counts, new.dropped, new.refilled = Counter(old.counts), Counter(old.dropped), Counter(old.refilled)
    for name in ("issued", "next_step", "version", "live", "committed_steps", "draining", "noticed"):
        setattr(new, name, getattr(old, name))
    return new


def kind(e: Entry) -> tuple[object, ...]:
    """Groups of one kind are interchangeable: their numbers break ties and decide nothing else."""
    return (e.state, e.version, e.failures if e.state in (State.LEASED, State.ISSUED) else 0)


def key(x: Ledger) -> Hashable:
    """What decides the ledger's future. With a window below the slots the order of the groups is part of it."""
    kinds = [kind(e) for e in x.untaken.values()]
    waiting = tuple(e.failures for e in x.untaken.values() if e.state is State.ISSUED)  # leased again in this order
    untaken = tuple(kinds) if x.settings.reorder < x.settings.slots else (*sorted(kinds), waiting)
    plan = tuple((s, len(groups), x.entries[groups[0]].state) for s, groups in sorted(x.plan.items()))
    counters = (x.next_step, x.version, x.live, x.committed_steps, x.draining is None)
    return untaken, plan, tuple(sorted(x.unreleased.items())), counters, x.refilled["zero_signal"]


def lease(x: Ledger) -> None:
    x.lease(1, "a", f"a:{x.issued}", 0.0)


def take(x: Ledger, step: int) -> None:
    before = x.plan.get(step)
    taken = x.take(step, 0.0)
    if isinstance(taken, tuple):
        assert before in (None, taken), "a step taken again is the same"
        for ordinal in taken:
            assert step - x.entries[ordinal].version <= x.settings.bound, "the staleness bound is broken"


def one_of_each(x: Ledger) -> Iterable[tuple[int, Entry]]:
    return {
        (*kind(e), o if x.settings.reorder < x.settings.slots else 0): (o, e) for o, e in x.untaken.items()
    }.values()


def events(x: Ledger) -> Iterator[Event]:
    """All that may happen next without anything going wrong."""
    yield lease
    for o, e in one_of_each(x):
        if e.state is State.LEASED:
            for version in {e.version, max(e.version, x.live)}:  # begun at once, or after the next weights came
                yield lambda y, o=o, a=e.attempt, v=version: y.submit(o, a, "a", 1, v, 0.0)
        elif e.state is State.GENERATED:
            yield lambda y, o=o: y.score(o, GOOD, 0.0)
    yield lambda y: take(y, y.version)
    if any(e.state is State.TAKEN and e.step == x.version for e in x.entries.values()):
        yield lambda y: y.trained(y.version, y.version + 1)
    if x.live < x.version:
        yield lambda y: y.release(y.version)
    if x.committed_steps < x.live:
        yield lambda y: y.commit(y.live - 1)


def failures(x: Ledger) -> Iterator[Event]:
    """All that may go wrong next."""
    for o, e in one_of_each(x):
        if e.state is State.LEASED:
            yield lambda y, o=o, a=e.attempt: y.give_back({o: a}, "a", "lost")
        elif e.state is State.GENERATED:
            yield lambda y, o=o: y.score(o, FLAT, 0.0)
    if x.committed_steps < x.next_step:
        yield lambda y: y.restarted(y.committed_steps, f"{y.version}:{y.live}:{y.next_step}:{len(y.rewinds)}")
    if not x.draining:
        yield lambda y: y.drain("stopped")


@dataclass
class Explored:
    """The graph: states by number, edges without failures, and which states are ends."""

    edges: list[set[int]]
    ends: set[int]


def explore(settings: LedgerSettings, max_failures: int) -> Explored:
    """Breadth first over (ledger, failures so far)."""
    numbers: dict[Hashable, int] = {}
    found = Explored([], set())
    frontier: deque[tuple[int, Ledger, int]] = deque()

    def visit(ledger: Ledger, failed: int) -> int:
        name = (key(ledger), failed)
        if name not in numbers:
            numbers[name] = len(numbers)
            found.edges.append(set())
            check(ledger, failed)
            frontier.append((numbers[name], ledger, failed))
        return numbers[name]

    visit(Ledger(settings), 0)
    while frontier:
        here, ledger, failed = frontier.popleft()
        for event in events(ledger):
            if (there := visit(happened(ledger, event), failed)) != here:
                found.edges[here].add(there)
        for event in failures(ledger) if failed < max_failures else ():
            visit(happened(ledger, event), failed + 1)
        if not found.edges[here]:
            assert at_the_end(ledger), f"nothing can happen any more: {ledger.balance()}, {ledger.draining}"
            found.ends.add(here)
    return found


def happened(ledger: Ledger, event: Event) -> Ledger:
    after = clone(ledger)
    with suppress(Drained):
        event(after)
    return after


def check(x: Ledger, failed: int) -> None:
    assert x.conserved, x.balance()
    assert x.untaken.keys() == {o for o, e in x.entries.items() if e.step is None}
    assert x.counts == Counter(e.state for e in x.entries.values()) + Counter(
        {State.COMMITTED: x.counts[State.COMMITTED]}
    )
    if failed == 0:
        assert x.occupied <= x.settings.slots


def at_the_end(x: Ledger) -> bool:
    """Every step is trained, released and committed, and everything else is dropped with a reason."""
    balance = x.balance()
    settled = balance["committed"] + balance["dropped"] == balance["issued_total"]
    return x.ended and settled and x.committed_steps == x.next_step


def assert_it_ends(found: Explored) -> None:
    """Without cycles and with no dead end but the end itself, every run from every state ends (Kahn's algorithm)."""
    arrows = [0] * len(found.edges)
    for targets in found.edges:
        for there in targets:
            arrows[there] += 1
    free = [n for n, count in enumerate(arrows) if count == 0]
    removed = 0
    while free:
        removed += 1
        for there in found.edges[free.pop()]:
            arrows[there] -= 1
            if arrows[there] == 0:
                free.append(there)
    assert removed == len(found.edges), "some runs never end"
    assert found.ends


def small(steps: int, bound: int, p: int, mode: str, window: float = 1.0) -> LedgerSettings:
    return LedgerSettings(
        groups_per_step=p, group_size=2, bound=bound, max_steps=steps, mode=mode, window=window,  # type: ignore[arg-type]
        min_viable=1, max_attempts=2, max_refills=1,
    )  # fmt: skip


QUICK = [
    *((small(4, bound, 1, mode), 2) for bound in (0, 1) for mode in ("wait", "drop")),
    *((small(3, 2, 1, mode), 1) for mode in ("wait", "drop")),
    *((small(2, bound, 2, mode), 1) for bound in (0, 1) for mode in ("wait", "drop")),
    (small(3, 2, 1, "wait", 0.4), 1),
    (small(2, 1, 2, "wait", 0.5), 1),
]


@pytest.mark.parametrize(("settings", "max_failures"), QUICK, ids=lambda x: str(x) if isinstance(x, int) else _name(x))
def test_every_small_run(settings: LedgerSettings, max_failures: int) -> None:
    found = explore(settings, max_failures)
    assert len(found.edges) > 30
    assert_it_ends(found)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["wait", "drop"])
@pytest.mark.parametrize("bound", [0, 1, 2])
def test_every_run_of_four_steps_of_two_groups(bound: int, mode: str) -> None:
    assert_it_ends(explore(small(4, bound, 2, mode), 2))


def _name(s: LedgerSettings) -> str:
    return f"{s.max_steps}x{s.groups_per_step}-S{s.bound}-{s.mode}-W{s.reorder}"


def test_the_exploration_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the look ahead in `choose`, or without the slots, it finds the run that grows too old."""
    monkeypatch.setattr("rollout.selection._too_late", lambda *_: [])
    monkeypatch.setattr("rollout.ledger.Ledger._drop", lambda *_: None)
    with pytest.raises(AssertionError, match="bound is broken"):
        explore(small(3, 1, 1, "wait"), 0)
