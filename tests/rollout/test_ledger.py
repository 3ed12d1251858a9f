"""Proves the rules of the ledger one by one: what each command does, what it refuses, and that a refusal is void."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rollout.errors import ConfigError, Drained, LedgerError, QueueError
from rollout.ledger import Ledger
from rollout.ledger_snapshot import restore, snapshot
from rollout.ledger_states import LedgerSettings, State
from rollout.selection import Waiting, shares
from rollout.types import Failed, Scored, TimedOut
from tests.rollout.queue_samples import FLAT, GOOD, learn, produce, settings


def fresh(**changes: object) -> Ledger:
    return Ledger(settings(**changes))


def lease(ledger: Ledger, n: int, holder: str = "a", key: str = "", now: float = 0.0) -> list[int]:
    return [x.ordinal for x in ledger.lease(n, holder, key or f"{holder}:{ledger.issued}:{now}", now)]


def filled(**changes: object) -> Ledger:
    """Four groups, scored."""
    ledger = fresh(**changes)
    for ordinal in lease(ledger, 4):
        produce(ledger, ordinal)
    return ledger


# ---- slots


def test_slots_bound_what_is_under_way_and_release_frees_them() -> None:
    ledger = filled()
    assert lease(ledger, 5) == []
    assert ledger.take(0, 0.0) == (0, 1)
    ledger.trained(0, 1)
    assert lease(ledger, 5) == [], "trained is not enough: the new weights must be live"
    ledger.release(1)
    assert lease(ledger, 5) == [4, 5]


def test_slots_are_counted_from_what_is_there_now() -> None:
    """A thousand drops and re-leases later the room is what it was."""
    ledger = fresh(max_attempts=2)
    for now in range(0, 100_000, 200):
        lease(ledger, 9, now=float(now))
        ledger.expire(now + 121.0)
        ledger.drop(list(ledger.entries), "test")
        assert ledger.occupied == 0 and ledger.conserved
    assert len(lease(ledger, 9)) == 4


def test_a_slot_stays_with_its_ordinal_over_a_new_lease() -> None:
    ledger = fresh()
    assert lease(ledger, 4) == [0, 1, 2, 3]
    ledger.give_back({2: 0}, "a", "restart", failed=False)
    assert lease(ledger, 9, "b") == [2]
    assert ledger.entries[2].attempt == 1 and ledger.entries[2].failures == 0


def test_no_more_is_issued_than_the_remaining_steps_need() -> None:
    ledger = fresh(max_steps=1)
    assert lease(ledger, 9) == [0, 1]
    produce(ledger, 0, FLAT)  # dropped: one more is needed
    assert lease(ledger, 9) == [2]


# ---- leases


def test_the_same_request_gets_the_same_leases() -> None:
    ledger = fresh()
    first = ledger.lease(2, "a", "k", 0.0)
    assert ledger.lease(2, "a", "k", 5.0) == first
    assert ledger.issued == 2


def test_an_expired_lease_goes_to_somebody_else_and_then_to_poison() -> None:
    ledger = fresh(max_attempts=2)
    lease(ledger, 1)
    ledger.expire(121.0)
    assert ledger.entries[0].state is State.ISSUED
    assert lease(ledger, 1, "b", now=121.0) == [0]
    ledger.expire(242.0)
    assert ledger.dropped == {"poison": 1} and list(ledger.poison) == [0]


def test_heartbeats_keep_only_what_they_name() -> None:
    ledger = fresh()
    lease(ledger, 2)
    ledger.renew("a", {0: 0}, [], now=100.0)
    ledger.renew("b", {1: 0}, [], now=100.0)
    ledger.expire(130.0)
    assert [ledger.entries[o].state for o in (0, 1)] == [State.LEASED, State.ISSUED]


def test_heartbeats_end_the_leases_that_never_arrived() -> None:
    """Request 3 got 0 and 1, request 5 got 2, request 9 got 3; the beat 8 names 0 and still waits for 5."""
    ledger = fresh()
    for seq, n in ((3, 2), (5, 1), (9, 1)):
        lease(ledger, n, "a", f"c:{seq}")
    ledger.reconcile("other", 8, {}, set(), set())
    ledger.reconcile("c", 8, {0: 0}, set(), {5})
    states = {o: e.state for o, e in ledger.entries.items()}
    assert states == {0: State.LEASED, 1: State.ISSUED, 2: State.LEASED, 3: State.LEASED}
    assert ledger.entries[1].failures == 0
    for ordinal in (0, 2):
        produce(ledger, ordinal, None)
    assert ledger.lease_scoring(4, "a", "c:10", 0.0) == [0, 2]
    ledger.reconcile("c", 12, {3: 0}, {0}, set())
    assert ledger.lease_scoring(4, "b", "d:1", 0.0) == [2]


def test_a_group_that_takes_for_ever_is_dropped_even_with_heartbeats() -> None:
    ledger = fresh()
    lease(ledger, 1)
    for now in range(0, 700, 50):
        ledger.renew("a", {0: 0}, [], float(now))
        ledger.expire(float(now))
    assert ledger.dropped == {"group_deadline": 1}


def test_scoring_leases_expire_and_are_handed_on() -> None:
    ledger = fresh(max_attempts=2)
    lease(ledger, 1)
    produce(ledger, 0, None)
    assert ledger.lease_scoring(4, "s", "k", 0.0) == [0]
    assert ledger.lease_scoring(4, "s", "k", 1.0) == [0], "the same request"
    assert ledger.lease_scoring(4, "t", "l", 1.0) == []
    ledger.expire(122.0)
    assert ledger.lease_scoring(4, "t", "l", 122.0) == [0]
    ledger.expire(244.0)
    assert ledger.dropped == {"scoring_failed": 1}


# ---- submit and score


def test_a_group_is_accepted_once() -> None:
    ledger = fresh()
    lease(ledger, 2)
    assert [ledger.submit(0, 0, "a", 8, 0, 0.0) for _ in range(2)] == ["accepted", "duplicate"]
    ledger.drop([1], "test")
    assert ledger.submit(1, 0, "a", 8, 0, 0.0) == "late"


def test_a_late_group_is_welcome_unless_somebody_else_has_begun() -> None:
    ledger = fresh()
    lease(ledger, 2)
    ledger.expire(121.0)
    assert ledger.submit(0, 0, "a", 8, 0, 122.0) == "accepted"
    assert lease(ledger, 1, "b", now=122.0) == [1]
    assert ledger.submit(1, 0, "a", 8, 0, 122.0) == "late"


def test_the_first_verdicts_win() -> None:
    ledger = fresh()
    lease(ledger, 1)
    produce(ledger, 0)
    assert ledger.score(0, FLAT, 0.0) == "duplicate"
    assert ledger.entries[0].verdicts == GOOD


REFUSALS: dict[str, Callable[[Ledger], object]] = {
    "an ordinal nobody issued": lambda x: x.submit(9, 0, "a", 8, 0, 0.0),
    "a negative ordinal": lambda x: x.submit(-1, 0, "a", 8, 0, 0.0),
    "another's lease": lambda x: x.submit(3, 0, "b", 8, 0, 0.0),
    "another's lease, already generated": lambda x: x.submit(2, 0, "b", 8, 0, 0.0),
    "an attempt that never was": lambda x: x.submit(3, 1, "a", 8, 0, 0.0),
    "verdicts for an unknown ordinal": lambda x: x.score(9, GOOD, 0.0),
    "verdicts before there is a group": lambda x: x.score(3, GOOD, 0.0),
    "too many verdicts": lambda x: x.score(2, (*GOOD, Scored(0.0)), 0.0),
    "a step too far": lambda x: x.take(2, 0.0),
    "training what was not taken": lambda x: x.trained(1, 2),
    "a version that does not follow": lambda x: x.trained(0, 2),
    "skipping what is not of the step": lambda x: x.trained(0, 1, skipped=[2]),
    "releasing a version not made yet": lambda x: x.release(1),
    "committing a step not trained": lambda x: x.commit(0),
    "restarting in the future": lambda x: x.restarted(7, "k"),
    "a rank that does not exist": lambda x: x.share(0, 2, 2),
    "giving back what was never issued": lambda x: x.give_back({9: 0}, "a", "r"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_changes_nothing(name: str) -> None:
    """0 and 1 taken, 2 generated, 3 leased."""
    ledger = fresh()
    lease(ledger, 4)
    for ordinal in (0, 1):
        produce(ledger, ordinal)
    produce(ledger, 2, None)
    ledger.take(0, 0.0)
    before, ledger.facts = snapshot(ledger), []
    with pytest.raises((LedgerError, QueueError)) as caught:
        REFUSALS[name](ledger)
    assert snapshot(ledger) == before and ledger.facts == []
    assert any(ch.isdigit() for ch in str(caught.value)), "it names the ordinal, step or version"


def test_settings_that_cannot_work_are_refused() -> None:
    for change in ({"groups_per_step": 0}, {"window": 0.0}, {"min_viable": 3}, {"mode": "maybe"}, {"bound": -1}):
        with pytest.raises(ConfigError, match=f"LedgerSettings.{next(iter(change))}"):
            settings(**change)


# ---- signal


def test_groups_without_signal_are_dropped_and_replaced() -> None:
    ledger = fresh(min_viable=2)
    lease(ledger, 4)
    produce(ledger, 0, FLAT)
    produce(ledger, 1, (Scored(1.0), Failed("raised")))
    produce(ledger, 2, (Scored(1.0), Scored(1.0 + 1e-8)))
    assert ledger.dropped == {"zero_signal": 2, "too_few_scored": 1}
    assert lease(ledger, 9) == [4, 5, 6]


def test_signal_is_looked_for_in_the_named_component() -> None:
    ledger = fresh(metric="exact")
    lease(ledger, 2)
    produce(ledger, 0, (Scored(0.9, {"exact": 1.0}), Scored(1.0, {"exact": 1.0})))
    produce(ledger, 1, (Scored(1.0, {"exact": 0.0}), Scored(1.0, {"exact": 1.0})))
    assert ledger.dropped == {"zero_signal": 1} and ledger.counts[State.SCORED] == 1


def test_when_nothing_has_signal_the_run_goes_on_and_says_so() -> None:
    ledger = fresh(max_refills=1)
    for _ in range(2):
        for ordinal in lease(ledger, 1):
            produce(ledger, ordinal, FLAT)
    for ordinal in lease(ledger, 2):
        produce(ledger, ordinal, FLAT)
    assert ledger.dropped == {"zero_signal": 2}
    assert ledger.take(0, 0.0) == (2, 3)
    assert [f.what for f in ledger.facts if hasattr(f, "what")] == ["no_signal"]


def test_rewards_that_all_fail_end_the_run_with_a_reason() -> None:
    ledger = fresh(max_refills=1)
    for _ in range(3):
        for ordinal in lease(ledger, 1):
            produce(ledger, ordinal, (TimedOut(1.0), TimedOut(1.0)))
    with pytest.raises(QueueError, match="3 groups in a row had fewer than min_viable = 1"):
        ledger.take(0, 0.0)


def test_zero_signal_can_be_trained_on() -> None:
    ledger = fresh(zero_signal="train")
    for ordinal in lease(ledger, 2):
        produce(ledger, ordinal, FLAT)
    assert ledger.take(0, 0.0) == (0, 1)


# ---- take


def test_a_step_is_the_same_whenever_it_is_asked() -> None:
    ledger = filled()
    assert ledger.take(0, 0.0) == ledger.take(0, 9.0) == (0, 1)
    assert ledger.take(1, 9.0) == (2, 3)


def test_shares_are_balanced_by_tokens_and_complete() -> None:
    parts = shares({1: 90, 2: 50, 3: 40, 4: 5}, world=2)
    assert parts == [(1, 4), (2, 3)]
    assert shares({1: 1}, world=3) == [(1,), (), ()]


def test_take_passes_over_at_most_the_window() -> None:
    ledger = fresh(window=0.25)  # W = 1: strictly in order
    lease(ledger, 4)
    for ordinal in (1, 2, 3):
        produce(ledger, ordinal)
    waiting = ledger.take(0, 0.0)
    assert isinstance(waiting, Waiting) and "ordinal 0 is leased (a)" in waiting.why
    wide = fresh()
    lease(wide, 4)
    for ordinal in (1, 2, 3):
        produce(wide, ordinal)
    assert wide.take(0, 0.0) == (1, 2)


def test_waits_for_a_group_that_would_grow_too_old() -> None:
    """S = 1: a group of version 0 must be in step 1 at the latest."""
    ledger = fresh()
    lease(ledger, 4)
    for ordinal in (1, 2):
        produce(ledger, ordinal)
    assert learn(ledger, 0) == (1, 2)
    for ordinal in (3, *lease(ledger, 2)):
        produce(ledger, ordinal)
    waiting = ledger.take(1, 0.0)
    assert isinstance(waiting, Waiting) and "ordinal 0 is leased" in waiting.why
    produce(ledger, 0)
    assert learn(ledger, 1) == (0, 3)


def test_mode_drop_goes_on_and_drops_what_grew_too_old() -> None:
    ledger = fresh(mode="drop")
    lease(ledger, 4)
    for ordinal in (1, 2):
        produce(ledger, ordinal)
    learn(ledger, 0)
    for ordinal in (3, *lease(ledger, 2)):
        produce(ledger, ordinal)
    assert learn(ledger, 1) == (3, 4)
    produce(ledger, 0, version=0)
    ledger.take(2, 0.0)
    assert ledger.dropped == {"stale": 1}


def test_an_engine_that_lags_behind_cannot_break_the_bound() -> None:
    """The tokens say version 0 although version 2 was live at the lease."""
    ledger = fresh()
    for step in range(2):
        for ordinal in lease(ledger, 2):
            produce(ledger, ordinal)
        learn(ledger, step)
    for ordinal in lease(ledger, 2):
        produce(ledger, ordinal, version=0)
    assert isinstance(ledger.take(2, 0.0), Waiting)
    assert ledger.dropped == {"stale": 2}


# ---- restarts and ends


def test_a_restarted_learner_takes_the_same_steps_again() -> None:
    ledger = filled()
    steps = [learn(ledger, 0)]
    for ordinal in lease(ledger, 2):
        produce(ledger, ordinal)
    steps += [learn(ledger, 1), ledger.take(2, 0.0)]
    ledger.restarted(0, "k")
    ledger.restarted(0, "k")
    assert ledger.counts[State.SCORED] == 6 and lease(ledger, 9) == []
    again = [learn(ledger, step) for step in range(3)]
    assert again == steps and ledger.conserved


def test_committed_steps_are_forgotten_and_cannot_come_back() -> None:
    ledger = filled()
    learn(ledger, 0, commit=True)
    assert 0 not in ledger.entries and ledger.counts[State.COMMITTED] == 2
    with pytest.raises(QueueError, match="resume from a checkpoint of version 1 or later"):
        ledger.restarted(0, "k")
    ledger.restarted(1, "k")
    with pytest.raises(QueueError, match="committed"):
        ledger.take(0, 0.0)


def test_skipped_groups_are_dropped_with_a_reason() -> None:
    ledger = filled()
    ledger.take(0, 0.0)
    ledger.trained(0, 1, skipped=[1])
    assert ledger.dropped == {"skipped_by_learner": 1} and ledger.counts[State.TRAINED] == 1


def test_the_run_ends_when_its_steps_are_taken() -> None:
    ledger = filled(max_steps=1)
    assert ledger.issued == 2
    learn(ledger, 0)
    for call in (lambda: lease(ledger, 1), lambda: ledger.lease_scoring(1, "s", "k", 0.0), lambda: ledger.take(1, 0.0)):
        with pytest.raises(Drained, match="all 1 steps are taken"):
            call()
    assert ledger.issued == ledger.counts[State.TRAINED] + sum(ledger.dropped.values())


def test_draining_finishes_whole_steps_and_drops_the_rest() -> None:
    ledger = fresh()
    lease(ledger, 3)
    ledger.drain("stopped")
    assert lease(ledger, 1) == [], "others still work on theirs"
    for ordinal in (0, 1, 2):
        produce(ledger, ordinal)
    assert ledger.take(0, 0.0) == (0, 1)
    assert ledger.dropped == {"run_ended": 1} and ledger.ended
    with pytest.raises(Drained, match="stopped"):
        ledger.take(1, 0.0)


def test_more_steps_after_an_end() -> None:
    """A finished run is resumed with a larger max_steps."""
    ledger = filled(max_steps=1)
    learn(ledger, 0)
    longer = restore(settings(max_steps=2), snapshot(ledger))
    assert lease(longer, 9) == [2, 3]


def test_a_run_cannot_change_its_shape_half_way() -> None:
    with pytest.raises(ConfigError, match="group_size is 4, but the journal was written with 2"):
        restore(LedgerSettings(2, 4), snapshot(filled()))
