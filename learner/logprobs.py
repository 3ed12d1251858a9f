"""Log-probabilities without the logits: hidden states -> chunked lm_head -> log-prob and entropy of each target.

Only `chunk` rows of logits exist at any time, forward and backward: peak memory is chunk x vocabulary, not
tokens x vocabulary. The backward pass recomputes a chunk's logits and applies the closed-form gradient (as
Cut-Cross-Entropy 2411.09009 does):

    z = h W^T / temperature + bias / temperature;  logp = z[y] - logsumexp(z);  H = -sum_j p_j log p_j
    d logp / dz_j = 1[j = y] - p_j             dH / dz_j = -p_j (log p_j + H)

The temperature is the SAMPLING temperature: the engine's log-probs are those of the scaled distribution.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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

    Pass only positions that carry loss. fp32_head casts hidden and weight to float32 before the product (MiniMax-M1,
    ScaleRL: a bfloat16 head is the largest source of mismatch between engine and learner); softmax is float32 anyway.
    """
    logprobs, entropy = _Chunked.apply(hidden, weight, bias, targets, float(temperature), int(chunk), fp32_head)
    return logprobs, entropy


def _logits(
    h: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, wide: torch.dtype, fp32_head: bool
) -> Tensor:
    """[c, V] temperature-scaled logits in `wide` precision."""
    if fp32_head:
        h, weight = h.to(wide), weight.to(wide)
    z = (h @ weight.t()).to(wide)
    if bias is not None:
        z = z + bias.to(wide)
    return z.div_(temperature)


class _Chunked(torch.autograd.Function):
    """Forward keeps hidden, weight and two numbers per token; backward recomputes the logits chunk by chunk."""

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
        n = hidden.shape[0]
        logprobs, entropy, norm = (torch.empty(n, dtype=wide, device=hidden.device) for _ in range(3))
        for at in range(0, n, chunk):
            part = slice(at, at + chunk)
            z = _logits(hidden[part], weight, bias, temperature, wide, fp32)
            norm[part] = torch.logsumexp(z, dim=-1)
            logprobs[part] = z.gather(-1, targets[part].unsqueeze(-1)).squeeze(-1) - norm[part]
            logp = z.sub_(norm[part].unsqueeze(-1))
            entropy[part] = -torch.where(logp > -torch.inf, logp.exp() * logp, torch.zeros_like(logp)).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, norm, entropy)
        ctx.settings = (temperature, chunk, wide, fp32)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, norm, entropy = ctx.saved_tensors
        temperature, chunk, wide, fp32 = ctx.settings
        grad_logp, grad_entropy = grads
        d_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if ctx.needs_input_grad[1] else None
        d_bias = (
            torch.zeros(bias.shape, dtype=wide, device=weight.device)
            if bias is not None and ctx.needs_input_grad[2]
            else None
        )
        compute = wide if fp32 else hidden.dtype
        for at in range(0, hidden.shape[0], chunk):
            part = slice(at, at + chunk)
            logp = _logits(hidden[part], weight, bias, temperature, wide, fp32).sub_(norm[part].unsqueeze(-1))
            pulls = (_part(grad_logp, part), _part(grad_entropy, part))
            dz, live = _dlogits(logp, targets[part], entropy[part], *pulls)
            dz.div_(temperature)
            if d_bias is not None:
                d_bias += dz.sum(0)
            dz = dz.to(compute)
            if d_hidden is not None:
                d_hidden[part] = (dz @ weight.to(compute)).to(hidden.dtype)
            if d_weight is not None:
                h = torch.where(live.unsqueeze(-1), hidden[part], torch.zeros_like(hidden[part]))
                d_weight += (dz.t() @ h.to(compute)).to(wide)
        return (
            d_hidden,
            d_weight.to(weight.dtype) if d_weight is not None else None,
            d_bias.to(bias.dtype) if d_bias is not None else None,
            None, None, None, None,
        )  # fmt: skip


def _part(grad: Tensor | None, part: slice) -> Tensor | None:
    return None if grad is None else grad[part]


def _dlogits(
    logp: Tensor, targets: Tensor, entropy: Tensor, g: Tensor | None, g_entropy: Tensor | None
) -> tuple[Tensor, Tensor]:
    """[c, V] gradient of the scaled logits; exact zeros for tokens without one (live: False), NaN or not."""
    p = logp.exp()
    dz = torch.zeros_like(logp)
    live = torch.zeros(len(logp), dtype=torch.bool, device=logp.device)
    if g is not None:
        dz -= g.unsqueeze(-1) * p
        dz.scatter_add_(-1, targets.unsqueeze(-1), g.unsqueeze(-1))
        live |= g != 0
    if g_entropy is not None:
        inner = torch.where(p > 0, p * (logp + entropy.unsqueeze(-1)), torch.zeros_like(p))
        dz -= g_entropy.unsqueeze(-1) * inner
        live |= g_entropy != 0
    return torch.where(live.unsqueeze(-1), dz, torch.zeros_like(dz)), live
