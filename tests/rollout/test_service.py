"""Proves that RolloutService answers every lease once, bounds what is in flight, and ends without losing any."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest

from rollout.engine import Completion, SamplingParams
from rollout.errors import ConfigError
from rollout.service import RolloutService
from rollout.types import Prompt, Status
from rollout.versions import VersionSpan


@dataclass(frozen=True)
class Lease:
    ordinal: int
    attempt: int = 0


class Drained(Exception):
    pass


class FakeEngine:
    """Answers after a moment; remembers how many prompts it held at once."""

    version = 3

    def __init__(self, refuse: set[int] = frozenset()) -> None:
        self.held = self.most = 0
        self.refuse = refuse

    async def generate(self, request_id, prompt_ids, sampling, n):
        if prompt_ids[0] in self.refuse:
            raise ConfigError("prompt of 9 tokens leaves no room for an answer")
        self.held += 1
        self.most = max(self.most, self.held)
        await asyncio.sleep(0.001)
        self.held -= 1
        ids = np.arange(4, dtype=np.int32)
        return [Completion(ids, np.zeros(4, np.float32), (VersionSpan(3, 0, 4),), Status.FINISHED, "x")] * n

    def gauges(self):
        return {"engine/requests": float(self.held)}


async def serve(service: RolloutService, total: int) -> tuple[list[int], dict[int, str]]:
    left, submitted, given_back = list(range(total)), [], {}

    async def lease(n):
        if not left:
            raise Drained("the run is over")
        now, left[:n] = left[:n], []
        return [Lease(o) for o in now]

    async def submit(group):
        assert len(group.trajectories) == service.group_size
        submitted.append(group.ordinal)

    async def give_back(ordinal, reason):
        given_back[ordinal] = reason

    with pytest.raises(Drained):
        await service.run(lease, lambda o: Prompt(o, "p", np.full(5, o, np.int32)), submit, give_back)
    return submitted, given_back


async def test_every_lease_is_answered_once_and_the_bound_on_flight_holds() -> None:
    engine = FakeEngine()
    service = RolloutService(engine, SamplingParams(4), group_size=2, max_in_flight=3)
    submitted, given_back = await serve(service, 20)
    assert sorted(submitted) == list(range(20)) and not given_back
    assert engine.most == 3
    assert service.gauges()["groups_generated"] == 20 and service.gauges()["tokens_generated"] == 20 * 2 * 4


async def test_a_prompt_the_engine_refuses_is_given_back_with_the_reason() -> None:
    service = RolloutService(FakeEngine(refuse={1}), SamplingParams(4), group_size=2, max_in_flight=2)
    submitted, given_back = await serve(service, 4)
    assert sorted(submitted) == [0, 2, 3]
    assert list(given_back) == [1] and "leaves no room" in given_back[1]


async def test_a_defect_in_the_engine_is_not_swallowed() -> None:
    engine = FakeEngine()

    async def broken(*_):
        raise RuntimeError("engine core died")

    engine.generate = broken
    service = RolloutService(engine, SamplingParams(4), group_size=2, max_in_flight=2)
    with pytest.raises(RuntimeError, match="engine core died"):
        await asyncio.wait_for(serve(service, 4), 5)
