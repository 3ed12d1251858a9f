"""Proves SFT and rating regression: the gradient is that of the loss written out, however it is packed; each learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner.preference_data import AnswerTokens
from learner.supervised_step import rating_step, sft_step
from tests.learner.test_preference_step import CPU, Plain, words


def examples(n: int, seed: int) -> list[AnswerTokens]:
    """Answers with about half q are good (5), without any are bad (1); the third of each three is not rated."""
    rng, made = np.random.default_rng(seed), []
    for i in range(n):
        prompt, good = words(rng, None, int(rng.integers(3, 9))), i % 2 == 0
        answer = words(rng, "q" if good else "x", int(rng.integers(4, 9)))
        made.append(AnswerTokens(prompt, answer, float("nan") if i % 3 == 2 else 5.0 if good else 1.0))
    return made


@pytest.mark.parametrize("config", [{}, {"token_budget": 24}, {"packing": "padded", "accumulation": 3}])
def test_the_sft_gradient_is_that_of_the_mean_negative_log_prob(tiny_model: Path, config: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    plain, some = Plain(tiny_model, **config), examples(5, 0)
    metrics = sft_step(plain, some)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    total, tokens = torch.zeros(()), 0
    for e in some:
        ids = torch.from_numpy(np.concatenate([e.prompt_ids, e.answer_ids])).long()
        logp = torch.log_softmax(model(ids[None]).logits[0], -1)
        at = torch.arange(len(e.prompt_ids) - 1, len(ids) - 1)
        total, tokens = total - logp[at, ids[at + 1]].sum(), tokens + len(e.answer_ids)
    (total / tokens).backward()
    want = pytest.approx(float(total.detach()) / tokens, rel=1e-5)
    assert metrics["loss/total"] == want and metrics["sft/nll"] == want
    for name, parameter in model.named_parameters():
        got = plain.last[f"model.{name}"]
        assert torch.allclose(got, parameter.grad, rtol=1e-3, atol=1e-6), name


def test_sft_learns(tiny_model: Path) -> None:
    plain, some = Plain(tiny_model), examples(16, 0)
    first = sft_step(plain, some)["sft/nll"]
    for _ in range(15):
        last = sft_step(plain, some)["sft/nll"]
    assert last < first - 1.0


def test_ratings_are_learnt_and_the_unrated_give_nothing(tiny_model: Path) -> None:
    scorer, some = Plain(tiny_model, scorer=True), examples(48, 0)
    first = rating_step(scorer, some)
    assert first["reward_model/unrated"] == 16
    targets = [(e.rating - 1) / 4 for e in some if not np.isnan(e.rating)]
    assert first["reward_model/loss"] == pytest.approx(sum(t**2 for t in targets) / 48, rel=1e-5)  # scores start at 0
    for _ in range(30):
        last = rating_step(scorer, some)
    assert last["reward_model/rating_error"] < 0.5 < first["reward_model/rating_error"]


def test_a_rating_outside_the_scale_gives_no_gradient(tiny_model: Path) -> None:
    scorer = Plain(tiny_model, scorer=True)
    metrics = rating_step(scorer, [replace(e, rating=9.0) for e in examples(4, 0)])
    assert metrics["reward_model/unrated"] == 4 and metrics["reward_model/loss"] == 0 == metrics["grad_norm"]
    assert scorer.world.device == CPU
