"""Attention over packed micro-batches: each block of `learner.packing` attends by itself, nothing in between.

transformers calls `packed_attention` in every layer (registered under the names below); the layout of the
micro-batch travels as the keyword `layout`. Two kernels give the same numbers:

    eager   matmuls and a softmax in float32, recomputed in backward: no [heads, T, T] tensor is ever kept
    sdpa    torch's scaled_dot_product_attention per block
    flex    torch's flex_attention over the whole micro-batch, the blocks as its sparsity; fast only when compiled (GPU)

Legend: T tokens, H query heads, K key heads, R = H / K, D head width, q and k queries and keys of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor

from learner.packing import Block
from rollout.errors import ConfigError

UNKNOWN = ("sliding_window", "softcap", "s_aux", "position_bias")  # what some models ask for and no kernel here does
NAMES = {kernel: f"headrace_{kernel}" for kernel in ("eager", "sdpa", "flex")}


@dataclass(frozen=True, slots=True, eq=False)
class BlockMask:
    """One block on the device: its slices and the additive mask [q, k] (0 or -inf, float32)."""

    start: int
    stop: int
    prefix_start: int
    prefix_stop: int
    bias: Tensor

    def keys(self, states: Tensor) -> Tensor:
        """[K, T, D] -> [K, k, D], the keys this block may see."""
        own = states[:, self.start : self.stop]
        if self.prefix_start == self.prefix_stop:
            return own
        return torch.cat([states[:, self.prefix_start : self.prefix_stop], own], dim=1)

    def add_keys(self, into: Tensor, grad: Tensor) -> None:
        """The transpose of `keys`: scatter a gradient [K, k, D] back into [K, T, D]."""
        n_prefix = self.prefix_stop - self.prefix_start
        if n_prefix:
            into[:, self.prefix_start : self.prefix_stop] += grad[:, :n_prefix]
        into[:, self.start : self.stop] += grad[:, n_prefix:]


class Masks:
    """The layout of one micro-batch on the device, in whichever form a kernel wants; made once, used by all layers."""

    def __init__(self, blocks: Sequence[Block], device: torch.device) -> None:
        self.blocks, self.device = blocks, device

    @cached_property
    def dense(self) -> tuple[BlockMask, ...]:
        """An additive mask per block, for eager and sdpa."""
        made = []
        for b in self.blocks:
            allowed = torch.from_numpy(b.mask()).to(self.device)
            bias = torch.zeros(allowed.shape, device=self.device).masked_fill_(~allowed, float("-inf"))
            made.append(BlockMask(b.start, b.stop, b.prefix_start, b.prefix_stop, bias))
        return tuple(made)

    @cached_property
    def flex(self) -> Any:
        """torch's sparse BlockMask of the whole micro-batch, from two numbers per token: own segment, own prompt."""
        from torch.nn.attention.flex_attention import create_block_mask

        size = self.blocks[-1].stop
        segment, prompt = (torch.empty(size, dtype=torch.int32) for _ in range(2))
        for b in self.blocks:
            prompt[b.start : b.stop] = b.prefix_start
            begin = b.start
            for end in b.segments:
                segment[begin : b.start + end] = begin
                begin = b.start + end
        segment, prompt = segment.to(self.device), prompt.to(self.device)

        def sees(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & ((segment[q] == segment[k]) | (prompt[q] == segment[k]))

        return create_block_mask(sees, None, None, size, size, device=self.device)


class _EagerBlocks(torch.autograd.Function):
    """softmax(q k^T * scale + bias) v per block. Keeps q, k, v and the output; the weights are computed again."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, masks: tuple[BlockMask, ...]
    ) -> Tensor:
        heads, _, width = query.shape
        out = torch.empty_like(query)
        for m in masks:
            q = query[:, m.start : m.stop].reshape(key.shape[0], -1, width)
            weights = _weights(q, m.keys(key), scale, m.bias).to(value.dtype)
            out[:, m.start : m.stop] = torch.bmm(weights, m.keys(value)).view(heads, -1, width)
        ctx.save_for_backward(query, key, value, out)
        ctx.scale, ctx.masks = scale, masks
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out = ctx.saved_tensors
        heads, _, width = query.shape
        kv_heads, grad = key.shape[0], grads[0]
        d_query = torch.empty_like(query)
        d_key, d_value = torch.zeros_like(key), torch.zeros_like(value)
        inner = (grad.float() * out.float()).sum(-1)  # [H, T]
        for m in ctx.masks:
            rows = slice(m.start, m.stop)
            q = query[:, rows].reshape(kv_heads, -1, width)
            g = grad[:, rows].reshape(kv_heads, -1, width)
            k, v = m.keys(key), m.keys(value)
            weights = _weights(q, k, ctx.scale, m.bias)
            m.add_keys(d_value, torch.bmm(weights.to(g.dtype).transpose(1, 2), g))
            d_scores = torch.bmm(g, v.transpose(1, 2)).float().sub_(inner[:, rows].reshape(kv_heads, -1, 1))
            d_scores = d_scores.mul_(weights.mul_(ctx.scale)).to(q.dtype)
            d_query[:, rows] = torch.bmm(d_scores, k).view(heads, -1, width)
            m.add_keys(d_key, torch.bmm(d_scores.transpose(1, 2), q))
        return d_query, d_key, d_value, None, None


def _weights(q: Tensor, k: Tensor, scale: float, bias: Tensor) -> Tensor:
    """[K, R*q, D] x [K, k, D] -> float32 [K, R*q, k]. torch's softmax: exp alone is ten times as slow at -inf."""
    scores = torch.bmm(q, k.transpose(1, 2)).float().mul_(scale)
    scores.view(scores.shape[0], -1, *bias.shape).add_(bias)
    return torch.softmax(scores, dim=-1)


def _sdpa_blocks(query: Tensor, key: Tensor, value: Tensor, scale: float, masks: tuple[BlockMask, ...]) -> Tensor:
    parts = []
    repeats = query.shape[0] // key.shape[0]
    for m in masks:
        k, v = m.keys(key), m.keys(value)
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
        q = query[:, m.start : m.stop]
        bias = m.bias.to(q.dtype)
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=bias, scale=scale)[0]
        )
    return torch.cat(parts, dim=1)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, K, T, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Masks | None = None,
    kernel: str = "eager",
    **extras: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls. Returns [1, T, H, D]."""
    for name in UNKNOWN:
        if extras.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} attends with {name} {extras[name]!r}, which packed attention does not know; "
                "set topology.learner.packing: padded"
            )
    if layout is None:
        raise ValueError("packed attention was called without `layout`: pass Masks(batch.blocks, device) to the model")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if kernel == "eager":
        out = _EagerBlocks.apply(query[0], key[0], value[0], scale, layout.dense)
    elif kernel == "sdpa":
        out = _sdpa_blocks(query[0], key[0], value[0], scale, layout.dense)
    else:
        out = _flex(query.device.type)(query, key, value, block_mask=layout.flex, scale=scale, enable_gqa=True)[0]
    return out.transpose(0, 1).unsqueeze(0), None


@cache
def _flex(device_type: str) -> Any:
    """Compiled where that pays; on the CPU its plain form is a dense product, good for proofs only."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if device_type == "cuda" else flex_attention


def _no_mask(*_: Any, **__: Any) -> None:
    """The blocks carry the mask; transformers need not build one."""


def register() -> None:
    """Make both kernels known to transformers (idempotent)."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for kernel, name in NAMES.items():
        AttentionInterface.register(name, partial(packed_attention, kernel=kernel))
        AttentionMaskInterface.register(name, _no_mask)
