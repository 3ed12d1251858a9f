"""Weight versions: who made which token, and what a version's bytes are.

`version` v means "v optimizer steps applied". A trajectory whose weights changed in flight carries
runs of tokens per version:

    versions = (VersionSpan(3, 0, 7), VersionSpan(4, 7, 12))     # 12 tokens: 7 by v3, then 5 by v4
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class VersionSpan:
    """Tokens `[start, end)` of one trajectory were produced by `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One named tensor of a version: `TensorSpec("model.norm.weight", "bfloat16", (576,), 1152, "9f2c...")`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digest: str  # hex, over the raw little-endian bytes


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """What an adapter is added to, and how: `base + alpha / rank * B @ A` in every adapted layer.

    AdapterSpec(rank=16, alpha=32.0, base="9f2c..."): base is the root digest of the weights that do not travel
    (`rollout.weight_adapter.base_root`).
    """

    rank: int
    alpha: float
    base: str


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """What the learner says version `version` consists of, in sending order: all weights, or one adapter's."""

    version: int
    tensors: tuple[TensorSpec, ...]
    adapter: AdapterSpec | None = None  # None: the tensors are the whole model

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


def check_spans(spans: Sequence[VersionSpan], length: int) -> None:
    """Refuse spans that do not tile `[0, length)` in order with non-decreasing versions.

    Raises ValueError naming the first offending span. An empty trajectory has no spans.
    """
    at, newest = 0, -1
    for s in spans:
        if s.start != at or s.end <= s.start:
            raise ValueError(f"version span {s} does not continue at token {at}")
        if s.version < 0 or s.version < newest:
            raise ValueError(f"version span {s} goes back from version {newest}")
        at, newest = s.end, s.version
    if at != length:
        raise ValueError(f"version spans cover {at} of {length} tokens")


def oldest_version(spans: Iterable[VersionSpan], default: int) -> int:
    """The version of the oldest token, or `default` where there is no token."""
    return min((s.version for s in spans), default=default)
