"""Proves what a learner's engine promises on one rank, with the real DeepSpeed: it learns, skips what is not finite,
hands out weights under the right names, scores, saves and goes on exactly, and exports what transformers loads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from learner import checkpoint, presets
from learner.config import AlgorithmConfig, LearnerConfig
from learner.engine import LearnerEngine
from rollout.errors import ConfigError, DivergedError
from rollout.types import Failed, Group, Scored, TimedOut

MakeGroups = Callable[..., list[Group]]
STAGES = [
    (0, "float32"),
    (1, "float32"),
    (2, "float32"),
    (3, "float32"),
    (1, "bfloat16"),
    (2, "bfloat16"),
    (3, "bfloat16"),
]


def engine(
    model: Path, preset: str = "dapo", overrides: dict[str, object] | None = None, **learner: object
) -> LearnerEngine:
    algorithm = AlgorithmConfig.model_validate({"preset": preset, "learning_rate": 1e-3, "overrides": overrides or {}})
    config = LearnerConfig.model_validate({"compute_dtype": "float32"} | learner)
    choices = presets.resolve(algorithm)
    return LearnerEngine(model, choices, algorithm, config, serving_dtype="float32", component_weights={"exact": 1.0})


def weights(e: LearnerEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in e.state_tensors()}


def with_behaviour_of(e: LearnerEngine, groups: list[Group]) -> list[Group]:
    """The groups as if the learner's own weights had sampled them."""
    return [
        replace(
            g,
            trajectories=tuple(
                replace(t, behaviour_logprobs=e.score(g.prompt_ids.tolist(), t.token_ids.tolist()))
                for t in g.trajectories
            ),
        )
        for g in groups
    ]


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


def test_half_precision_without_zero_is_refused_with_the_remedy(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"zero_stage is 0.*use zero_stage 1"):
        engine(tiny_model, zero_stage=0, compute_dtype="bfloat16")


def test_score_is_what_transformers_says(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    rng = np.random.default_rng(3)
    prompt, answer = rng.integers(0, 256, 20), rng.integers(0, 256, 30)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    logits = model(torch.from_numpy(np.concatenate([prompt, answer]))[None]).logits[0].float() / 0.7
    want = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(1, torch.from_numpy(answer)[:, None])[:, 0]
    got = engine(tiny_model).score(prompt, answer, temperature=0.7)
    assert got.dtype == np.float32 and np.abs(got - want.detach().numpy()).max() < 1e-4


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


@pytest.mark.parametrize(("stage", "dtype"), STAGES)
def test_a_checkpoint_goes_on_exactly(
    tiny_model: Path, make_groups: MakeGroups, tmp_path: Path, stage: int, dtype: str
) -> None:
    first = engine(tiny_model, zero_stage=stage, compute_dtype=dtype)
    for step in range(2):
        first.train_step(make_groups(seed=step), step)
    first.save_checkpoint(tmp_path / "v00000002")
    saved = weights(first)
    want = [first.train_step(make_groups(seed=step), step)["loss/total"] for step in (2, 3)]
    second = engine(tiny_model, zero_stage=stage, compute_dtype=dtype)
    second.load_checkpoint(tmp_path / "v00000002")
    assert second.version == 2 and all(torch.equal(saved[n], t) for n, t in weights(second).items())
    got = [second.train_step(make_groups(seed=step), step)["loss/total"] for step in (2, 3)]
    assert got == want
    assert all(torch.equal(a, weights(second)[n]) for n, a in weights(first).items())


def test_a_checkpoint_crosses_zero_stages(tiny_model: Path, make_groups: MakeGroups, tmp_path: Path) -> None:
    first = engine(tiny_model, zero_stage=3)
    first.train_step(make_groups(), 0)
    first.save_checkpoint(tmp_path / "v1")
    second = engine(tiny_model, zero_stage=0)
    second.load_checkpoint(tmp_path / "v1")
    for e in (first, second):
        e.train_step(make_groups(seed=1), 1)
    theirs = weights(second)
    assert all(torch.allclose(t, theirs[n], rtol=1e-5, atol=1e-7) for n, t in weights(first).items())


def test_a_torn_checkpoint_is_refused_by_name(tiny_model: Path, make_groups: MakeGroups, tmp_path: Path) -> None:
    e = engine(tiny_model)
    e.save_checkpoint(tmp_path / "v00000000")
    shard = next((tmp_path / "v00000000").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(checkpoint.TornCheckpoint, match=r"state-00000.safetensors"):
        e.load_checkpoint(tmp_path / "v00000000")


def test_the_export_is_what_transformers_loads(tiny_model: Path, make_groups: MakeGroups, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    e = engine(tiny_model, zero_stage=3)
    e.train_step(make_groups(), 0)
    e.export_hf(tmp_path / "out")
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 256, 12)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    logits = torch.log_softmax(model(torch.from_numpy(ids)[None]).logits[0].float(), -1)
    want = logits[3:-1].gather(1, torch.from_numpy(ids)[4:, None])[:, 0].detach().numpy()
    assert np.abs(e.score(ids[:4], ids[4:]) - want).max() < 1e-4
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("abc")
    with pytest.raises(ConfigError, match="exists"):
        e.export_hf(tmp_path / "out")


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_have_the_names_and_type_of_the_model_directory(tiny_model: Path, stage: int) -> None:
    from safetensors.torch import load_file

    e = engine(tiny_model, zero_stage=stage)
    files = {n: t for path in tiny_model.glob("*.safetensors") for n, t in load_file(path).items()}
    out = dict(e.state_tensors())
    assert out.keys() == files.keys()
    assert all(torch.equal(out[n], t) for n, t in files.items())


ONLINE = sorted(name for name, c in presets.PRESETS.items() if c.objective == "policy")


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


def test_adapters_learn_alone_and_travel_merged(tiny_model: Path, make_groups: MakeGroups, tmp_path: Path) -> None:
    e = engine(tiny_model, "grpo", lora_rank=4, zero_stage=2)
    trained = {name for name, _ in e.zero.trained()}
    assert trained and all(".lora_" in name for name in trained)
    before, groups = weights(e), with_behaviour_of(e, make_groups())
    first = e.train_step(groups, 0)
    assert first["policy/kl_ref"] == pytest.approx(0, abs=1e-6)  # the reference is the policy without its adapters
    e.train_step(groups, 1)
    after = weights(e)
    assert after.keys() == {name for name, _ in engine(tiny_model).state_tensors()}
    assert {n for n in after if not torch.equal(after[n], before[n])} == {n for n in after if "_proj" in n}
    e.export_hf(tmp_path / "merged")
    merged = engine(tmp_path / "merged")
    prompt, answer = groups[0].prompt_ids.tolist(), groups[0].trajectories[0].token_ids.tolist()
    assert np.abs(merged.score(prompt, answer) - e.score(prompt, answer)).max() < 1e-4
    e.save_checkpoint(tmp_path / "v2")
    other = engine(tiny_model, "grpo", lora_rank=4, zero_stage=1)
    other.load_checkpoint(tmp_path / "v2")
    assert all(torch.equal(after[n], t) for n, t in weights(other).items())
    assert {n for n, _ in other.adapter_tensors()} == {
        n.removeprefix("model.").replace(".default", "") for n in trained
    }


@pytest.mark.parametrize(
    "options",
    [
        {"offload_optimizer": True, "zero_stage": 2},
        {"offload_optimizer": True, "offload_params": True, "zero_stage": 3},
        {"gradient_checkpointing": True, "zero_stage": 1},
        {"gradient_checkpointing": True, "zero_stage": 3},
        {"reference_offload": True, "zero_stage": 1},
        {"head_float32": True, "head_chunk": 7},
        {"attention": "sdpa"},
    ],
    ids=lambda o: " ".join(o),
)
def test_the_same_step_however_it_is_held(
    tiny_model: Path, make_groups: MakeGroups, options: dict[str, object]
) -> None:
    groups = make_groups()
    plain, other = engine(tiny_model, "grpo"), engine(tiny_model, "grpo", accumulation=2, **options)
    for step in range(2):
        want, got = plain.train_step(groups, step), other.train_step(groups, step)
        assert got["loss/total"] == pytest.approx(want["loss/total"], rel=1e-4, abs=1e-6)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
    theirs = weights(other)
    assert all(torch.allclose(t, theirs[n], rtol=1e-4, atol=1e-5) for n, t in weights(plain).items())


def test_the_reference_is_refreshed_and_saved(tiny_model: Path, make_groups: MakeGroups, tmp_path: Path) -> None:
    e = engine(tiny_model, "grpo", reference_refresh=2)
    groups = with_behaviour_of(e, make_groups())
    kl = [e.train_step(groups, step)["policy/kl_ref"] for step in range(3)]
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[1] > 1e-6 and kl[2] == pytest.approx(0, abs=1e-6)
    e.save_checkpoint(tmp_path / "v3")
    other = engine(tiny_model, "grpo", reference_refresh=2)
    other.load_checkpoint(tmp_path / "v3")
    assert other.train_step(groups, 3)["policy/kl_ref"] == e.train_step(groups, 3)["policy/kl_ref"] > 1e-6


def test_flex_attention_is_refused_where_it_cannot_learn(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"'flex' cannot learn on a CPU"):
        engine(tiny_model, attention="flex")


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
