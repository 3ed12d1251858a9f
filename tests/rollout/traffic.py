"""Requests that keep coming while weights change under them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollout.engine import Completion, SamplingParams
from rollout.vllm_engine import VllmEngine

TOKENS = 40
END_S = 120


@asynccontextmanager
async def traffic(engine: VllmEngine, streams: int = 4) -> AsyncIterator[list[Completion]]:
    """In each stream three sampled answers of `TOKENS` tokens after the other; whole, once the block is left."""
    answers: list[Completion] = []
    running = True

    async def stream(i: int) -> None:
        k = 0
        while running:
            sampling = SamplingParams(TOKENS, temperature=1.0, seed=k)
            answers.extend(await engine.generate(f"t{i}.{k}", [65 + i, 66], sampling, 3))
            k += 1

    tasks = [asyncio.create_task(stream(i)) for i in range(streams)]
    yield answers
    running = False
    await asyncio.wait_for(asyncio.gather(*tasks), END_S)


def lived_through_an_update(answers: list[Completion]) -> int:
    """How many have tokens of more than one version."""
    return sum(len(a.versions) > 1 for a in answers)
