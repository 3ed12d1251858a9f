"""Proves that the simulated loop runs on the real ledger (staleness never above the bound, the books balance) and
predicts what arithmetic says where arithmetic can say it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launch.simulate import Loop, Stages, predict
from rollout.errors import ConfigError


def stages(generate: float, train: float, sync: float = 0.0, spread: float = 0.0) -> Stages:
    return Stages(generate, 0.0, train, sync, spread)


def at_bound(make_config: Any, bound: int, steps: int = 30, **topology: Any) -> Any:
    return make_config({"staleness": {"bound": bound}, "run": {"steps": steps}, "topology": topology})


def test_at_bound_zero_the_stages_alternate(make_config: Any) -> None:
    p = predict(at_bound(make_config, 0), stages(4.0, 6.0, 1.0))
    assert p.step_s == pytest.approx(11.0)
    assert p.idle_learner == pytest.approx(4 / 11) and p.idle_rollout == pytest.approx(7 / 11)
    assert (p.staleness_mean, p.staleness_max) == (0, 0)


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_beyond_it_the_slower_stage_sets_the_pace(make_config: Any, bound: int) -> None:
    learning = predict(at_bound(make_config, bound), stages(4.0, 6.0, 1.0))
    assert learning.step_s == pytest.approx(7.0) and learning.idle_learner == pytest.approx(0.0, abs=1e-9)
    assert learning.idle_rollout == pytest.approx(3 / 7, abs=0.02)
    generating = predict(at_bound(make_config, bound), stages(7.0, 4.0))
    assert generating.step_s == pytest.approx(7.0, rel=0.02) and generating.idle_rollout == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("bound", [0, 1, 2, 5])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(("generate", "train"), [(1.0, 10.0), (10.0, 1.0), (5.0, 5.0)])
def test_staleness_never_exceeds_the_bound_however_times_vary(
    make_config: Any, bound: int, replicas: int, generate: float, train: float
) -> None:
    config = at_bound(make_config, bound, rollout={"replicas": replicas})
    for seed in range(5):
        p = predict(config, stages(generate, train, 0.5, spread=1.0), seed)
        assert 0 <= p.staleness_max <= bound and 0 <= p.idle_learner <= 1 and 0 <= p.idle_rollout <= 1
        assert p == predict(config, stages(generate, train, 0.5, spread=1.0), seed)


def test_more_engines_make_groups_faster(make_config: Any) -> None:
    one, two = (predict(at_bound(make_config, 2, rollout={"replicas": n}), stages(8.0, 1.0)) for n in (1, 2))
    assert two.step_s == pytest.approx(one.step_s / 2, rel=0.05)


def test_the_ledger_of_the_simulated_run_balances(make_config: Any) -> None:
    config = at_bound(make_config, 2, steps=10)
    loop = Loop(config, stages(5.0, 3.0, 0.2, spread=0.7), seed=1)
    steps = loop.run()
    assert all(len(step.ages) == config.algorithm.groups_per_step for step in steps)
    balance = loop.ledger.balance()
    assert balance["issued_total"] == balance["committed"] == 80 and loop.ledger.conserved


def test_mode_drop_trades_dropped_groups_for_waiting(make_config: Any) -> None:
    config = make_config({"staleness": {"bound": 1, "mode": "drop"}, "run": {"steps": 30}})
    loop = Loop(config, stages(5.0, 5.0, spread=1.0), seed=0)
    ages = [age for step in loop.run() for age in step.ages]
    assert max(ages) <= 1 and loop.ledger.dropped["stale"] > 0


def test_a_run_of_one_step_can_be_predicted(make_config: Any) -> None:
    """It leases only the 8 groups it needs, whatever the slots."""
    assert predict(at_bound(make_config, 2, steps=1), stages(4.0, 6.0)).total_s == pytest.approx(10.0)


def test_stages_measured_in_a_run(make_run: Any, make_config: Any) -> None:
    measured = Stages.measured(make_run(steps=6))
    assert measured.train_s == pytest.approx(6.1, abs=0.1) and measured.sync_s == 0.5
    assert measured.generate_s == pytest.approx(0.6 * 7.0)  # engines were idle 40 % of a 7 s step
    p = predict(at_bound(make_config, 2), measured)
    assert p.step_s == pytest.approx(6.6, rel=0.05) and "measured in" in p.text()
    json.dumps(p.as_dict())


def test_too_short_a_run_measures_nothing(make_run: Any) -> None:
    with pytest.raises(ConfigError, match="has 2 measured steps after the first; it takes 3"):
        Stages.measured(make_run(steps=3))
