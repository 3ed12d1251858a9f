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
    """[c, V] temperature-scaled logits in `wide` precision, a fresh tensor that the caller may overwrite."""
    if fp32_head:
        h, weight = h.to(wide), weight.to(wide)
    z = (h @ weight.t()).to(wide)
    if bias is not None:
        z += bias.to(wide)
    return z if temperature == 1.0 else z.mul_(1 / temperature)


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
            top = z.amax(dim=-1, keepdim=True)
            z -= top  # centred: large logits cost the entropy no digits
            chosen = z.gather(-1, targets[part].unsqueeze(-1)).squeeze(-1)
            e = z.exp()
            total = e.sum(dim=-1)
            logprobs[part] = chosen - total.log()
            entropy[part] = total.log() - torch.linalg.vecdot(e, z) / total
            norm[part] = top.squeeze(-1) + total.log()
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
        d_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if ctx.needs_input_grad[1] else None
        d_bias = None
        if bias is not None and ctx.needs_input_grad[2]:
            d_bias = torch.zeros(bias.shape, dtype=wide, device=weight.device)
        compute = wide if fp32 else hidden.dtype
        head = weight.to(compute)
        for at in range(0, hidden.shape[0], chunk):
            part = slice(at, at + chunk)
            h = torch.where(live[part].unsqueeze(-1), hidden[part], torch.zeros_like(hidden[part]))
            logp = _logits(h, weight, bias, temperature, wide, fp32).sub_(norm[part].unsqueeze(-1))
            dz = _dlogits(logp, targets[part], entropy[part], _part(grad_logp, part), _part(grad_entropy, part))
            if d_bias is not None:
                d_bias += dz.sum(0)
            dz = dz.to(compute)
            if d_hidden is not None:
                d_hidden[part] = (dz @ head).to(hidden.dtype)
            if d_weight is not None and compute == wide:
                d_weight.addmm_(dz.t(), h.to(compute))
            elif d_weight is not None:
                d_weight += dz.t() @ h
        return (
            d_hidden,
            d_weight.to(weight.dtype) if d_weight is not None else None,
            d_bias.to(bias.dtype) if d_bias is not None else None,
            None, None, None, None,
        )  # fmt: skip


def _part(grad: Tensor | None, part: slice) -> Tensor | None:
    return None if grad is None else grad[part]


def _live(grad_logp: Tensor | None, grad_entropy: Tensor | None, like: Tensor) -> Tensor:
    """[T] tokens with an incoming gradient. The others are computed as zeros, so that a NaN of theirs stays theirs."""
    live = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
    for g in (grad_logp, grad_entropy):
        live = live if g is None else live | (g != 0)
    return live


def _dlogits(logp: Tensor, targets: Tensor, entropy: Tensor, g: Tensor | None, g_entropy: Tensor | None) -> Tensor:
    """[c, V] gradient of the scaled logits: g (1[y] - p) - g_entropy p (logp + H). May overwrite logp."""
    if g_entropy is None:
        pull = -g if g is not None else torch.zeros_like(entropy)
        dz = logp.exp_().mul_(pull.unsqueeze(-1))
    else:
        p = logp.exp()
        pull = -g_entropy * entropy - (g if g is not None else 0)
        dz = logp.mul_(-g_entropy.unsqueeze(-1)).add_(pull.unsqueeze(-1)).mul_(p)
    if g is not None:
        dz.scatter_add_(-1, targets.unsqueeze(-1), g.unsqueeze(-1))
    return dz
