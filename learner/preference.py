"""Learning from comparisons: DPO and its family, reward models (Bradley-Terry, 1-5 ratings), and SFT. Pure functions.

Legend
    logp, logp_ref  [T]  log-probs of the answers' tokens under the policy and the frozen reference, flat (segments.py)
    seq                  Segments of the T tokens: which answer a token belongs to, which tokens count
    chosen, rejected [P] indices of answers: pair p prefers answer chosen[p] to answer rejected[p]
    D               [P]  [log pi(y+) - log ref(y+)] - [log pi(y-) - log ref(y-)], masked sums (or means) over tokens

Losses are means over the pairs of the whole step: `pairs` is that global count, so micro-batches and ranks add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from learner.choices import Choices
from learner.metric_sums import MetricSums
from learner.segments import Denominators, Segments, upcast
from rollout.types import Group, Int32, Scored, Trajectory

# ------------------------------------------------------------ kernels on D [P]


def dpo_sigmoid(D: Tensor, beta: float) -> Tensor:
    """DPO, Rafailov et al. 2305.18290 eq. 7: L = -log sigma(beta D)."""
    return -F.logsigmoid(beta * D)


def cdpo(D: Tensor, beta: float, smoothing: float) -> Tensor:
    """Conservative DPO (Mitchell 2023): L = -(1 - e) log sigma(beta D) - e log sigma(-beta D)."""
    return -(1 - smoothing) * F.logsigmoid(beta * D) - smoothing * F.logsigmoid(-beta * D)


def robust_dpo(D: Tensor, beta: float, smoothing: float) -> Tensor:
    """Robust DPO, 2403.00409: L = [-(1 - e) log sigma(beta D) + e log sigma(-beta D)] / (1 - 2e)."""
    flipped = smoothing * F.logsigmoid(-beta * D)
    return (-(1 - smoothing) * F.logsigmoid(beta * D) + flipped) / (1 - 2 * smoothing)


def ipo(D: Tensor, beta: float) -> Tensor:
    """IPO, Azar et al. 2310.12036 eq. 17: L = (D - 1 / (2 beta))^2. TRL, AReaL: D of token means; OpenRLHF: sums."""
    return (D - 1 / (2 * beta)) ** 2


def hinge(D: Tensor, beta: float) -> Tensor:
    """SLiC, 2305.10425: L = max(0, 1 - beta D)."""
    return F.relu(1 - beta * D)


def log_ratio_difference(
    logp: Tensor, logp_ref: Tensor, seq: Segments, chosen: Tensor, rejected: Tensor, length_normalized: bool
) -> Tensor:
    """D [P]. An empty answer's log-ratio is 0 (its mean divides by max(|y|, 1))."""
    ratio = seq.mean(logp - logp_ref) if length_normalized else seq.sum(logp - logp_ref)
    return ratio[chosen] - ratio[rejected]


def preference_loss(
    choices: Choices,
    *,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    n_sequences: int,
    chosen: Tensor,
    rejected: Tensor,
    pairs: float,
) -> tuple[Tensor, MetricSums]:
    """Mean loss over the step's `pairs`, summable metrics. A pair with a NaN or inf log-prob gives no loss; counted."""
    mask = mask.bool()
    finite = torch.isfinite(logprobs.detach()) & torch.isfinite(ref_logprobs)
    logp = torch.where(mask & finite, upcast(logprobs), 0.0)
    ref = torch.where(mask & finite, upcast(ref_logprobs).to(logp.dtype), 0.0).detach()
    seq = Segments(sequence_ids, n_sequences, mask)
    sound = seq.sum((~finite).to(logp.dtype)) == 0
    good = sound[chosen] & sound[rejected]
    D = log_ratio_difference(logp, ref, seq, chosen, rejected, choices.length_normalized)
    per_pair = pair_losses(choices, D)
    loss = torch.where(good, per_pair, 0.0).sum() / max(pairs, 1.0)
    rewards = choices.preference_beta * (seq.sum(logp - ref)).detach()
    metrics = MetricSums.of(
        mean={
            "preference/accuracy": (D > 0, good),
            "preference/margin": (rewards[chosen] - rewards[rejected], good),
            "preference/chosen_reward": (rewards[chosen], good),
            "preference/rejected_reward": (rewards[rejected], good),
        },
        total={"loss/total": loss, "preference/loss": loss, "preference/nonfinite": (~good).sum()},
    )
    return loss, metrics


def pair_losses(choices: Choices, D: Tensor) -> Tensor:
    """The loss of each pair, by name."""
    beta, smoothing = choices.preference_beta, choices.label_smoothing
    match choices.preference_loss:
        case "sigmoid":
            return dpo_sigmoid(D, beta)
        case "cdpo":
            return cdpo(D, beta, smoothing)
        case "robust":
            return robust_dpo(D, beta, smoothing)
        case "ipo":
            return ipo(D, beta)
        case "hinge":
            return hinge(D, beta)


# ------------------------------------------------------------ reward models, SFT


def bradley_terry(chosen_score: Tensor, rejected_score: Tensor, margin: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """Bradley & Terry as in 2203.02155 eq. 1, margin as Llama 2 2307.09288 eq. 2: L = -log sigma(s+ - s- - margin).

    Returns (loss [P], accuracy [P] bool). Scores are unbounded; only differences are learnt.
    """
    gap = upcast(chosen_score) - upcast(rejected_score)
    return -F.logsigmoid(gap - margin), gap > 0


def rating_regression(score: Tensor, rating: Tensor, low: float = 1.0, high: float = 5.0) -> tuple[Tensor, Tensor]:
    """HelpSteer2 2406.08673: squared error against ratings low..high, both mapped to 0..1 so that scales do not matter.

    L = (s - (rating - low) / (high - low))^2; `score` lives on 0..1. Returns (loss [N], |error| in rating points [N]).
    A NaN or out-of-range rating gives exactly 0 loss.
    """
    known = torch.isfinite(rating) & (rating >= low) & (rating <= high)
    target = torch.where(known, (rating - low) / (high - low), 0.0)
    error = torch.where(known, upcast(score) - target, 0.0)
    return error**2, error.detach().abs() * (high - low)


def sft(logprobs: Tensor, mask: Tensor, denominators: Denominators) -> tuple[Tensor, MetricSums]:
    """Supervised fine-tuning: L = -mean log pi(y_t) over the unmasked tokens of the step; any shape."""
    live = mask.bool() & torch.isfinite(logprobs.detach())
    logp = torch.where(live, upcast(logprobs), 0.0)
    loss = -logp.sum() / max(denominators.tokens, 1.0)
    dropped = (mask.bool() & ~live).sum()
    return loss, MetricSums.of(mean={"sft/nll": (-logp, live)}, total={"loss/total": loss, "tokens/nonfinite": dropped})


# ------------------------------------------------------------ pairs from groups


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Pair(prompt_ids=int32[5], chosen=Trajectory(...), rejected=Trajectory(...), margin=1.0, ordinal=17)"""

    prompt_ids: Int32
    chosen: Trajectory
    rejected: Trajectory
    margin: float
    ordinal: int


def form_pairs(groups: Iterable[Group], *, oldest: int = 0, min_margin: float = 1e-6) -> Iterator[Pair]:
    """Best against worst of each group, from the live queue or a journal. Ties (gap <= min_margin) give no pair.

    oldest: answers with a token made by a version before this one are left out (version filter). Answers without a
    finite score or without a trainable token are left out. Of equal scores the first answer is taken: replays agree.
    """
    for group in groups:
        usable = [
            (t.verdict.value, t) for t in group.trajectories if _usable(t, oldest) and isinstance(t.verdict, Scored)
        ]
        if len(usable) < 2:
            continue
        best = max(usable, key=lambda x: x[0])
        worst = min(usable, key=lambda x: x[0])
        if best[0] - worst[0] > min_margin:
            yield Pair(group.prompt_ids, best[1], worst[1], best[0] - worst[0], group.ordinal)


def _usable(t: Trajectory, oldest: int) -> bool:
    return bool(t.loss_mask.any()) and min((s.version for s in t.versions), default=-1) >= oldest
