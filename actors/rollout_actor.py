"""The rollout actor: one vLLM engine, kept busy from the queue. A thin shell around RolloutService.

run            lease ordinals -> prompts -> groups -> submit; waits only for slots, never for the learner
stage, commit  new weights arrive while `run` goes on (called by the learner's weight sync)
answer         greedy answers to held-out prompts, beside the rollouts
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import ray

from actors.config import ModelConfig, PromptsConfig
from actors.pinning import pin
from rollout.config import SamplingConfig, WeightsConfig
from rollout.engine import CommitReport, Rendezvous, SamplingParams
from rollout.types import Float32, Prompt
from rollout.versions import WeightManifest


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """Everything one rollout actor is told. `cores` are the logical cores it may use, () for all."""

    name: str
    model: ModelConfig
    context: int
    prompts: PromptsConfig
    sampling: SamplingConfig
    weights: WeightsConfig
    groups_in_flight: int
    seed: int
    queue_endpoint: str
    cores: tuple[int, ...] = ()
    device: str = "cpu"
    kv_cache_mb: int | None = None
    tensor_parallel: int = 1

    @property
    def params(self) -> SamplingParams:
        s = self.sampling
        return SamplingParams(s.max_tokens, s.temperature, s.top_p, s.top_k, s.stop)


@ray.remote(max_restarts=0)
class RolloutActor:
    """All methods run on one event loop, beside each other."""

    def __init__(self, spec: RolloutSpec) -> None:
        self.spec = spec
        pin(spec.cores)

    async def start(self) -> None:
        """Load the model and warm it up; seconds to a minute."""
        from actors.prompts import PromptSource
        from rollout.queue_client import AsyncQueueClient
        from rollout.service import RolloutService
        from rollout.vllm_engine import VllmEngine

        spec = self.spec
        self.engine = VllmEngine(
            spec.model.path,
            dtype=spec.model.dtype,
            max_model_len=spec.context,
            device=spec.device,
            threads=max(1, len(spec.cores)),
            seed=spec.seed,
            weights=spec.weights,
            kv_cache_mb=spec.kv_cache_mb,
            tensor_parallel=spec.tensor_parallel,
            max_sequences=spec.groups_in_flight * spec.sampling.group_size,
        )
        await self.engine.start()
        self.prompts = PromptSource.open(spec.prompts, spec.model, spec.seed)
        self.service = RolloutService(self.engine, spec.params, spec.sampling.group_size, spec.groups_in_flight)
        self.queue = AsyncQueueClient(spec.queue_endpoint, spec.name)

    async def run(self) -> str:
        """Generate until the queue says that the run is draining. Returns the reason."""
        from rollout.queue_client import Drained

        try:
            await self.service.run(
                lease=lambda n: self.queue.lease(n, wait_s=2.0),
                prompt_for=self.prompts.prompt_for,
                submit=lambda group: self.queue.submit([group]),
                give_back=lambda ordinal, reason: self.queue.give_back([ordinal], reason),
            )
        except Drained as end:
            return str(end)
        raise AssertionError("the rollout loop ended without a reason")

    async def answer(self, prompts: Sequence[Prompt], max_tokens: int) -> list[tuple[str, list[int], list[int]]]:
        """Greedy answers: (text, tokens, versions that made them) for each prompt."""
        greedy = SamplingParams(max_tokens, temperature=0.0, stop=self.spec.params.stop)
        asked = [self.engine.generate(f"eval.{p.ordinal}", p.token_ids, greedy, 1) for p in prompts]
        answers = [completions[0] for completions in await asyncio.gather(*asked)]
        return [(a.text, a.token_ids.tolist(), sorted({s.version for s in a.versions})) for a in answers]

    async def join(self, rendezvous: Rendezvous) -> None:
        await self.engine.join(rendezvous)

    async def stage(self, manifest: WeightManifest) -> float:
        return await self.engine.stage_weights(manifest)

    async def commit(self, version: int) -> CommitReport:
        return await self.engine.commit_weights(version)

    async def discard(self) -> None:
        await self.engine.discard_weights()

    async def score(self, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float) -> Float32:
        return await self.engine.score(prompt_ids, token_ids, temperature)

    async def gauges(self) -> dict[str, float]:
        return self.service.gauges()

    async def close(self) -> None:
        """Stop the engine and its processes."""
        self.queue.close()
        await self.engine.close()
