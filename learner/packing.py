"""From answers of ragged lengths to micro-batches without padding. Pure: numpy in, numpy out.

A group's prompt is laid down once and its G answers follow; each answer sees the prompt and itself, never its
siblings, and its positions continue from the prompt's. One micro-batch with one group, P = 3 and two answers:

    token_ids     p0 p1 p2 | a0 a1 | b0 b1 b2          T = 8
    position_ids   0  1  2 |  3  4 |  3  4  5
    predict_at              2  3      2  5  6          N = 5 positions whose hidden state predicts a target
    targets                a0 a1     b0 b1 b2

Only positions with loss are listed (N of them, not T): the output head is never applied to anything else.

Legend: T tokens of a micro-batch, N positions with loss, B answers in it, P prompt tokens, L answer tokens.
`sequence` and `group` are indices into this rank's whole share of the optimizer step, so that means over sequences
and prompts stay exact however the share is cut into micro-batches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from rollout.types import Bool, Int32

Int64 = npt.NDArray[np.int64]
Layout = Literal["shared", "packed", "padded"]

#: A block is worth splitting when that saves more score elements than one more kernel call costs.
_CALL_COST = 8192


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """One trainable answer: Answer(sequence=3, group=0, first=41, prompt_ids=int32[3], token_ids=int32[2], ...)."""

    sequence: int
    group: int
    first: int  # where its first token stands on the step's flat axis of answer tokens
    prompt_ids: Int32
    token_ids: Int32
    loss_mask: Bool

    @property
    def n_loss(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class Block:
    """Queries `[start, stop)` see the keys `[prefix_start, prefix_stop)` wholly and, causally, their own kind.

    `segments` are the ends of the answers inside the block, counted from `start`; with `opens_with_prompt` the
    first segment is the prompt, which the other segments see as well.
    """

    start: int
    stop: int
    prefix_start: int
    prefix_stop: int
    segments: tuple[int, ...]
    opens_with_prompt: bool

    def segment_of(self, token: int) -> int:
        """Which segment a token of this block belongs to."""
        return bisect_right(self.segments, token - self.start)

    def first_seen(self, token: int) -> int:
        """The first token of this block that a token of it, or any after it, may see."""
        number = self.segment_of(token)
        return self.start if self.opens_with_prompt or number == 0 else self.start + self.segments[number - 1]

    def mask(self, start: int, stop: int, first_key: int) -> Bool:
        """bool[stop - start, stop - first_key]: which tokens of the block, from `first_key` on, each query sees."""
        kind = np.searchsorted(self.segments, np.arange(self.start, stop) - self.start, side="right")
        queries, keys = kind[start - self.start :, None], kind[None, first_key - self.start :]
        own = queries == keys
        if self.opens_with_prompt:
            own |= keys == 0
        return own & np.tri(stop - start, stop - first_key, k=start - first_key, dtype=bool)


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """What one forward pass takes. `shape` is (1, T) where packed, (rows, width) where padded."""

    token_ids: Int64  # [T], row-major where padded
    position_ids: Int64  # [T]
    predict_at: Int64  # [N] index into the T flat positions
    targets: Int64  # [N]
    origin: Int64  # [N] where each stands on the step's flat axis of answer tokens
    sequence_ids: Int64  # [N] which of this micro-batch's B answers, 0..B-1
    sequences: Int64  # [B] the step's index of each answer
    groups: Int64  # [B] the step's index of each answer's group
    last_at: Int64  # [B] index of each answer's last token into the T flat positions
    blocks: tuple[Block, ...]  # empty where padded
    shape: tuple[int, int]
    lengths: tuple[int, ...] = field(default=())  # real tokens per row, where padded

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def n_loss(self) -> int:
        return len(self.targets)


def pack(answers: Sequence[Answer], *, token_budget: int, layout: Layout, at_least: int = 1) -> list[MicroBatch]:
    """Micro-batches of at most `token_budget` tokens, evenly filled; `at_least` asks for more of them.

    An answer that is longer than the budget on its own gets a micro-batch to itself: it cannot be cut.
    Fewer than `at_least` bundles of answers are topped up with empty micro-batches, so that every rank runs the
    same number of forward and backward passes (their collectives must meet).
    """
    bundles = _bundles(answers, token_budget, layout)
    bins = _fill(bundles, token_budget, at_least, layout)
    build = _padded if layout == "padded" else _packed
    batches = [build(content) for content in bins]
    return batches + [_empty()] * (at_least - len(batches))


def _cost(bundle: Sequence[Answer], layout: Layout) -> int:
    if layout == "padded":
        return sum(len(a.prompt_ids) + len(a.token_ids) for a in bundle)
    return len(bundle[0].prompt_ids) + sum(len(a.token_ids) for a in bundle)


def _bundles(answers: Iterable[Answer], token_budget: int, layout: Layout) -> list[list[Answer]]:
    """Answers that share one copy of their prompt. Without sharing, each answer is a bundle of its own."""
    if layout != "shared":
        return [[a] for a in answers]
    bundles: list[list[Answer]] = []
    for answer in answers:
        last = bundles[-1] if bundles else None
        if last and last[0].group == answer.group and _cost(last, layout) + len(answer.token_ids) <= token_budget:
            last.append(answer)
        else:
            bundles.append([answer])
    return bundles


def _fill(bundles: list[list[Answer]], token_budget: int, at_least: int, layout: Layout) -> list[list[list[Answer]]]:
    """Largest first into the emptiest bin; one more bin until nothing that could be split overflows."""
    if not bundles:
        return []
    order = sorted(range(len(bundles)), key=lambda i: (-_cost(bundles[i], layout), i))
    costs = [_cost(b, layout) for b in bundles]
    count = max(min(at_least, len(bundles)), -(-sum(costs) // token_budget))
    while True:
        bins: list[list[int]] = [[] for _ in range(min(count, len(bundles)))]
        loads = [0] * len(bins)
        for i in order:
            at = loads.index(min(loads))
            bins[at].append(i)
            loads[at] += costs[i]
        if count >= len(bundles) or max(loads) <= token_budget:
            return [[bundles[i] for i in sorted(content)] for content in bins]
        count += 1


def _packed(content: list[list[Answer]]) -> MicroBatch:
    tokens, positions, blocks = [], [], []
    heads: list[Int64] = []
    lasts: list[int] = []
    at = 0
    for bundle in content:
        prompt = bundle[0].prompt_ids
        n_prompt = len(prompt)
        prompt_end = at + n_prompt
        tokens.append(prompt)
        positions.append(np.arange(n_prompt))
        ends, cursor = [], prompt_end
        for answer in bundle:
            n = len(answer.token_ids)
            tokens.append(answer.token_ids)
            positions.append(np.arange(n_prompt, n_prompt + n))
            seen_from = np.concatenate([[prompt_end - 1], np.arange(cursor, cursor + n - 1)])
            heads.append(seen_from[answer.loss_mask])
            cursor += n
            ends.append(cursor)
            lasts.append(cursor - 1)
        blocks.extend(_blocks(at, prompt_end, ends))
        at = cursor
    flat = [a for bundle in content for a in bundle]
    return _micro_batch(np.concatenate(tokens), np.concatenate(positions), heads, lasts, flat, tuple(blocks), (1, at))


def _blocks(start: int, prompt_end: int, ends: Sequence[int]) -> list[Block]:
    """Cut one bundle into attention blocks: merge neighbours while the wasted scores cost less than a call."""
    n_prompt = prompt_end - start
    runs: list[list[int]] = [[prompt_end]]  # the ends of the segments of each block; the first opens with the prompt
    first, width = start, n_prompt
    for end in ends:
        begin = runs[-1][-1]
        length = end - begin
        prefix = n_prompt if len(runs) > 1 else 0
        merged = (width + length) * (prefix + width + length)
        apart = width * (prefix + width) + length * (n_prompt + length) + _CALL_COST
        if merged <= apart:
            runs[-1].append(end)
            width += length
        else:
            runs.append([end])
            width = length
    blocks, first = [], start
    for number, run in enumerate(runs):
        segments = tuple(end - first for end in run)
        prefix_stop = prompt_end if number else start
        blocks.append(Block(first, run[-1], start, prefix_stop, segments, opens_with_prompt=number == 0))
        first = run[-1]
    return blocks


def _padded(content: list[list[Answer]]) -> MicroBatch:
    """One row per answer, padded on the right: the plain form that the packed ones are proved against."""
    rows = [a for bundle in content for a in bundle]
    lengths = tuple(len(a.prompt_ids) + len(a.token_ids) for a in rows)
    width = max(lengths)
    tokens = np.zeros((len(rows), width), np.int64)
    positions = np.zeros((len(rows), width), np.int64)
    heads = []
    for row, answer in enumerate(rows):
        n_prompt, n = len(answer.prompt_ids), lengths[row]
        tokens[row, :n_prompt], tokens[row, n_prompt:n] = answer.prompt_ids, answer.token_ids
        positions[row, :n] = np.arange(n)
        seen_from = row * width + np.arange(n_prompt - 1, n - 1)
        heads.append(seen_from[answer.loss_mask])
    lasts = [row * width + n - 1 for row, n in enumerate(lengths)]
    batch = _micro_batch(tokens.reshape(-1), positions.reshape(-1), heads, lasts, rows, (), (len(rows), width), lengths)
    return batch


def _micro_batch(
    tokens: npt.NDArray[np.integer],
    positions: npt.NDArray[np.integer],
    heads: Sequence[Int64],
    lasts: Sequence[int],
    answers: Sequence[Answer],
    blocks: tuple[Block, ...],
    shape: tuple[int, int],
    lengths: tuple[int, ...] = (),
) -> MicroBatch:
    counts = [a.n_loss for a in answers]
    return MicroBatch(
        token_ids=tokens.astype(np.int64),
        position_ids=positions.astype(np.int64),
        predict_at=np.concatenate(heads).astype(np.int64),
        targets=np.concatenate([a.token_ids[a.loss_mask] for a in answers]).astype(np.int64),
        origin=np.concatenate([a.first + np.flatnonzero(a.loss_mask) for a in answers]).astype(np.int64),
        sequence_ids=np.repeat(np.arange(len(answers)), counts),
        sequences=np.array([a.sequence for a in answers], np.int64),
        groups=np.array([a.group for a in answers], np.int64),
        last_at=np.array(lasts, np.int64),
        blocks=blocks,
        shape=shape,
        lengths=lengths,
    )


def _empty() -> MicroBatch:
    """One token and no loss: keeps a rank in step with the others."""
    none, one = np.zeros(0, np.int64), np.zeros(1, np.int64)
    block = Block(0, 1, 0, 0, (1,), opens_with_prompt=True)
    return MicroBatch(one, one, none, none, none, none, none, none, none, (block,), (1, 1))
