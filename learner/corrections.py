"""Corrections for asynchrony: what to do about tokens that other weights, or another engine, sampled.

Legend as in losses.py. All functions take `log_w [T]`, a log importance weight WITHOUT gradient, and return
(weight [T], keep [T] bool): the loss of a token is multiplied by `weight`, which is 0 where `keep` is False. The
denominator stays the ORIGINAL token count (as all peers but verl's decoupled mode).

    decoupled   log_w = logp_old - logp_mu   weight x clipped loss on logp - logp_old   Hilton et al. 2110.00641, AReaL
    bypass      log_w = logp - logp_mu       only for REINFORCE, where the weight is the whole correction

NaN or inf at an unmasked token never gets here: objective.py drops such tokens first and counts them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.losses import LOG_RATIO_LIMIT, Width
from learner.segments import Reduce, Segments, alone


def correct(kind: str, log_w: Tensor, seq: Segments, low: float | None, high: float | None) -> tuple[Tensor, Tensor]:
    """The weight function called `kind` (Choices.correction); bounds are absolute weights, None means no bound."""
    everywhere = torch.ones_like(log_w, dtype=torch.bool)
    if kind == "none":
        return torch.ones_like(log_w), everywhere
    if kind == "uncapped":
        return _exp(log_w), everywhere
    level, _, action = kind.rpartition("_")
    statistic = {"": token_weight, "seq": sequence_weight, "geo": geometric_weight}[level](log_w, seq)
    if action == "tis":
        return truncate(statistic, low, high), everywhere
    keep = inside(statistic, low, high)
    if action == "mask":
        return keep.to(log_w.dtype), keep
    survivors = token_weight(log_w, seq) if level == "geo" else statistic
    return torch.where(keep, survivors, 0.0), keep


# ------------------------------------------------------------ which weight


def token_weight(log_w: Tensor, seq: Segments) -> Tensor:
    """w_t = exp(log_w_t)."""
    return _exp(log_w)


def sequence_weight(log_w: Tensor, seq: Segments) -> Tensor:
    """prod_t w_t of the answer, in log space, the sum clamped to +-20: long answers neither overflow nor vanish."""
    return seq.spread(_exp(seq.sum(log_w)))


def geometric_weight(log_w: Tensor, seq: Segments) -> Tensor:
    """exp(mean_t log_w_t): the per-token drift of an answer, comparable across lengths."""
    return seq.spread(_exp(seq.mean(log_w)))


# ------------------------------------------------------------ what to do with it


def truncate(w: Tensor, low: float | None, high: float | None) -> Tensor:
    """Truncated importance sampling: clip(w, low, high). One-sided (low None): TIS, fengyao.notion.site 2025, cap 2."""
    return w.clamp(low, high) if low is not None or high is not None else w


def inside(w: Tensor, low: float | None, high: float | None) -> Tensor:
    """Masked importance sampling keeps low <= w <= high: MIS 0.5..2; IcePop (Ring-1T 2510.18855) 0.5..5; TRL ..3."""
    keep = torch.ones_like(w, dtype=torch.bool)
    if low is not None:
        keep &= w >= low
    if high is not None:
        keep &= w <= high
    return keep


# ------------------------------------------------------------ masks with other statistics


def opsm(logp: Tensor, base: Tensor, A: Tensor, seq: Segments, delta: float) -> tuple[Tensor, Tensor]:
    """Off-policy sequence masking, DeepSeek-V3.2: drop an answer if A < 0 and mean_t(base - logp) > delta.

    Returns (keep [n], the mean log-ratio mu / pi [n]). `base` is logp_mu (TRL) or logp_old (slime).
    """
    drift = seq.mean((base - logp).detach())
    return ~((seq.mean(A) < 0) & (drift > delta)), drift


def m2po(log_w: Tensor, mask: Tensor, tau: float, reduce: Reduce = alone) -> Tensor:
    """M2PO, 2510.01161: drop the tokens with the largest (log w)^2 until the mean of those kept is <= tau. keep [T].

    The set depends on the whole optimizer step: call it once per rank on all its tokens. The cut is found by bisection
    on the bound, which needs only sums, so every rank finds the same cut. Equal squares are kept or dropped together.
    """
    square = torch.where(mask, log_w * log_w, 0.0).double()
    below, above = 0.0, 2 * (2 * LOG_RATIO_LIMIT) ** 2
    for _ in range(80):
        middle = (below + above) / 2
        kept = mask & (square <= middle)
        total, count = (float(x) for x in reduce(torch.stack([square[kept].sum(), kept.sum().double()])))
        below, above = (middle, above) if total <= tau * count else (below, middle)
    return mask & (square <= below)


def staleness_width(width: float, staleness: Tensor, exponent: float) -> Width:
    """Clip width by token age, ours: width (1 + s)^exponent, s = learner version - version that sampled the token.

    exponent > 0 widens (bypass: ratios to older weights spread further), < 0 tightens (older evidence moves us less).
    """
    return width * (1 + staleness.clamp(min=0)) ** exponent


def loglinear_prox(logp: Tensor, logp_mu: Tensor, v_theta: Tensor, v_mu: Tensor) -> Tensor:
    """A-3PO, 2512.06547: proximal log-probs without a forward pass, logp_mu + alpha (logp - logp_mu), detached.

    v_theta is the version being optimised, v_mu [T] the version that sampled each token (anything that broadcasts).
    """
    return (logp_mu + loglinear_alpha(v_theta, v_mu).to(logp.dtype) * (logp - logp_mu)).detach()


def loglinear_alpha(v_theta: Tensor, v_mu: Tensor) -> Tensor:
    """alpha = clamp((v_prox - v_mu) / (v_theta - v_mu), 0, 1), v_prox = v_theta - 1; equal versions: 0."""
    gap = (v_theta - v_mu).double()
    return ((gap - 1) / torch.where(gap == 0, torch.ones_like(gap), gap)).clamp(0, 1)


def mismatch_k3(log_w: Tensor) -> Tensor:
    """k3 estimate of KL(mu || pi_old) per token from mu's samples: w - 1 - log w >= 0; healthy near 1e-3."""
    d = log_w.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(d) - d


def _exp(log_w: Tensor) -> Tensor:
    return log_w.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
