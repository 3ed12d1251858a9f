"""What Headrace needs of an inference engine. `vllm_engine.py` is one; a new engine is one more file like it.

Life of an engine, in order:

    start -> [generate ...]*  with, at any time and without losing a request:
             stage_weights(manifest)   receives and verifies the bytes while decoding goes on
             commit_weights(version)   a short pause(keep): load, stamp the version, resume
    -> close

A version is served only after `commit_weights` returned; a mismatch raises WeightError in `stage_weights`
and the engine keeps serving what it had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rollout.types import Float32, Int32, Status
from rollout.versions import VersionSpan, WeightManifest


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Log-probs are those of the whole distribution after `temperature`, before any cut."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    stop: tuple[str, ...] = ()
    seed: int | None = None

    @property
    def truncates(self) -> bool:
        """Whether unlikely tokens are cut off before the draw."""
        return self.top_p < 1.0 or self.top_k > 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One answer of L tokens as the engine made it; `logprobs` float32[L] at the sampling temperature.

    Stop strings are part of the tokens (the learner must see what was sampled) and cut from `text`.
    """

    token_ids: Int32
    logprobs: Float32
    versions: tuple[VersionSpan, ...]
    status: Status
    text: str
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the members of one broadcast group meet: `rank` of `world_size`; rank 0 is the learner.

    A group lives for one epoch; losing or adding a member makes a new epoch with a new rendezvous.
    """

    epoch: int
    host: str
    port: int
    rank: int
    world_size: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class CommitReport:
    """What one commit cost: seconds generation stood still, and what the load itself took."""

    version: int
    stall_s: float
    load_s: float


class Engine(Protocol):
    """All methods are coroutines of one event loop; none may block it."""

    async def start(self) -> None: ...

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int] | Int32, sampling: SamplingParams, n: int
    ) -> list[Completion]:
        """n answers to one prompt, started together. Raises ConfigError if prompt + max_tokens exceeds the context."""
        ...

    async def score(self, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float) -> Float32:
        """Log-probs float32[L] that the present weights give to `token_ids` after `prompt_ids` (the canary's eye)."""
        ...

    async def join(self, rendezvous: Rendezvous) -> None:
        """Enter a broadcast group; leaves the one before, if any."""
        ...

    async def stage_weights(self, manifest: WeightManifest) -> float:
        """Receive and verify one version while decoding goes on; returns seconds. Raises WeightError, DeadlineError."""
        ...

    async def commit_weights(self, version: int, digest: str = "") -> CommitReport:
        """Serve what is staged. With `digest`, refuse (WeightError, before the pause) any other content than that."""
        ...

    async def discard_weights(self) -> None:
        """Forget what was staged (the sender died, or the digests disagree). Idempotent."""
        ...

    @property
    def version(self) -> int: ...

    def gauges(self) -> dict[str, float]: ...

    async def close(self) -> None: ...
