"""Proves that engine and learner mean the same by a log-prob, with the real vLLM and the real learner's forward pass.

Tiny model, float32, temperatures 0.7, 1.0, 1.3, and with top-p and top-k: equal to 1e-4. SmolLM2-135M in bf16: the
mismatch that asynchronous updates have to correct for is below 5e-3 (`pytest -m soak -s` prints the table of
docs/algorithms.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from actors.models import prepare_smollm2
from learner import presets
from learner.config import AlgorithmConfig, LearnerConfig
from learner.engine import LearnerEngine
from rollout.engine import Completion, SamplingParams
from rollout.errors import ConfigError
from rollout.vllm_engine import VllmEngine, VllmSettings

TEMPERATURES = (0.7, 1.0, 1.3)

pytestmark = pytest.mark.timeout(600)


def learner_of(model: Path, dtype: str) -> LearnerEngine:
    algorithm = AlgorithmConfig()
    config = LearnerConfig.model_validate({"compute_dtype": dtype})
    return LearnerEngine(model, presets.resolve(algorithm), algorithm, config, serving_dtype="float32")


def gaps(
    learner: LearnerEngine, prompt: Sequence[int], answers: Sequence[Completion], temperature: float
) -> np.ndarray:
    """Learner minus engine, float64, all tokens of all answers."""
    found = [learner.score(prompt, a.token_ids.tolist(), temperature) - a.logprobs for a in answers]
    return np.concatenate(found).astype(np.float64)


def k3(gap: np.ndarray) -> float:
    return float((np.exp(gap) - 1 - gap).mean())


async def test_float32_log_probs_are_equal_also_where_the_draw_is_cut(tiny_model: Path) -> None:
    prompt = [72, 101, 108, 108, 111]
    engine = VllmEngine(
        VllmSettings(str(tiny_model), "float32", max_model_len=128, kv_cache_bytes=32 << 20, truncates=True)
    )
    await engine.start()
    learner = learner_of(tiny_model, "float32")
    cuts = [*(SamplingParams(24, t, seed=1) for t in TEMPERATURES)]
    cuts += [SamplingParams(24, 0.7, top_p=0.6, seed=1), SamplingParams(24, 1.3, top_k=5, seed=1)]
    kept: list[float] = []
    for number, sampling in enumerate(cuts):
        answers = await engine.generate(f"a{number}", prompt, sampling, 8)
        assert len({a.token_ids.tobytes() for a in answers}) > 1
        assert np.abs(gaps(learner, prompt, answers, sampling.temperature)).mean() < 1e-4, sampling
        kept.append(float(np.exp(answers[0].logprobs[0])))
    (greedy,) = await engine.generate("greedy", prompt, SamplingParams(24, 0.0), 1)
    assert np.abs(gaps(learner, prompt, [greedy], 1.0)).mean() < 1e-4
    top = await engine.generate("top", prompt, SamplingParams(1, 1.0, top_k=5, seed=3), 64)
    drawn = {int(a.token_ids[0]): float(a.logprobs[0]) for a in top}
    assert 1 < len(drawn) <= 5  # the draw is cut,
    assert sum(np.exp(list(drawn.values()))) < 0.5  # the log-probs are not renormalised over what is left
    scored = await engine.score(prompt, answers[0].token_ids.tolist(), 1.0)
    assert np.abs(scored - learner.score(prompt, answers[0].token_ids.tolist(), 1.0)).mean() < 1e-4
    await engine.close()


async def test_an_engine_that_was_not_told_refuses_to_cut(tiny_model: Path) -> None:
    engine = VllmEngine(VllmSettings(str(tiny_model), "float32", max_model_len=128))
    with pytest.raises(ConfigError, match="truncates=True"):
        await engine.generate("a", [1, 2], SamplingParams(4, top_p=0.9), 1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_bf16_mismatch_of_a_real_model_is_small_at_every_temperature(tmp_path: Path) -> None:
    model = prepare_smollm2(tmp_path / "smollm2")
    from actors.models import load_tokenizer

    texts = ["The capital of France is", "sorted([3, 1, 2]) =", "Once upon a time", "def add(a, b):", "2 + 2 ="]
    prompts = [load_tokenizer(str(model)).encode(text) for text in texts]
    engine = VllmEngine(VllmSettings(str(model), "bfloat16", max_model_len=256))
    await engine.start()
    answers = {
        (t, i): await engine.generate(f"{t}.{i}", prompt, SamplingParams(48, t, seed=7), 8)
        for t in TEMPERATURES
        for i, prompt in enumerate(prompts)
    }
    await engine.close()
    for dtype in ("bfloat16", "float32"):
        learner = learner_of(model, dtype)
        for t in TEMPERATURES:
            gap = np.concatenate([gaps(learner, prompts[i], answers[t, i], t) for i in range(len(prompts))])
            words = f"| {dtype} | {t} | {len(gap)} | {np.abs(gap).mean():.4f} | {np.quantile(np.abs(gap), 0.99):.3f} |"
            print(f"{words} {np.exp(gap).mean():.4f} | {k3(gap):.1e} |")
            assert 0 < k3(gap) < 5e-3, (dtype, t)
