"""Proves what a learner's engine promises on one rank, with the real DeepSpeed: it scores, hands out weights under the
right names, saves and goes on exactly, exports what transformers loads, and learns the same however it is held.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner import checkpoint, snapshot, zero
from learner.world import World
from rollout.errors import ConfigError, DivergedError
from tests.learner.steps import STAGES, MakeGroups, engine, weights, with_behaviour_of


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


@pytest.mark.parametrize(("stage", "dtype"), [s for s in STAGES if s[0] < 3])
def test_weights_may_be_read_beside_a_step_until_it_says_that_it_updates(
    tiny_model: Path, make_groups: MakeGroups, stage: int, dtype: str
) -> None:
    """What a publication does: every read before the update finds the old weights, and the step is not disturbed."""
    alone, read = (engine(tiny_model, zero_stage=stage, compute_dtype=dtype) for _ in range(2))
    before, wrong, reads, ended = weights(read), [], [], threading.Event()

    def reader() -> None:
        while not ended.is_set():
            wrong.extend(name for name, tensor in read.state_tensors() if not torch.equal(tensor, before[name]))
            reads.append(1)

    beside = threading.Thread(target=reader)

    def about_to_write() -> None:
        ended.set()
        beside.join()
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(read).items())

    read.before_update = about_to_write
    beside.start()
    try:
        read.train_step(make_groups(), 0)
    finally:
        ended.set()
    assert reads and not wrong and not all(torch.equal(t, before[n]) for n, t in weights(read).items())
    alone.train_step(make_groups(), 0)
    assert all(torch.equal(t, weights(read)[n]) for n, t in weights(alone).items())


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


def test_ranks_that_differ_make_no_checkpoint(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = engine(tiny_model)
    before = snapshot.fingerprint(e)
    parameter = next(p for p in e.policy.parameters() if p.numel() > 1)
    with torch.no_grad():
        parameter.view(-1)[-1] = torch.nextafter(parameter.view(-1)[-1], torch.tensor(9.0))
    assert snapshot.fingerprint(e) != before  # one bit of one weight is seen
    monkeypatch.setattr(World, "agree", lambda self, value: False)
    with pytest.raises(DivergedError, match="hold different weights"):
        e.save_checkpoint(tmp_path / "v0")
    assert not (tmp_path / "v0").exists()


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


def test_gradients_go_into_their_sums_at_once_and_change_no_bit(
    tiny_model: Path, make_groups: MakeGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, over several micro-batches: none stays beside its float32 sum; the weights are those of keeping."""
    settings = zero.deepspeed_config

    def kept(*of: Any) -> dict[str, Any]:
        made = settings(*of)
        return made | {"bf16": made["bf16"] | {"immediate_grad_update": False}}

    dropping = engine(tiny_model, zero_stage=1, compute_dtype="bfloat16", token_budget=64)
    monkeypatch.setattr(zero, "deepspeed_config", kept)
    keeping = engine(tiny_model, zero_stage=1, compute_dtype="bfloat16", token_budget=64)
    held: list[bool] = []  # just before each update: is there a gradient beside the sums?
    for e in (dropping, keeping):
        e.before_update = lambda e=e: held.append(any(p.grad is not None for p in e.policy.parameters()))  # type: ignore[misc]
        for step in range(2):
            e.train_step(make_groups(seed=step), step)
    assert all(torch.equal(tensor, weights(keeping)[name]) for name, tensor in weights(dropping).items())
    assert held == [False, False, True, True]


def test_flex_attention_is_refused_where_it_cannot_learn(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"'flex' cannot learn on a CPU"):
        engine(tiny_model, attention="flex")


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [1, 3])
def test_the_same_step_compiled(tiny_model: Path, make_groups: MakeGroups, stage: int) -> None:
    test_the_same_step_however_it_is_held(tiny_model, make_groups, {"compile": True, "zero_stage": stage})
