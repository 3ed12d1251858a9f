"""A version made in the learner becomes the version that engines serve; every rank of the learner takes part.

rank 0         push(version): WeightSync over the engines; each walk of the weights is announced to the other ranks
other ranks    push(version): walk along as often as rank 0 walks (a retry walks again), so that gathers match

publisher = Publisher(engine, spec.weights, rank=0, world=1, event=events.append)
publisher.admit("rollout-0", RemoteEngine(actor)); publisher.push(0) -> {"weights/stall_s": 0.31, ...}
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from actors.weight_sync import CanaryPlan, EnginePort, ThreadedSender, WeightSync
from rollout.canary import CanaryText
from rollout.config import WeightsConfig
from rollout.engine import CommitReport, Rendezvous
from rollout.types import Float32, Int32
from rollout.versions import AdapterSpec, WeightManifest

if TYPE_CHECKING:
    from learner.engine import LearnerEngine


class RemoteEngine:
    """A rollout actor as the `EnginePort` of weight_sync: each call is one call of the actor's handle."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def join(self, rendezvous: Rendezvous) -> None:
        await self._actor.join.remote(rendezvous)

    async def stage_weights(self, manifest: WeightManifest) -> float:
        return await self._actor.stage.remote(manifest)

    async def commit_weights(self, version: int, digest: str = "") -> CommitReport:
        return await self._actor.commit.remote(version, digest)

    async def confirm_weights(self, version: int) -> None:
        await self._actor.confirm.remote(version)

    async def condemn(self, reason: str) -> None:
        await self._actor.condemn.remote(reason)

    async def discard_weights(self) -> None:
        await self._actor.discard.remote()

    async def score(self, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float) -> Float32:
        return await self._actor.score.remote(prompt_ids, token_ids, temperature)


def canary_texts(prompts: Sequence[Int32]) -> tuple[CanaryText, ...]:
    """Fixed tokens to compare log-probs on: the second half of each prompt, scored after its first."""
    halves = [(ids[: (len(ids) + 1) // 2].tolist(), ids[(len(ids) + 1) // 2 :].tolist()) for ids in prompts]
    return tuple(CanaryText(tuple(a), tuple(b)) for a, b in halves if b)


@dataclass(frozen=True, slots=True)
class Plane:
    """How weights travel in this run, everything decided: Plane("store", store_url="runs/sort3-001/weights")."""

    kind: Literal["gloo", "nccl", "store"]
    store_url: str = ""
    workers: int = 1  # GPUs of one engine
    adapters: bool = False  # versions are adapters alone


def open_sender(
    plane: Plane, source: Callable[[], Iterator[tuple[str, Any]]], config: WeightsConfig, adapter: AdapterSpec | None
) -> Any:
    """The learner's end of a plane. A new plane is one more case here, and a receiver in `rollout/`."""
    match plane.kind:
        case "gloo":
            from learner.weight_sender import WeightSender

            return WeightSender(
                source, adapter=adapter, bucket_bytes=config.bucket_mb << 20, timeout_s=config.timeout_s
            )
        case "nccl":
            from learner.nccl_sender import NcclSender

            return NcclSender(source, workers=plane.workers, timeout_s=config.timeout_s)
        case "store":
            from learner.weight_publisher import WeightPublisher
            from rollout.weight_store import WeightStore

            return WeightPublisher(source, WeightStore(plane.store_url), adapter)


class Publisher:
    """One per rank. `push` blocks until every engine serves the version, or raises WeightError."""

    def __init__(
        self,
        engine: LearnerEngine,
        plane: Plane,
        config: WeightsConfig,
        rank: int,
        world: int,
        event: Callable[..., None],
        canaries: tuple[CanaryText, ...] = (),
    ) -> None:
        self._engine, self._rank, self._world = engine, rank, world
        self._canaries = canaries
        self._tensors = engine.adapter_tensors if plane.adapters else engine.state_tensors
        adapter = engine.adapter_spec() if plane.adapters else None  # on every rank: it may have to gather
        self._sync: WeightSync | None = None
        if rank == 0:
            sender = open_sender(plane, self._walk, config, adapter)
            canary = CanaryPlan(canaries, self._score, config.canary_every, config.canary_tolerance)
            self._sync = WeightSync(ThreadedSender(sender), event, config.timeout_s, canary=canary)

    def admit(self, name: str, engine: EnginePort) -> None:
        """`name` takes part from the next push on. Ranks other than 0 know no engines."""
        if self._sync is not None:
            self._sync.admit(name, engine)

    @property
    def engines(self) -> tuple[str, ...]:
        return self._sync.engines if self._sync is not None else ()

    def push(self, version: int, grad_norm: float | None = None) -> dict[str, float]:
        """The weights/* metrics of this version; {} on ranks other than 0."""
        if self._sync is None:
            while self._signal(0):
                for _ in self._tensors():
                    pass
            return {}
        try:
            return asyncio.run(self._sync.push(version, grad_norm)).metrics()
        finally:
            self._signal(0)

    def _walk(self) -> Iterator[tuple[str, Any]]:
        self._signal(1)
        yield from self._tensors()

    def _signal(self, value: int) -> int:
        """Rank 0 says 1 (walk with me) or 0 (done); the others hear it."""
        import torch
        import torch.distributed as dist

        if self._world == 1:
            return value
        word = torch.tensor([value], device=self._engine.device)
        dist.broadcast(word, 0)
        return int(word)

    async def _score(self) -> list[Float32]:
        return [self._engine.score(t.prompt_ids, t.token_ids, 1.0) for t in self._canaries]
