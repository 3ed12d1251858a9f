"""Shaping of rewards by length: pure functions on one value per answer."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_overlong(
    lengths: Tensor, limit: float, cache: float, factor: float = 1.0, floor: float | None = -1.0
) -> Tensor:
    """DAPO 2503.14476 eq. 13, ADDED to the reward: 0 up to limit - cache, then linear, -1 from limit on (x factor).

    floor None is verl's and AReaL's uncapped form; it differs only for answers longer than the limit.
    """
    exceed = (lengths - (limit - cache)) / cache
    penalty = -exceed.clamp(min=0)
    return factor * (penalty if floor is None else penalty.clamp(min=floor))


def linear_length(rewards: Tensor, lengths: Tensor, weight: float) -> Tensor:
    """PRIME-RL's linear length penalty over one group: r - mean(r) weight length / max length."""
    return rewards - rewards.mean() * weight * lengths / lengths.max().clamp(min=1)


def kimi_length(lengths: Tensor, correct: Tensor) -> Tensor:
    """Kimi k1.5 2501.12599 sec. 2.3.3, over one group, lam = 0.5 - (len - min) / (max - min); wrong: min(0, lam).

    All lengths equal: 0.
    """
    low, high = lengths.min(), lengths.max()
    if high == low:
        return torch.zeros_like(lengths)
    lam = 0.5 - (lengths - low) / (high - low)
    return torch.where(correct > 0, lam, lam.clamp(max=0))
