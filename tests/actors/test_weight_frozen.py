"""Proves, through the real protocol (gloo, inbox, digests, commits, WeightSync): 200 pushes of frozen weights leave the
canary silent with slope 0 on every engine, and an error of 0.1 % in one engine is heard within three more pushes."""

from __future__ import annotations

import asyncio

import pytest
import torch

from benchmarks import weight_frozen
from rollout.canary import CanaryText
from rollout.vllm_settings import VllmSettings


async def test_two_hundred_frozen_syncs_are_silent_and_a_scale_is_heard(tmp_path) -> None:
    outcome = await weight_frozen.light(200, str(tmp_path))
    assert len(outcome.readings) == 2 * 200 and not outcome.alarms
    assert {r.slope for r in outcome.readings} == {0.0}
    assert outcome.alarmed_after is not None and outcome.alarmed_after <= 3
    assert "log-probs" in outcome.alarm


@pytest.mark.timeout(300)
def test_the_same_with_vllm_under_load(tmp_path, monkeypatch) -> None:
    from actors.models import make_tiny_llama
    from benchmarks.weights import load
    from rollout import vllm_weights

    monkeypatch.setattr(vllm_weights, "WORKER_EXTENSION", vllm_weights.WORKER_EXTENSION)  # `vllm` puts its own there
    model = make_tiny_llama(tmp_path / "tiny", seed=0)
    weights = load(model)
    weights["lm_head.weight"] *= 40  # log-probs of a random tiny model are too flat for a scale to show
    settings = VllmSettings(
        str(model), "float32", max_model_len=256, kv_cache_bytes=32 << 20, bucket_bytes=50_000, spool_dir=str(tmp_path)
    )
    texts = (CanaryText((72, 101, 108), (108, 111, 32, 119)), CanaryText((5, 6), (7, 8, 9)))
    wanted = weight_frozen.learner_scores(saved(tmp_path / "sharp", model, weights), texts)
    outcome = asyncio.run(weight_frozen.vllm(settings, weights, texts, wanted, syncs=6))
    assert len(outcome.readings) == 6 and not outcome.alarms
    assert max(r.mean_abs for r in outcome.readings) < 1e-3, "the engine does not serve what was sent"
    assert max(abs(r.slope) for r in outcome.readings) < 1e-5
    assert outcome.alarmed_after is not None and outcome.alarmed_after <= 3, outcome.readings


def saved(path, source, weights: dict[str, torch.Tensor]) -> str:
    """A model directory like `source` with these weights."""
    import shutil

    from safetensors.torch import save_file

    shutil.copytree(source, path, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)
