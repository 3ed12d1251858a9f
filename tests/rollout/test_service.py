"""Proves that RolloutService answers every lease once, bounds what is in flight, and ends without losing any; and that
no answer leaves it before the weights that made it are confirmed, while the engine goes on generating."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest

from rollout.engine import CommitReport, Completion, SamplingParams
from rollout.errors import ConfigError, DeadlineError, EngineError, Quarantined
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
        self.serves = 3  # the version it stamps

    async def commit_weights(self, version, digest=""):
        self.serves = version
        return CommitReport(version, 0.0, 0.0)

    async def generate(self, request_id, prompt_ids, sampling, n):
        if prompt_ids[0] in self.refuse:
            raise ConfigError("prompt of 9 tokens leaves no room for an answer")
        self.held += 1
        self.most = max(self.most, self.held)
        await asyncio.sleep(0.001)
        self.held -= 1
        ids = np.arange(4, dtype=np.int32)
        return [Completion(ids, np.zeros(4, np.float32), (VersionSpan(self.serves, 0, 4),), Status.FINISHED, "x")] * n

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

    async def give_back(ordinal, reason, failed):
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


class Queue:
    """Leases without end; remembers what came back."""

    def __init__(self) -> None:
        self.next, self.submitted, self.returned = 0, [], {}

    async def lease(self, n):
        await asyncio.sleep(0.001)
        self.next += n
        return [Lease(o) for o in range(self.next - n, self.next)]

    async def submit(self, group):
        self.submitted.append((group.ordinal, group.newest_version))

    async def give_back(self, ordinal, reason, failed):
        self.returned[ordinal] = (reason, failed)

    def run(self, service):
        prompt = lambda o: Prompt(o, "p", np.full(5, o, np.int32))  # noqa: E731
        return asyncio.create_task(service.run(self.lease, prompt, self.submit, self.give_back))


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.001)


def held(service) -> float:
    return service.gauges()["groups_held"]


async def test_answers_of_an_unconfirmed_version_are_held_while_the_engine_goes_on() -> None:
    service, queue = RolloutService(FakeEngine(), SamplingParams(4), group_size=2, max_in_flight=3), Queue()
    running = queue.run(service)
    await until(lambda: len(queue.submitted) > 5)
    await service.commit_weights(4)
    made = service.gauges()["groups_generated"]
    await until(lambda: held(service) == 3)
    assert service.gauges()["groups_generated"] >= made + 3, "the engine did not go on"
    assert {v for _, v in queue.submitted} == {3}, "an answer left before its weights were confirmed"
    leased = queue.next
    await asyncio.sleep(0.05)
    assert queue.next <= leased + 3, "what is held has no bound"
    await service.confirm_weights(4)
    await until(lambda: 4 in {v for _, v in queue.submitted})
    assert not queue.returned
    running.cancel()


async def test_a_condemned_engine_hands_out_nothing_and_gives_its_leases_back_with_the_reason() -> None:
    service, queue = RolloutService(FakeEngine(), SamplingParams(4), group_size=2, max_in_flight=3), Queue()
    running = queue.run(service)
    await service.commit_weights(4)
    await until(lambda: held(service) == 3)
    await service.condemn("canary: log-probs differ")
    with pytest.raises(Quarantined, match="log-probs differ"):
        await asyncio.wait_for(running, 5)
    assert {v for _, v in queue.submitted} <= {3}
    done = {o for o, _ in queue.submitted}
    assert done.isdisjoint(queue.returned) and done | queue.returned.keys() == set(range(queue.next))
    assert set(queue.returned.values()) == {("engine quarantined: canary: log-probs differ", False)}
    with pytest.raises(Quarantined):
        await service.answer("late", [1], SamplingParams(4), 1)


async def test_a_confirmation_that_never_comes_ends_at_the_deadline() -> None:
    service = RolloutService(FakeEngine(), SamplingParams(4), group_size=2, max_in_flight=3, hold_s=0.05)
    await service.commit_weights(4)
    with pytest.raises(DeadlineError, match="the learner to confirm version 4"):
        await service.generate(Prompt(0, "p", np.full(5, 0, np.int32)))
    queue = Queue()
    running = queue.run(service)
    await until(lambda: len(queue.returned) > 3)
    assert not queue.submitted and not any(failed for _, failed in queue.returned.values())
    running.cancel()


async def test_a_later_version_does_not_vouch_for_the_one_before() -> None:
    service = RolloutService(FakeEngine(), SamplingParams(4), group_size=1, max_in_flight=1, hold_s=0.05)
    await service.commit_weights(4)
    await service.commit_weights(5)
    await service.confirm_weights(5)
    assert await service.answer("five", [1], SamplingParams(4), 1)
    service.engine.serves = 4  # an answer that was made before
    with pytest.raises(DeadlineError):
        await service.answer("four", [1], SamplingParams(4), 1)


async def test_leases_of_a_dead_engine_are_given_back_at_once() -> None:
    service, queue = RolloutService(FakeEngine(), SamplingParams(4), group_size=2, max_in_flight=3), Queue()

    async def dead(*_):
        raise EngineError("vLLM's engine process died")

    service.engine.generate = dead
    with pytest.raises(EngineError):
        await asyncio.wait_for(queue.run(service), 5)
    assert queue.returned and all(
        r == ("engine lost: vLLM's engine process died", True) for r in queue.returned.values()
    )
    assert queue.returned.keys() == set(range(queue.next))
