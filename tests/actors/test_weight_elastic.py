"""Proves: 20 light engines over the real gloo plane join, leave politely and die at random during 100 updates; every
engine that is left ends on the right version with the right bytes, none serves a version it did not prove, and the
learner never waits longer than the deadline and one more send."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
import torch

from actors.weight_sync import ThreadedSender, WeightSync
from learner.weight_sender import WeightSender
from rollout.engine import SamplingParams
from rollout.light_engine import HEAD, LightEngine, always

V, TIMEOUT_S = 64, 3.0


class Fleet:
    def __init__(self, tmp_path) -> None:
        self.version, self.serial = 0, 0
        self.sender = WeightSender(lambda: always(self.version, V).items(), bucket_bytes=4096, timeout_s=TIMEOUT_S)
        self.events: list[tuple[str, dict]] = []
        self.sync = WeightSync(
            ThreadedSender(self.sender), lambda kind, **f: self.events.append((kind, f)), timeout_s=TIMEOUT_S
        )
        self.alive: dict[str, LightEngine] = {}
        self.tmp_path = tmp_path

    def join(self) -> None:
        name = f"engine-{self.serial}"
        self.serial += 1
        engine = LightEngine(always(0, V), bucket_bytes=4096, timeout_s=TIMEOUT_S, spool_dir=self.tmp_path)
        self.alive[name] = engine
        self.sync.admit(name, engine)

    async def leave(self, name: str) -> None:
        self.sync.dismiss(name)
        await self.alive.pop(name).close()

    async def die(self, name: str) -> None:
        """Its process is gone: the group breaks, and whoever calls it gets a connection error."""
        engine = self.alive.pop(name)
        await engine.close()

        async def gone(*args: object, **kwargs: object) -> None:
            raise ConnectionError(f"{name} is gone")

        engine.join = engine.stage_weights = engine.commit_weights = engine.discard_weights = gone

    async def push(self) -> float:
        self.version += 1
        started = time.monotonic()
        await self.sync.push(self.version)
        return time.monotonic() - started


@pytest.mark.timeout(300)
async def test_twenty_engines_come_and_go_during_a_hundred_updates(tmp_path) -> None:
    rng, fleet = random.Random(0), Fleet(tmp_path)
    for _ in range(4):
        fleet.join()
    joins = leaves = deaths = 0
    longest = 0.0
    for _ in range(100):
        dice = rng.random()
        if (dice < 0.26 and fleet.serial < 20) or len(fleet.alive) < 2:
            fleet.join()
            joins += 1
        elif dice < 0.36 and len(fleet.alive) > 2:
            await fleet.leave(rng.choice(sorted(fleet.alive)))
            leaves += 1
        dying = None
        if dice > 0.94 and len(fleet.alive) > 2:  # in the middle of the push
            dying = asyncio.create_task(fleet.die(rng.choice(sorted(fleet.alive))))
            deaths += 1
        longest = max(longest, await fleet.push())
        if dying is not None:
            await dying
        for name, engine in fleet.alive.items():
            if name in fleet.sync.engines:
                assert engine.version == fleet.version
    assert fleet.serial == 20 and leaves >= 3 and deaths >= 3, (fleet.serial, joins, leaves, deaths)
    # a death is seen at once, unless it falls between two operations of gloo: then at the deadline
    assert longest < TIMEOUT_S + 1.5, f"the learner waited {longest:.1f} s for one push"
    await fleet.push()
    assert set(fleet.sync.engines) == set(fleet.alive)  # the dead are out, nobody else is
    for engine in fleet.alive.values():
        (answer,) = await engine.generate("r", [1], SamplingParams(3, temperature=0.0), 1)
        assert set(answer.token_ids) == {fleet.version % V} and answer.versions[0].version == fleet.version
        assert torch.equal(engine._weights[HEAD], always(fleet.version, V)[HEAD])
    quarantined = [f["engine"] for k, f in fleet.events if k == "engine_quarantined"]
    assert len(quarantined) == len(set(quarantined)) == deaths
    for engine in fleet.alive.values():
        await engine.close()
    fleet.sender.close()
