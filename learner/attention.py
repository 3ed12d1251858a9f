"""Attention over packed micro-batches: each block of `learner.packing` attends by itself, nothing in between.

transformers calls `packed_attention` in every layer (registered under the names below); the layout of the
micro-batch travels as the keyword `layout`. Two kernels give the same numbers:

    eager   matmuls and a softmax per tile of queries, recomputed in backward: no [heads, T, T] tensor ever exists
    sdpa    torch's scaled_dot_product_attention per block
    flex    torch's flex_attention over the whole micro-batch, the blocks as its sparsity; fast only when compiled (GPU)

Legend: T tokens, H query heads, K key heads, R = H / K, D head width, q and k queries and keys of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor

from learner.packing import Block
from rollout.errors import ConfigError

UNKNOWN = ("sliding_window", "softcap", "s_aux", "position_bias")  # what some models ask for and no kernel here does
#: Queries of a tile of the eager kernel: fewer waste less of the triangle, more cost fewer calls.
ROWS = 128
NAMES = {kernel: f"headrace_{kernel}" for kernel in ("eager", "sdpa", "flex")}


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Some queries of a block on the device, the keys they may see, and the additive mask of the last keys.

    Keys are the prefix and, after it, `[own_start, own_stop)`. `bias` [q, w] (0 or -inf) covers the last w keys; the
    ones before are seen by all of the queries.
    """

    start: int
    stop: int
    prefix_start: int
    prefix_stop: int
    own_start: int
    own_stop: int
    bias: Tensor

    def keys(self, states: Tensor) -> Tensor:
        """[K, T, D] -> [K, k, D], the keys these queries may see."""
        own = states[:, self.own_start : self.own_stop]
        if self.prefix_start == self.prefix_stop:
            return own
        return torch.cat([states[:, self.prefix_start : self.prefix_stop], own], dim=1)

    def add_keys(self, into: Tensor, grad: Tensor) -> None:
        """The transpose of `keys`: scatter a gradient [K, k, D] back into [K, T, D]."""
        n_prefix = self.prefix_stop - self.prefix_start
        if n_prefix:
            into[:, self.prefix_start : self.prefix_stop] += grad[:, :n_prefix]
        into[:, self.own_start : self.own_stop] += grad[:, n_prefix:]

    def hide(self, scores: Tensor) -> None:
        """Add the mask to scores [K, R*q, k], in place."""
        q, w = self.bias.shape
        scores.view(scores.shape[0], -1, q, scores.shape[-1])[..., -w:] += self.bias


class Masks:
    """The layout of one micro-batch on the device, in whichever form a kernel wants; made once, used by all layers."""

    def __init__(self, blocks: Sequence[Block], device: torch.device) -> None:
        self.blocks, self.device = blocks, device
        self._made: dict[tuple[int | None, torch.dtype], tuple[Tile, ...]] = {}

    def tiles(self, rows: int | None, dtype: torch.dtype) -> tuple[Tile, ...]:
        """Every block cut into tiles of at most `rows` queries; None: whole blocks."""
        if (rows, dtype) not in self._made:
            self._made[rows, dtype] = tuple(
                self._tile(b, at, min(at + (rows or b.stop), b.stop), dtype)
                for b in self.blocks
                for at in range(b.start, b.stop, rows or b.stop)
            )
        return self._made[rows, dtype]

    def _tile(self, b: Block, start: int, stop: int, dtype: torch.dtype) -> Tile:
        own_start = b.first_seen(start)
        first, last = b.segment_of(start), b.segment_of(stop - 1)
        alone = first == last and not (b.opens_with_prompt and first > 1)  # no sibling between: hide the triangle only
        masked = start if alone else own_start
        allowed = torch.from_numpy(b.mask(start, stop, masked))
        bias = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, float("-inf")).to(self.device)
        return Tile(start, stop, b.prefix_start, b.prefix_stop, own_start, stop, bias)

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


class _Eager(torch.autograd.Function):
    """softmax(q k^T * scale + bias) v per tile. Keeps q, k and v; the weights are computed again in backward.

    On a CPU the products are cheap and every pass over the scores is dear: none is made that a kernel can make on the
    way, and a tile's scores stay in the cache from one pass to the next.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, tiles: tuple[Tile, ...]) -> Tensor:
        heads, tokens, width = query.shape
        out = query.new_empty(tokens, heads, width).transpose(0, 1)  # as transformers wants it: [T, H, D] in memory
        for tile in tiles:
            q = query[:, tile.start : tile.stop].reshape(key.shape[0], -1, width)
            weights = _weights(q, tile.keys(key), scale, tile)
            out[:, tile.start : tile.stop] = torch.bmm(weights, tile.keys(value)).view(heads, -1, width)
        ctx.save_for_backward(query, key, value)
        ctx.scale, ctx.tiles = scale, tiles
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        heads, tokens, width = query.shape
        kv_heads, grad = key.shape[0], grads[0]
        d_query = query.new_empty(tokens, heads, width).transpose(0, 1)
        wide = torch.promote_types(key.dtype, torch.float32)  # a prompt's keys gather from every answer
        d_key, d_value = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (key, value))
        for tile in ctx.tiles:
            rows = slice(tile.start, tile.stop)
            q = query[:, rows].reshape(kv_heads, -1, width)
            g = grad[:, rows].reshape(kv_heads, -1, width)
            k = tile.keys(key)
            weights = _weights(q, k, ctx.scale, tile)
            tile.add_keys(d_value, torch.bmm(weights.transpose(1, 2), g))
            d_weights = torch.bmm(g, tile.keys(value).transpose(1, 2))
            d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
            d_query[:, rows] = torch.bmm(d_scores, k).mul_(ctx.scale).view(heads, -1, width)
            tile.add_keys(d_key, torch.bmm(d_scores.transpose(1, 2), q).mul_(ctx.scale))
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype), None, None


def _weights(q: Tensor, k: Tensor, scale: float, tile: Tile) -> Tensor:
    """[K, R*q, D] x [K, k, D] -> [K, R*q, k] in the type of q; the softmax itself computes in float32 or better."""
    if math.frexp(scale)[0] == 0.5:  # a power of two: exact on either side of the product, cheaper on this one
        scores = torch.bmm(q * scale, k.transpose(1, 2))
    else:
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale)
    tile.hide(scores)
    return torch.softmax(scores, dim=-1)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float, tiles: tuple[Tile, ...]) -> Tensor:
    parts = []
    repeats = query.shape[0] // key.shape[0]
    for tile in tiles:
        k, v = tile.keys(key), tile.keys(value)
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
        q = query[:, tile.start : tile.stop]
        bias = torch.nn.functional.pad(tile.bias, (k.shape[1] - tile.bias.shape[1], 0))
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
        out = _Eager.apply(query[0], key[0], value[0], scale, layout.tiles(ROWS, query.dtype))
    elif kernel == "sdpa":
        out = _sdpa(query[0], key[0], value[0], scale, layout.tiles(None, query.dtype))
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
