"""Log-probabilities without the logits: hidden states -> chunked lm_head -> log-prob and entropy of each target.

Only a tile of logits exists at any time, forward and backward: some positions by some of the vocabulary. Its products
are made as a whole, the passes of its softmax a strip of rows at a time, which on a CPU stays in the cache over them.
Peak memory is that tile, not tokens x vocabulary. The backward pass recomputes a tile's logits, applies the closed-form
gradient (as Cut-Cross-Entropy 2411.09009 does), and puts it where the logits were:

    z = h W^T / temperature + bias / temperature;  logp = z[y] - logsumexp(z);  H = -sum_j p_j log p_j
    d logp / dz_j = 1[j = y] - p_j             dH / dz_j = -p_j (log p_j + H)

The temperature is the SAMPLING temperature: the engine's log-probs are those of the scaled distribution.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

#: Logits of a tile, for an accelerator and for a CPU; and of a strip of it, which has to fit a CPU's caches in float32.
TILE = (1 << 25, 1 << 22)
STRIP = (1 << 25, 1 << 19)


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int = 1024,
    bias: Tensor | None = None,
    fp32_head: bool = False,
) -> tuple[Tensor, Tensor]:
    """hidden [T, D], weight [V, D], targets [T] -> (logprobs [T], entropy [T]), both differentiable, float32 or better.

    `chunk`: positions of a tile. Pass only positions that carry loss. fp32_head casts hidden and weight to float32
    before the product (MiniMax-M1, ScaleRL: a bfloat16 head is the largest source of mismatch between engine and
    learner); softmax is float32 anyway.
    """
    logprobs, entropy = _Chunked.apply(hidden, weight, bias, targets, float(temperature), int(chunk), fp32_head)
    return logprobs, entropy


def _product(h: Tensor, weight: Tensor, wide: torch.dtype, fp32_head: bool) -> Tensor:
    """[c, D] x [v, D] -> [c, v], a fresh tensor in the type that the gradient's products are made in."""
    return h.to(wide) @ weight.to(wide).t() if fp32_head else h @ weight.t()


def _scaled(strip: Tensor, bias: Tensor | None, temperature: float, wide: torch.dtype) -> Tensor:
    """[s, v] rows of a product, which it may overwrite -> temperature-scaled logits in `wide`, which the caller may."""
    z = strip.to(wide)
    if bias is not None:
        z += bias.to(wide)
    return z if temperature == 1.0 else z.mul_(1 / temperature)


class _Chunked(torch.autograd.Function):
    """Forward keeps hidden, weight and two numbers per token; backward recomputes the logits tile by tile."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        fp32: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        rows, columns = _tiles(hidden, weight, chunk)
        shape = (len(columns), len(targets))
        tops, totals, dots = (torch.empty(shape, dtype=wide, device=hidden.device) for _ in range(3))
        chosen = torch.zeros(len(targets), dtype=wide, device=hidden.device)
        for j, column in enumerate(columns):
            w, b = weight[column], None if bias is None else bias[column]
            for row in rows:
                tile = _product(hidden[row], w, wide, fp32)
                for strip, part in _strips(tile, row):
                    z = _scaled(tile[strip], b, temperature, wide)
                    chosen[part] += _at(z, targets[part] - column.start)
                    top = z.amax(dim=-1)
                    z -= top.unsqueeze(-1)  # centred: large logits cost the entropy no digits
                    e = z.exp()
                    tops[j, part], totals[j, part], dots[j, part] = top, e.sum(dim=-1), torch.linalg.vecdot(e, z)
        logprobs, entropy, norm = _merged(chosen, tops, totals, dots)
        ctx.save_for_backward(hidden, weight, bias, targets, norm, entropy)
        ctx.settings = (temperature, chunk, wide, fp32)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, norm, entropy = ctx.saved_tensors
        temperature, chunk, wide, fp32 = ctx.settings
        grad_logp, grad_entropy = (g if g is None else g / temperature for g in grads)
        live = _live(grad_logp, grad_entropy, norm)
        norm, entropy = (torch.where(live, x, torch.zeros_like(x)) for x in (norm, entropy))
        h = torch.where(live.unsqueeze(-1), hidden, torch.zeros_like(hidden))
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.zeros(hidden.shape, dtype=wide, device=hidden.device) if wants_hidden else None
        d_weight = torch.empty_like(weight) if wants_weight else None
        d_bias = torch.zeros_like(bias, dtype=wide) if wants_bias else None
        rows, columns = _tiles(hidden, weight, chunk)
        for column in columns:
            w, b = weight[column], None if bias is None else bias[column]
            d_w = torch.zeros(w.shape, dtype=wide, device=w.device) if wants_weight and len(rows) != 1 else None
            for row in rows:
                dz = _product(h[row], w, wide, fp32)
                for strip, part in _strips(dz, row):
                    logp = _scaled(dz[strip], b, temperature, wide).sub_(norm[part].unsqueeze(-1))
                    y = targets[part] - column.start
                    d = _dlogits(logp, y, entropy[part], _part(grad_logp, part), _part(grad_entropy, part))
                    if d_bias is not None:
                        d_bias[column] += d.sum(0)
                    dz[strip] = d
                if d_hidden is not None:
                    d_hidden[row] += dz @ w.to(dz.dtype)
                if d_w is not None:
                    d_w += dz.t() @ h[row].to(dz.dtype)
                elif d_weight is not None:
                    d_weight[column] = dz.t() @ h.to(dz.dtype)
            if d_weight is not None and d_w is not None:
                d_weight[column] = d_w
        return (
            d_hidden.to(hidden.dtype) if d_hidden is not None else None,
            d_weight,
            d_bias.to(bias.dtype) if d_bias is not None else None,
            None, None, None, None,
        )  # fmt: skip


def _tiles(hidden: Tensor, weight: Tensor, chunk: int) -> tuple[list[slice], list[slice]]:
    """Rows of at most `chunk` positions, columns of the vocabulary so that a tile has `TILE` logits."""
    n, size = len(hidden), len(weight)
    chunk = max(1, min(chunk, n))
    width = max(1, min(size, TILE[hidden.device.type == "cpu"] // chunk))
    return [slice(at, at + chunk) for at in range(0, n, chunk)], [slice(at, at + width) for at in range(0, size, width)]


def _strips(tile: Tensor, rows: slice) -> Iterator[tuple[slice, slice]]:
    """Rows of a tile, some at a time: where they stand in the tile, and which positions they are."""
    size, width = tile.shape
    step = max(1, STRIP[tile.device.type == "cpu"] // width)
    for at in range(0, size, step):
        end = min(at + step, size)
        yield slice(at, end), slice(rows.start + at, rows.start + end)


def _at(z: Tensor, y: Tensor) -> Tensor:
    """z [c, v], y [c] -> z[y] where y lies in the tile, else 0."""
    inside = (y >= 0) & (y < z.shape[-1])
    return torch.where(inside, z.gather(-1, y.clamp(0, z.shape[-1] - 1).unsqueeze(-1)).squeeze(-1), 0)


def _merged(chosen: Tensor, tops: Tensor, totals: Tensor, dots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Combine per tile of columns its maximum, sum of exp(z - top) and of (z - top) exp(z - top); each [tiles, T].

    Returns logprobs, entropy and the log of the normaliser, each [T].
    """
    top = tops.amax(dim=0)
    lower = tops - top
    share = lower.exp()
    total = (share * totals).sum(dim=0)
    entropy = total.log() - (share * (dots + lower * totals)).sum(dim=0) / total
    return (chosen - top) - total.log(), entropy, top + total.log()


def _part(grad: Tensor | None, part: slice) -> Tensor | None:
    return None if grad is None else grad[part]


def _live(grad_logp: Tensor | None, grad_entropy: Tensor | None, like: Tensor) -> Tensor:
    """[T] tokens with an incoming gradient. The others are computed as zeros, so that a NaN of theirs stays theirs."""
    live = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
    for g in (grad_logp, grad_entropy):
        live = live if g is None else live | (g != 0)
    return live


def _dlogits(logp: Tensor, targets: Tensor, entropy: Tensor, g: Tensor | None, g_entropy: Tensor | None) -> Tensor:
    """[c, v] gradient of a tile's scaled logits: g (1[y] - p) - g_entropy p (logp + H). May overwrite logp.

    Targets outside of the tile, negative ones too, add nothing.
    """
    if g_entropy is None:
        pull = -g if g is not None else torch.zeros_like(entropy)
        dz = logp.exp_().mul_(pull.unsqueeze(-1))
    else:
        p = logp.exp()
        pull = -g_entropy * entropy - (g if g is not None else 0)
        dz = logp.mul_(-g_entropy.unsqueeze(-1)).add_(pull.unsqueeze(-1)).mul_(p)
    if g is not None:
        inside = (targets >= 0) & (targets < dz.shape[-1])
        place = targets.clamp(0, dz.shape[-1] - 1).unsqueeze(-1)
        dz.scatter_add_(-1, place, torch.where(inside, g, 0).unsqueeze(-1).to(dz.dtype))
    return dz
