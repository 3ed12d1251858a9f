"""The rollout actor: one vLLM engine, kept busy from the queue. A thin shell around RolloutService.

run              lease ordinals -> prompts -> groups -> submit; waits only for slots, never for the learner
stage, commit    new weights arrive while `run` goes on (called by the learner's weight sync)
confirm, condemn the learner's word on them: until it comes, what they made is held (rollout/probation.py)
answer           greedy answers to held-out prompts, beside the rollouts
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import ray

from actors.evaluation import Answer
from actors.rewards.descendants import family
from actors.role import Seat, Task, settled, take
from rollout.engine import CommitReport, Engine, Rendezvous, SamplingParams
from rollout.errors import Drained
from rollout.types import Float32, Prompt
from rollout.versions import WeightManifest
from rollout.vllm_settings import VllmSettings

LEASE_WAIT_S = 2.0


@ray.remote(max_restarts=0)
class RolloutActor:
    """All methods run on one event loop, beside each other."""

    engine: Engine | None = None  # outlives a run where the actor is told to begin another one

    def __init__(self, task: Task, seat: Seat, settings: VllmSettings, groups_in_flight: int) -> None:
        self.task, self.seat, self.settings, self.groups_in_flight = task, seat, settings, groups_in_flight
        self.event = task.events().append
        take(seat, task)

    async def start(self) -> dict[int, int]:
        """Load the model, seconds to a minute, unless a run before has; then enter the run.

        Returns this process and those it has started: {pid: born}.
        """
        from rollout.queue_client import AsyncQueueClient
        from rollout.service import RolloutService
        from rollout.vllm_engine import vllm_engine

        if self.engine is None:
            self.engine = vllm_engine(self.settings, lambda kind, **fields: self.event(kind, **fields))
            await self.engine.start()
        self.prompts = self.task.prompt_source()
        s = self.task.sampling
        self.params = SamplingParams(s.max_tokens, s.temperature, s.top_p, s.top_k, s.stop)
        hold_s = 2 * self.settings.timeout_s  # the learner computes its canary, then asks with one deadline
        self.service = RolloutService(self.engine, self.params, s.group_size, self.groups_in_flight, hold_s)
        self.queue = AsyncQueueClient(self.task.queue, self.seat.name)
        settled()
        return await self.processes()

    async def processes(self) -> dict[int, int]:
        """As `start` returns them, at any time."""
        return family(os.getpid())

    async def run(self) -> str:
        """Generate until the queue says that the run is draining; returns what it said."""
        try:
            await self.service.run(
                lease=lambda n: self.queue.lease(n, LEASE_WAIT_S),
                prompt_for=self.prompts.prompt_for,
                submit=lambda group: self.queue.submit([group]),
                give_back=lambda ordinal, reason, failed: self.queue.give_back([ordinal], reason, failed),
            )
        except Drained as end:
            return str(end)
        raise AssertionError("the rollout loop ended without a reason")

    async def answer(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Greedy answers to held-out prompts."""
        greedy = SamplingParams(self.params.max_tokens, temperature=0.0, stop=self.params.stop)
        asked = [self.service.answer(f"eval{p.ordinal}", p.token_ids, greedy, 1) for p in prompts]
        answers = [completions[0] for completions in await asyncio.gather(*asked)]
        return [(a.text, a.token_ids.tolist(), sorted({s.version for s in a.versions})) for a in answers]

    async def join(self, rendezvous: Rendezvous) -> None:
        await self.service.join(rendezvous)

    async def stage(self, manifest: WeightManifest) -> float:
        return await self.service.stage_weights(manifest)

    async def commit(self, version: int, digest: str) -> CommitReport:
        return await self.service.commit_weights(version, digest)

    async def confirm(self, version: int) -> None:
        await self.service.confirm_weights(version)

    async def condemn(self, reason: str) -> None:
        await self.service.condemn(reason)

    async def discard(self) -> None:
        await self.service.discard_weights()

    async def score(self, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float) -> Float32:
        return await self.service.score(prompt_ids, token_ids, temperature)

    async def gauges(self) -> dict[str, float]:
        return self.service.gauges()

    async def close(self) -> None:
        """Stop the engine and its processes."""
        await self.engine.close()
