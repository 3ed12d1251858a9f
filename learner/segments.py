"""Flat, packed tokens: which sequence a token belongs to, which prompt a sequence, and what a mean divides by.

Everything the learner computes lives on ONE axis of T answer tokens, whatever the batch looked like before:

    padded [B=2, L=3]            flat [T=6]
    a a a                        sequence_ids = 0 0 0 1 1 1      (one entry per token)
    b b .                        mask         = 1 1 1 1 1 0      (0: padding, tool output; gives no loss)
                                 group_ids    = 7 7 -> 0 0       (one entry per SEQUENCE: its prompt, 0..n_groups-1)

Denominators are counted over the whole optimizer step (all micro-batches, all ranks) BEFORE the backward pass.
Each micro-batch then contributes sum(weight * loss) and the contributions simply add up to the global mean: that is
why 1 x 4, 2 x 2 and 4 x 1 splits give the same gradient. A sequence is never split; a group may be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant", "prompt-mean", "sum"]
Reduce = Callable[[Tensor], Tensor]  # adds a tensor up over ranks; the identity where there is one rank


def alone(x: Tensor) -> Tensor:
    """The `Reduce` of a single rank."""
    return x


def upcast(x: Tensor) -> Tensor:
    """float32 or better: half precision is lifted to float32, float64 stays float64."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@dataclass(frozen=True)
class Segments:
    """The sequences of a flat batch. `Segments(ids=[0,0,0,1,1,1], n=2, mask=[1,1,1,1,1,0])`

    ids [T] int64, mask [T] bool. Sums and means run over unmasked tokens only, and an empty sequence has mean 0.
    """

    ids: Tensor
    n: int
    mask: Tensor

    def sum(self, x: Tensor) -> Tensor:
        """[T] -> [n]: sum of each sequence's unmasked tokens. Masked values are replaced: a NaN there is harmless."""
        x = torch.where(self.mask, x, 0.0)
        return torch.zeros(self.n, dtype=x.dtype, device=x.device).index_add(0, self.ids, x)

    def count(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """[n]: unmasked tokens of each sequence."""
        return self.sum(torch.ones(self.ids.shape, dtype=dtype, device=self.ids.device))

    def mean(self, x: Tensor) -> Tensor:
        """[T] -> [n]: mean over each sequence's unmasked tokens, 0 for an empty sequence."""
        return self.sum(x) / self.count(x.dtype).clamp(min=1)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """[n] -> [T]: each token gets its sequence's value."""
        return per_sequence[self.ids]


NO_SIGNAL = 1e-6  # max - min of a group at or below this carries no signal


@dataclass(frozen=True)
class Groups:
    """The prompts of a flat list of answers. `Groups(ids=[0,0,1,1,1], n=2, scored=[1,1,1,0,1])`"""

    ids: Tensor
    n: int
    scored: Tensor

    @staticmethod
    def of(rewards: Tensor, group_ids: Tensor) -> Groups:
        return Groups(group_ids, int(group_ids.max()) + 1 if len(group_ids) else 0, torch.isfinite(rewards))

    def sum(self, x: Tensor) -> Tensor:
        """[N] -> [n]: over scored answers."""
        return Segments(self.ids, self.n, self.scored).sum(x)

    def size(self, dtype: torch.dtype) -> Tensor:
        """[n]: scored answers."""
        return Segments(self.ids, self.n, self.scored).count(dtype)

    def mean(self, x: Tensor) -> Tensor:
        """[N] -> [N]: every answer gets the mean of its group."""
        return Segments(self.ids, self.n, self.scored).mean(x)[self.ids]

    def extreme(self, x: Tensor, which: str) -> Tensor:
        """[N] -> [n]: "amax" or "amin" over scored answers (-inf / inf where there is none)."""
        worst = -torch.inf if which == "amax" else torch.inf
        filled = torch.where(self.scored, x, torch.full_like(x, worst))
        return torch.full((self.n,), worst, dtype=x.dtype, device=x.device).scatter_reduce(0, self.ids, filled, which)

    def informative(self, x: Tensor) -> Tensor:
        """[n] bool: at least two scored answers whose values differ by more than NO_SIGNAL."""
        return (self.size(x.dtype) > 1) & (self.extreme(x, "amax") - self.extreme(x, "amin") > NO_SIGNAL)


@dataclass(frozen=True)
class Denominators:
    """What the means of one optimizer step divide by, counted over every rank and micro-batch.

    Denominators(tokens=5., sequences=2., prompts=1., tokens_per_group=tensor([5.]))

    `sequences` and `prompts` count those with at least one trainable token. `tokens_per_group[g]` is the whole step's
    token count of group g and is only needed by "prompt-mean"; its index is what `group_ids` of a micro-batch holds.
    """

    tokens: float
    sequences: float
    prompts: float
    tokens_per_group: Tensor | None = None

    @staticmethod
    def count(mask: Tensor, sequence_ids: Tensor, group_ids: Tensor, reduce: Reduce = alone) -> Denominators:
        """Count one rank's whole step (mask [T] and sequence_ids [T] of ALL its micro-batches; group_ids [B]).

        A group lives on one rank (it is the unit of `take`), so only the three totals cross ranks.
        """
        sequences = Segments(sequence_ids, len(group_ids), mask).count()
        n_groups = int(group_ids.max()) + 1 if len(group_ids) else 0
        groups = torch.zeros(n_groups, dtype=sequences.dtype, device=mask.device).index_add(0, group_ids, sequences)
        totals = torch.stack([sequences.sum(), (sequences > 0).sum().double(), (groups > 0).sum().double()])
        tokens, live, prompts = (float(x) for x in reduce(totals))
        return Denominators(tokens, live, prompts, groups)


def token_weights(
    kind: Aggregation, segments: Segments, group_ids: Tensor, denominators: Denominators, length_constant: float | None
) -> Tensor:
    """w_t [T] such that sum_t w_t L_t over all micro-batches is the wanted mean (0 at masked tokens).

    token-mean            1 / sum m                        DAPO 2503.14476
    seq-mean-token-mean   1 / (B |y_i|)                    GRPO 2402.03300
    seq-mean-token-sum    1 / B
    constant              1 / (B L_max)                    Dr.GRPO 2503.20783; L_max = generation budget, not padding
    prompt-mean           1 / (P tokens of the prompt)     ScaleRL 2510.13786
    sum                   1                                Tinker; the learning rate absorbs the batch size
    B counts sequences, P prompts, with at least one trainable token.
    """
    lengths = segments.count()
    d = denominators
    b = max(d.sequences, 1.0)
    if kind == "token-mean":
        per_sequence = torch.full_like(lengths, 1 / max(d.tokens, 1.0))
    elif kind == "seq-mean-token-mean":
        per_sequence = 1 / (b * lengths.clamp(min=1))
    elif kind == "seq-mean-token-sum":
        per_sequence = torch.full_like(lengths, 1 / b)
    elif kind == "constant":
        if length_constant is None:
            raise ValueError("aggregation 'constant' needs length_constant (the generation budget)")
        per_sequence = torch.full_like(lengths, 1 / (b * length_constant))
    elif kind == "prompt-mean":
        if d.tokens_per_group is None:
            raise ValueError("aggregation 'prompt-mean' needs Denominators.tokens_per_group of the whole step")
        of_group = d.tokens_per_group.to(lengths.device)[group_ids]
        per_sequence = 1 / (max(d.prompts, 1.0) * of_group.clamp(min=1))
    elif kind == "sum":
        per_sequence = torch.ones_like(lengths)
    else:
        raise ValueError(f"unknown aggregation {kind!r}")
    return torch.where(
        segments.mask, segments.spread(per_sequence), torch.zeros((), dtype=lengths.dtype, device=lengths.device)
    )


def aggregate(per_token: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """sum_t w_t L_t, with L masked first so that nothing at a masked position reaches value or gradient."""
    return (torch.where(mask, per_token, 0.0) * weights.to(per_token.dtype)).sum()
