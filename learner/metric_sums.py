"""Metrics that add up exactly over micro-batches and ranks: every part is a small vector to be SUMMED, then finished.

    sums = MetricSums.of(mean={"policy/kl": (kl_t, mask)}, total={"loss/policy": loss})
    step = sums_of_microbatch_1 + sums_of_microbatch_2          # within a rank
    step = step.reduced(all_reduce_sum)                         # over ranks: ONE vector, same layout everywhere
    step.finish()  ->  {"policy/kl": 0.0031, "loss/policy": -0.12, "tokens/nonfinite": 0.0, ...}

kind        parts                      finished as
mean        [sum, count]               sum / count (0 where nothing was counted)
total       [sum]                      sum (losses are already divided by the step's denominators; counters)
ess         [sum w, sum w^2, n]        (sum w)^2 / (n sum w^2), the effective sample size as a share of n
percentiles [counts of 321 bins]       name_p01, _p50, _p99 of a ratio, by its log, to within half a bin (5 %)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from learner.segments import Reduce

BINS = 321  # odd: the middle bin holds log-ratio 0
REACH = 16.0  # log-ratios beyond +-16 fall into the outermost bins
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


@dataclass(frozen=True)
class MetricSums:
    """`parts["mean:policy/kl"] = tensor([0.031, 10.])`, float64, detached."""

    parts: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(
        mean: Mapping[str, tuple[Tensor, Tensor]] | None = None,
        total: Mapping[str, Tensor] | None = None,
        ess: Mapping[str, tuple[Tensor, Tensor]] | None = None,
        log_ratio: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    ) -> MetricSums:
        """`mean`, `ess` and `log_ratio` take (values, mask) of equal shape; `total` takes 0-d tensors."""
        parts: dict[str, Tensor] = {}
        for name, (x, mask) in (mean or {}).items():
            parts[f"mean:{name}"] = torch.stack([_masked(x, mask).sum(), mask.sum().double()])
        for name, x in (total or {}).items():
            parts[f"total:{name}"] = x.detach().double().reshape(1)
        for name, (x, mask) in (ess or {}).items():
            w = _masked(x, mask)
            parts[f"ess:{name}"] = torch.stack([w.sum(), (w * w).sum(), mask.sum().double()])
        for name, (x, mask) in (log_ratio or {}).items():
            parts[f"percentiles:{name}"] = _histogram(x.detach()[mask])
        return MetricSums(parts)

    def __add__(self, other: MetricSums) -> MetricSums:
        names = self.parts.keys() | other.parts.keys()
        both = {n: [p[n] for p in (self.parts, other.parts) if n in p] for n in sorted(names)}
        return MetricSums({n: xs[0] + xs[1] if len(xs) == 2 else xs[0] for n, xs in both.items()})

    def reduced(self, reduce: Reduce) -> MetricSums:
        """Summed over ranks by one call of `reduce` on one float64 vector (every rank must hold the same names)."""
        names = sorted(self.parts)
        if not names:
            return self
        sizes = [len(self.parts[n]) for n in names]
        vector = reduce(torch.cat([self.parts[n] for n in names]))
        return MetricSums(dict(zip(names, vector.split(sizes), strict=True)))

    def finish(self) -> dict[str, float]:
        """Plain numbers under the names of metrics.jsonl."""
        done: dict[str, float] = {}
        for key in sorted(self.parts):
            kind, name = key.split(":", 1)
            x = [float(v) for v in self.parts[key]]
            if kind == "mean":
                done[name] = x[0] / x[1] if x[1] else 0.0
            elif kind == "total":
                done[name] = x[0]
            elif kind == "ess":
                done[name] = x[0] ** 2 / (x[2] * x[1]) if x[1] and x[2] else 0.0
            else:
                done |= {f"{name}_{q}": _quantile(x, share) for q, share in QUANTILES.items()}
        return done


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x.detach().double(), 0.0)


def _histogram(x: Tensor) -> Tensor:
    width = 2 * REACH / BINS
    index = ((x.double() + REACH) / width).floor().clamp(0, BINS - 1).long()
    return torch.bincount(index, minlength=BINS).double()


def _quantile(counts: list[float], share: float) -> float:
    """Ratio at the middle of the bin where the cumulated count reaches `share`; 0 where nothing was counted."""
    n, seen = sum(counts), 0.0
    for i, c in enumerate(counts):
        seen += c
        if n and seen >= share * n:
            return math.exp((i + 0.5) * 2 * REACH / BINS - REACH)
    return 0.0
