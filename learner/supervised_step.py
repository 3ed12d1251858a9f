"""One optimizer step from answers that come with the right tokens, or with a rating. No DeepSpeed here.

    sft_step      (prompt, answer)          the policy, mean negative log-prob of the answers' tokens
    rating_step   (prompt, answer, 1..5)    a reward model, squared error of its score at the answer's last token

Either is one rank's part of a step: what means divide by is counted over all ranks, so micro-batches and ranks add up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from learner.look import Updater
from learner.metric_sums import MetricSums
from learner.packing import Answer
from learner.policy import Inputs
from learner.preference import rating_regression, sft
from learner.preference_data import AnswerTokens
from learner.preference_step import Scorer, finish, micro_batches
from learner.segments import Denominators


def sft_step(updater: Updater, examples: Sequence[AnswerTokens]) -> dict[str, float]:
    """Supervised fine-tuning on this rank's examples. Collective. Returns the step's metrics."""
    answers = _answers(examples)
    world = updater.world
    tokens = world.add_up(torch.tensor([float(sum(a.n_loss for a in answers))], dtype=torch.float64))
    denominators = Denominators(float(tokens[0]), 0.0, 0.0)
    sums, batches = MetricSums(), micro_batches(updater, answers)
    for number, batch in enumerate(batches):
        out = updater.forward(Inputs.of(batch, world.device))
        loss, parts = sft(out.logprobs, torch.ones(batch.n_loss, dtype=torch.bool, device=world.device), denominators)
        updater.backward(loss, number == len(batches) - 1)
        sums = sums + parts
    return finish(world, sums, updater.step())


def rating_step(scorer: Scorer, rated: Sequence[AnswerTokens], low: float = 1.0, high: float = 5.0) -> dict[str, float]:
    """Regression of a reward model on ratings low..high (its score lives on 0..1). Collective. Returns the metrics."""
    answers, world = _answers(rated), scorer.world
    ratings = torch.tensor([r.rating for r in rated], dtype=torch.float32)
    count = float(world.add_up(torch.tensor([float(len(rated))], dtype=torch.float64))[0])
    sums, batches = MetricSums(), micro_batches(scorer, answers)
    for number, batch in enumerate(batches):
        score = scorer.forward(Inputs.of(batch, world.device)).after
        rating = ratings[torch.from_numpy(batch.sequences)].to(score.device)
        squared, off = rating_regression(score, rating, low, high)
        known = torch.isfinite(rating) & (rating >= low) & (rating <= high)
        loss = squared.sum() / max(count, 1.0)
        scorer.backward(loss, number == len(batches) - 1)
        sums = sums + MetricSums.of(
            mean={"reward_model/rating_error": (off, known)},
            total={"reward_model/loss": loss, "reward_model/unrated": (~known).sum()},
        )
    return finish(world, sums, scorer.step())


def _answers(examples: Sequence[AnswerTokens]) -> list[Answer]:
    made, at = [], 0
    for number, e in enumerate(examples):
        n = len(e.answer_ids)
        made.append(Answer(number, number, at, e.prompt_ids, e.answer_ids, np.ones(n, bool)))
        at += n
    return made
