"""How many bytes is a step? A chain of lossless deltas through the store, each pulled by an engine that keeps up."""

from __future__ import annotations

import statistics
import time

import torch

from rollout.weight_spool import Spool
from rollout.weight_store import WeightStore
from rollout.weight_stream import NamedTensor, as_bytes

Weights = dict[str, torch.Tensor]


class Stepping:
    """float32 masters that a step moves by `lr`, which is as far as Adam goes; served in their own type."""

    def __init__(self, weights: Weights, lr: float) -> None:
        self._lr, self._random = lr, torch.Generator().manual_seed(0)
        self._masters = {n: t.float() for n, t in weights.items()}
        self._served = {n: t.dtype for n, t in weights.items()}

    def step(self) -> None:
        for t in self._masters.values():
            t.add_(torch.empty_like(t).uniform_(-1, 1, generator=self._random).sign_(), alpha=self._lr)

    def serving(self) -> list[NamedTensor]:
        return [(n, t.to(self._served[n])) for n, t in self._masters.items()]


def chain(weights: Weights, steps: int, lr: float, scratch: str) -> dict[str, float]:
    """One anchor and `steps` deltas. Exact: every root, the last bytes, and a joiner who walks it all."""
    learner, spool, exact = Stepping(weights, lr), Spool(scratch), True
    store = WeightStore(f"{scratch}/store", anchor_every=steps + 2, scratch=scratch)
    sizes, writes, fetches = [], [], []
    for version in range(steps + 1):
        at = time.perf_counter()
        published = store.publish(version, learner.serving())
        writes.append(time.perf_counter() - at)
        at = time.perf_counter()
        staged = store.fetch(version, spool)
        fetches.append(time.perf_counter() - at)
        exact &= staged.root == published.root
        spool.promote(staged)
        sizes.append(published.nbytes)
        if version < steps:
            learner.step()
    assert published.base == steps - 1, "the chain was broken by an anchor"
    at = time.perf_counter()
    late = store.fetch(steps, Spool(scratch))
    joined_s = time.perf_counter() - at
    truth = torch.cat([as_bytes(t) for _, t in learner.serving()])
    exact &= torch.equal(staged.bytes(), truth) and torch.equal(late.bytes(), truth)
    return {
        "delta/share_of_full": max(sizes[1:]) / published.manifest.nbytes,
        "delta/largest_mb": max(sizes[1:]) / 1e6,
        "delta/store_mb": sum(sizes) / 1e6,
        "delta/write_s": statistics.median(writes[1:]),
        "delta/fetch_s": statistics.median(fetches[1:]),
        "delta/joiner_s": joined_s,
        "delta/steps": float(steps),
        "delta/bit_exact": float(exact),
    }
