"""Per-token rewards, returns, GAE and whitening, on flat packed tokens. Masked (tool) tokens are skipped, not zeroed.

Legend: rho [T] token rewards, V [T] values, m mask, t+1 = the NEXT UNMASKED token of the same answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.segments import Reduce, Segments, alone


def last_unmasked(seq: Segments) -> Tensor:
    """[T] bool: the last unmasked token of each answer (none for an empty one)."""
    position = torch.arange(len(seq.ids), device=seq.ids.device)
    inside = torch.where(seq.mask, position, torch.full_like(position, -1))
    last = torch.full((seq.n,), -1, dtype=position.dtype, device=position.device).scatter_reduce(
        0, seq.ids, inside, "amax"
    )
    return seq.mask & (position == last[seq.ids])


def token_rewards(score: Tensor, charge: Tensor, seq: Segments) -> Tensor:
    """rho_t = -charge_t + 1[t last] score (Stiennon et al. 2009.01325): charge [T] = beta * KL, score [n]."""
    rho = torch.where(last_unmasked(seq), seq.spread(score), 0.0) - charge
    return torch.where(seq.mask, rho, 0.0)


def gae(
    rewards: Tensor, values: Tensor, seq: Segments, gamma: float, lam: float, bootstrap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """GAE, Schulman et al. 1506.02438 eq. 16. Returns (advantages [T], returns [T]), before any whitening.

    delta_t = rho_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  R_t = A_t + V_t
    V after the last token is bootstrap [n] (truncated answers: the critic's value there; finished ones: 0).
    """
    rho, v, m = (_padded(x, seq) for x in (rewards, values, seq.mask))
    m = m.bool()
    v = torch.where(m, v, 0.0)
    advantage = torch.zeros_like(rho)
    next_a = torch.zeros_like(rho[:, 0]) if rho.shape[1] else rho.new_zeros(seq.n)
    next_v = next_a if bootstrap is None else bootstrap.to(rho.dtype)
    for t in range(rho.shape[1] - 1, -1, -1):
        here = m[:, t]
        a = rho[:, t] + gamma * next_v - v[:, t] + gamma * lam * next_a
        next_a, next_v = torch.where(here, a, next_a), torch.where(here, v[:, t], next_v)
        advantage[:, t] = torch.where(here, a, 0.0)
    flat = _flat(advantage, seq)
    return flat, torch.where(seq.mask, flat + torch.where(seq.mask, values, 0.0), torch.zeros_like(flat))


def discounted(rewards: Tensor, seq: Segments, gamma: float) -> Tensor:
    """REINFORCE++ returns, 2501.03262: R_t = rho_t + gamma R_{t+1}; masked tokens carry the return through."""
    zero = torch.zeros_like(rewards)
    return gae(rewards, zero, seq, gamma, 1.0)[0]


def moments(x: Tensor, mask: Tensor, ddof: int, reduce: Reduce = alone) -> tuple[Tensor, Tensor]:
    """Mean and variance of the unmasked entries over all ranks, in two passes (no cancellation)."""
    filled = torch.where(mask, x, 0.0)
    total = reduce(torch.stack([filled.sum(), mask.sum().to(x.dtype)]))
    mean = total[0] / total[1].clamp(min=1)
    centred = torch.where(mask, x - mean, 0.0)
    square = reduce((centred * centred).sum().reshape(1))[0]
    return mean, square / (total[1] - ddof).clamp(min=1)


def whiten(x: Tensor, mask: Tensor, eps: float, ddof: int, reduce: Reduce = alone, eps_in: str = "variance") -> Tensor:
    """(x - mean) / sqrt(var + eps) over the step's unmasked entries, 0 elsewhere; eps_in="std": / (sqrt(var) + eps).

    A lone entry and entries that are all equal up to rounding give exactly 0, never a division by eps.
    """
    mean, var = moments(x, mask, ddof, reduce)
    scale = torch.rsqrt(var + eps) if eps_in == "variance" else 1 / (var.sqrt() + eps)
    noise = (1 + mean.abs()) * 1e-7
    return torch.where(mask & (var > noise * noise), (x - mean) * scale, 0.0)


def _padded(x: Tensor, seq: Segments) -> Tensor:
    """[T] -> [n, longest]: the tokens of each answer in order, masked ones included, 0 behind them."""
    rows, columns, width = _grid(seq)
    grid = torch.zeros(seq.n, width, dtype=x.dtype, device=x.device)
    grid[rows, columns] = x
    return grid


def _flat(grid: Tensor, seq: Segments) -> Tensor:
    rows, columns, _ = _grid(seq)
    return grid[rows, columns]


def _grid(seq: Segments) -> tuple[Tensor, Tensor, int]:
    """Row and column of each flat token: its answer and its place in it (an answer's tokens are in order)."""
    order = torch.argsort(seq.ids, stable=True)
    counts = torch.bincount(seq.ids, minlength=seq.n)
    starts = torch.cumsum(counts, 0) - counts
    place = torch.empty_like(seq.ids)
    place[order] = torch.arange(len(seq.ids), device=seq.ids.device) - starts[seq.ids[order]]
    return seq.ids, place, int(counts.max()) if len(counts) else 0
