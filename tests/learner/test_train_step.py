"""Proves what one step does and does not do: it learns what was rewarded with every online preset; what is not finite,
failed or without signal has its stated outcome and never reaches the weights; reference and critic play their parts.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from learner import presets
from rollout.errors import DivergedError
from rollout.types import Failed, Group, Scored, TimedOut
from tests.learner.steps import STAGES, MakeGroups, engine, weights, with_behaviour_of

ONLINE = sorted(name for name, c in presets.PRESETS.items() if c.objective == "policy")


@pytest.mark.parametrize(("stage", "dtype"), STAGES)
def test_rewarded_answers_become_likelier(tiny_model: Path, make_groups: MakeGroups, stage: int, dtype: str) -> None:
    e = engine(tiny_model, zero_stage=stage, compute_dtype=dtype)
    groups = with_behaviour_of(e, make_groups())
    good = [(g.prompt_ids, t.token_ids) for g in groups for t in g.trajectories if t.verdict.value > 0]
    before = [e.score(p, t).mean() for p, t in good]
    for step in range(3):
        metrics = e.train_step(groups, step)
    assert e.version == 3
    assert np.mean([e.score(p, t).mean() for p, t in good]) > np.mean(before) + 0.05
    assert metrics["grad_norm"] > 0 and metrics["lr"] == 1e-3 and metrics["step/skipped"] == 0
    assert metrics["reward/mean"] == 0.5 and metrics["reward/std"] == pytest.approx(0.5)
    assert metrics["reward/exact"] == 0.5 and metrics["tokens/trained"] == sum(g.n_tokens for g in groups)
    assert metrics["groups/trained"] == 4 and metrics["staleness/mean"] == 2


def poisoned(groups: list[Group], tokens: int) -> list[Group]:
    """A NaN log-prob in the first `tokens` tokens of the first answer: dropped by the loss, never propagated."""
    first = groups[0].trajectories[0]
    bad = first.behaviour_logprobs.copy()
    bad[:tokens] = np.nan
    mended = (replace(first, behaviour_logprobs=bad), *groups[0].trajectories[1:])
    return [replace(groups[0], trajectories=mended), *groups[1:]]


def test_a_nan_log_prob_costs_its_token_and_nothing_else(tiny_model: Path, make_groups: MakeGroups) -> None:
    e = engine(tiny_model)
    metrics = e.train_step(poisoned(make_groups(), 2), 0)
    assert metrics["tokens/nonfinite"] == 2 and metrics["step/skipped"] == 0
    assert all(torch.isfinite(t).all() for t in weights(e).values())


@pytest.mark.parametrize(("stage", "dtype"), STAGES)
def test_a_non_finite_gradient_skips_the_step_and_names_its_groups(
    tiny_model: Path, make_groups: MakeGroups, stage: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = engine(tiny_model, zero_stage=stage, compute_dtype=dtype, max_bad_steps=3, token_budget=64)
    groups = make_groups()
    e.train_step(groups, 0)
    before, steps = weights(e), e.zero.steps
    real = e.backward
    monkeypatch.setattr(e, "backward", lambda loss, last: real(loss * float("nan"), last))
    metrics = e.train_step(groups, 1)
    assert metrics["step/skipped"] == 1 and metrics["grad_norm"] == 0.0
    assert json.dumps(metrics, allow_nan=False)
    assert e.skipped_ordinals == (100, 101, 102, 103) and e.version == 2 and e.zero.steps == steps
    after = weights(e)
    assert all(torch.equal(before[n], after[n]) for n in before)
    e.train_step(groups, 2)
    with pytest.raises(DivergedError, match=r"3 steps in a row.*100, 101, 102, 103"):
        e.train_step(groups, 3)
    monkeypatch.undo()
    assert e.train_step(groups, 4)["step/skipped"] == 0
    assert e.bad_steps == 0 and e.skipped_ordinals == ()


def test_failed_verdicts_and_steps_without_signal(tiny_model: Path, make_groups: MakeGroups) -> None:
    e = engine(tiny_model)
    failed = [
        replace(g, trajectories=tuple(replace(t, verdict=Failed("raised")) for t in g.trajectories))
        for g in make_groups()
    ]
    before = weights(e)
    metrics = e.train_step(failed, 0)
    assert metrics["answers/unscored"] == 16 and metrics["grad_norm"] == 0 and e.version == 1
    assert all(torch.equal(before[n], t) for n, t in weights(e).items())
    some = make_groups()
    some[0] = some[0].with_verdicts((TimedOut(5.0), *(t.verdict for t in some[0].trajectories[1:])))
    metrics = e.train_step(some, 1)
    assert metrics["answers/unscored"] == 1 and metrics["reward/mean"] == pytest.approx(8 / 15)


@pytest.mark.parametrize("preset", ONLINE)
def test_every_online_preset_takes_a_step(tiny_model: Path, make_groups: MakeGroups, preset: str) -> None:
    overrides = {"length_constant": 16.0} if presets.PRESETS[preset].aggregation == "constant" else {}
    e = engine(tiny_model, preset, overrides=overrides)
    rewards = [Scored(value, {"exact": value}) for value in (0.0, 1.0, 0.0, 0.5)]
    groups = with_behaviour_of(e, [g.with_verdicts(tuple(rewards)) for g in make_groups()])
    before = weights(e)
    metrics = e.train_step(groups, 0)
    assert metrics["grad_norm"] > 0 and metrics["step/skipped"] == 0
    assert abs(metrics["correction/mismatch_k3"]) < 1e-6  # the behaviour policy is the learner's own
    assert any(not torch.equal(before[n], t) for n, t in weights(e).items())
    if presets.PRESETS[preset].kl_coef:
        assert abs(metrics["policy/kl_ref"]) < 1e-6  # nothing has moved yet
        assert e.train_step(groups, 1)["policy/kl_ref"] > 1e-6


def test_the_reference_is_refreshed_and_saved(tiny_model: Path, make_groups: MakeGroups, tmp_path: Path) -> None:
    e = engine(tiny_model, "grpo", reference_refresh=2)
    groups = with_behaviour_of(e, make_groups())
    kl = [e.train_step(groups, step)["policy/kl_ref"] for step in range(3)]
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[1] > 1e-6 and kl[2] == pytest.approx(0, abs=1e-6)
    e.save_checkpoint(tmp_path / "v3")
    other = engine(tiny_model, "grpo", reference_refresh=2)
    other.load_checkpoint(tmp_path / "v3")
    assert other.train_step(groups, 3)["policy/kl_ref"] == e.train_step(groups, 3)["policy/kl_ref"] > 1e-6


@pytest.mark.parametrize("critic", ["own", "shared"])
def test_the_critic_learns_the_return(tiny_model: Path, make_groups: MakeGroups, critic: str, tmp_path: Path) -> None:
    overrides = {"critic_learning_rate": 3e-3, "kl_coef": 0.0, "lam": 1.0}
    e = engine(tiny_model, "ppo", overrides, critic=critic, zero_stage=1)
    groups = make_groups()
    errors = [e.train_step(groups, step)["critic/squared_error"] for step in range(12)]
    tokens = [(len(t), t.verdict.value) for g in groups for t in g.trajectories]
    returned = sum(n * reward for n, reward in tokens) / sum(n for n, _ in tokens)
    assert errors[0] == pytest.approx(returned)  # values start at 0 and every token of a good answer returns 1
    assert errors[-1] < 0.6 * errors[0]
    e.save_checkpoint(tmp_path / "v12")
    other = engine(tiny_model, "ppo", overrides, critic=critic, zero_stage=1)
    other.load_checkpoint(tmp_path / "v12")
    assert other.train_step(groups, 12)["critic/squared_error"] == e.train_step(groups, 12)["critic/squared_error"]


def test_the_critic_has_optimizer_settings_of_its_own(tiny_model: Path) -> None:
    overrides = {"critic_learning_rate": 3e-4, "critic_weight_decay": 0.1, "critic_grad_clip": 0.5}
    e = engine(tiny_model, "ppo", overrides)
    (policy,), (critic,) = e.zero.adam.param_groups, e.critic.adam.param_groups
    assert (policy["weight_decay"], critic["weight_decay"], critic["lr"]) == (0.0, 0.1, 3e-4)
    assert (e.zero.clip, e.critic.clip) == (1.0, 0.5)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_fp16_supported(), reason="this processor has no fp16 arithmetic")
def test_fp16_lowers_its_scale_before_a_step_counts_as_bad(
    tiny_model: Path, make_groups: MakeGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = engine(tiny_model, compute_dtype="float16", max_bad_steps=2)
    assert e.train_step(make_groups(), 0)["step/skipped"] == 0
    scaler = e.zero._engine.optimizer.loss_scaler
    scaler.cur_scale = 4.0
    real = e.backward
    monkeypatch.setattr(e, "backward", lambda loss, last: real(loss * float("inf"), last))
    for step, scale, bad in ((1, 2.0, 0), (2, 1.0, 0), (3, 1.0, 1)):
        assert e.train_step(make_groups(), step)["step/skipped"] == 1 and e.skipped_ordinals
        assert (scaler.cur_scale, e.bad_steps) == (scale, bad)
    with pytest.raises(DivergedError, match="2 steps in a row"):
        e.train_step(make_groups(), 4)
    monkeypatch.undo()
    assert e.train_step(make_groups(), 5)["step/skipped"] == 0
