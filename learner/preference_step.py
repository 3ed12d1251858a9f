"""One optimizer step from pairs: DPO and its family on the policy, Bradley-Terry on a reward model. No DeepSpeed here.

    pairs -> answers -> micro-batches, a pair's prompt computed once                                        packing.py
          -> look          log-probs of policy and reference (or scores), without gradient, on the flat axis
          -> loss          of the whole step, and its slope with respect to each log-prob (or score)     preference.py
          -> micro-batch   forward -> sum(slope * log-prob) -> backward
          -> step

A pair's two answers need not meet in one micro-batch: by the chain rule the gradient of sum(slope * log-prob) IS the
gradient of the loss, however the step is packed, split over accumulation or spread over ranks. The price is one forward
pass more; the gain is that packing never has to keep pairs together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from learner.config import LearnerConfig
from learner.critic import Values
from learner.look import Stepped, Updater
from learner.metric_sums import MetricSums
from learner.packing import Answer, Layout, MicroBatch, pack
from learner.policy import Inputs
from learner.preference import Pair, bradley_terry, preference_loss
from learner.preference_data import PairTokens
from learner.world import World
from rollout.types import Bool, Int32


class Scorer(Protocol):
    """A reward model with its optimizer: `after` [B] of what it returns is each answer's score."""

    config: LearnerConfig
    layout: Layout
    world: World

    def look(self, inputs: Inputs) -> Values: ...
    def forward(self, inputs: Inputs) -> Values: ...
    def backward(self, loss: Tensor, last: bool) -> None: ...
    def step(self) -> Stepped: ...


@dataclass(frozen=True, slots=True, eq=False)
class PairShare:
    """One rank's pairs on a flat axis of T answer tokens: answer 2p is chosen, 2p + 1 rejected, of prompt p."""

    answers: tuple[Answer, ...]
    mask: Tensor  # [T] bool
    sequence_ids: Tensor  # [T]
    chosen: Tensor  # [P]
    rejected: Tensor  # [P]

    @staticmethod
    def of(pairs: Sequence[Pair | PairTokens]) -> PairShare:
        answers: list[Answer] = []
        at = 0
        for number, pair in enumerate(pairs):
            for token_ids, mask in _sides(pair):
                answers.append(Answer(len(answers), number, at, pair.prompt_ids, token_ids, mask))
                at += len(token_ids)
        lengths = torch.tensor([len(a.token_ids) for a in answers], dtype=torch.long)
        mask = np.concatenate([a.loss_mask for a in answers]) if answers else np.zeros(0, bool)
        evens = torch.arange(0, len(answers), 2)
        ids = torch.arange(len(answers)).repeat_interleave(lengths)
        return PairShare(tuple(answers), torch.from_numpy(mask), ids, evens, evens + 1)


def _sides(pair: Pair | PairTokens) -> list[tuple[Int32, Bool]]:
    if isinstance(pair, Pair):
        return [(t.token_ids, t.loss_mask) for t in (pair.chosen, pair.rejected)]
    return [(ids, np.ones(len(ids), bool)) for ids in (pair.chosen_ids, pair.rejected_ids)]


def policy_step(updater: Updater, pairs: Sequence[Pair | PairTokens]) -> dict[str, float]:
    """DPO (or what choices.preference_loss says) on this rank's pairs. Collective. Returns the step's metrics."""
    if updater.reference is None:
        raise ValueError("learning from pairs compares with a reference policy, and the engine has none")
    share = PairShare.of(pairs)
    batches = micro_batches(updater, share.answers)
    logp, ref = torch.zeros(len(share.mask)), torch.zeros(len(share.mask))
    for batch in batches:
        inputs, origin = Inputs.of(batch, updater.world.device), torch.from_numpy(batch.origin)
        logp[origin] = updater.look(inputs).logprobs.float().cpu()
        ref[origin] = updater.reference.look(inputs, updater.temperature).float().cpu()
    leaf = logp.requires_grad_()
    loss, metrics = preference_loss(
        updater.choices,
        logprobs=leaf,
        ref_logprobs=ref,
        mask=share.mask,
        sequence_ids=share.sequence_ids,
        n_sequences=len(share.answers),
        chosen=share.chosen,
        rejected=share.rejected,
        pairs=_everywhere(updater.world, len(pairs)),
    )
    slope = _slope(loss, leaf)
    for number, batch in enumerate(batches):
        out = updater.forward(Inputs.of(batch, updater.world.device))
        pull = slope[torch.from_numpy(batch.origin)].to(out.logprobs.device)
        updater.backward((out.logprobs * pull).sum(), number == len(batches) - 1)
    return finish(updater.world, metrics, updater.step())


def reward_step(scorer: Scorer, pairs: Sequence[Pair | PairTokens], margin: float = 0.0) -> dict[str, float]:
    """Bradley-Terry on this rank's pairs. Collective. Returns the step's metrics."""
    share = PairShare.of(pairs)
    batches = micro_batches(scorer, share.answers)
    leaf = scores(scorer, share, batches).requires_grad_()
    per_pair, right = bradley_terry(leaf[share.chosen], leaf[share.rejected], margin)
    good = torch.isfinite(per_pair.detach())
    loss = torch.where(good, per_pair, 0.0).sum() / max(_everywhere(scorer.world, len(pairs)), 1.0)
    slope = torch.nan_to_num(_slope(loss, leaf))
    for number, batch in enumerate(batches):
        after = scorer.forward(Inputs.of(batch, scorer.world.device)).after
        pull = slope[torch.from_numpy(batch.sequences)].to(after.device)
        scorer.backward((after * pull).sum(), number == len(batches) - 1)
    metrics = MetricSums.of(
        mean={"reward_model/accuracy": (right, good)},
        total={"reward_model/loss": loss, "reward_model/nonfinite": (~good).sum()},
    )
    return finish(scorer.world, metrics, scorer.step())


def scores(scorer: Scorer, share: PairShare, batches: Sequence[MicroBatch] | None = None) -> Tensor:
    """The reward model's score of each answer [B], without gradient."""
    found = torch.zeros(len(share.answers))
    for batch in micro_batches(scorer, share.answers) if batches is None else batches:
        after = scorer.look(Inputs.of(batch, scorer.world.device)).after
        found[torch.from_numpy(batch.sequences)] = after.float().cpu()
    return found


def micro_batches(owner: Updater | Scorer, answers: Sequence[Answer]) -> list[MicroBatch]:
    """Packed, and as many on every rank: collectives inside forward and backward must meet."""
    budget = owner.config.token_budget
    batches = pack(answers, token_budget=budget, layout=owner.layout)
    most = owner.world.most(max(len(batches), owner.config.accumulation))
    same = len(batches) == most
    return batches if same else pack(answers, token_budget=budget, layout=owner.layout, at_least=most)


def _everywhere(world: World, count: int) -> float:
    return float(world.add_up(torch.tensor([float(count)], dtype=torch.float64))[0])


def _slope(loss: Tensor, leaf: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(loss, leaf)
    return slope


def finish(world: World, metrics: MetricSums, stepped: Stepped) -> dict[str, float]:
    """Summed over ranks, with what the optimizer did."""
    done = metrics.reduced(world.add_up).finish()
    return done | {"grad_norm": stepped.grad_norm, "lr": stepped.rate, "step/skipped": float(not stepped.applied)}
