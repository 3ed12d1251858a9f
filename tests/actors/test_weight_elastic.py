"""Proves: 20 light engines, each a process of its own, join, leave and are killed at random during 100 updates over the
real gloo plane; every engine that is left ends on the right version with the right weights, the dead are out and nobody
else is, and the learner never waits longer than the deadline."""

from __future__ import annotations

import random
import signal
import time

import pytest

from actors.weight_sync import ThreadedSender, WeightSync
from benchmarks.light_engine import always
from benchmarks.light_process import Doom, LightProcess
from learner.weight_sender import WeightSender
from rollout.engine import SamplingParams

V, TIMEOUT_S = 64, 10.0


class Fleet:
    def __init__(self, tmp_path) -> None:
        self.version, self.serial = 0, 0
        self.sender = WeightSender(lambda: always(self.version, V).items(), bucket_bytes=4096, timeout_s=TIMEOUT_S)
        self.events: list[tuple[str, dict]] = []
        self.sync = WeightSync(
            ThreadedSender(self.sender), lambda kind, **f: self.events.append((kind, f)), timeout_s=TIMEOUT_S
        )
        self.alive: dict[str, LightProcess] = {}
        self.doomed: set[str] = set()
        self.tmp_path = str(tmp_path)

    def join(self, doom: Doom | None = None) -> None:
        name = f"engine-{self.serial}"
        self.serial += 1
        self.alive[name] = LightProcess(V, doom, bucket_bytes=4096, timeout_s=TIMEOUT_S, spool_dir=self.tmp_path)
        if doom is not None:
            self.doomed.add(name)
        self.sync.admit(name, self.alive[name])

    async def leave(self, name: str) -> None:
        self.sync.dismiss(name)
        await self.alive.pop(name).close()

    async def push(self) -> float:
        self.version += 1
        started = time.monotonic()
        report = await self.sync.push(self.version)
        for name in report.quarantined:
            await self.alive.pop(name).close()
        assert set(report.committed) == set(self.alive)
        return time.monotonic() - started

    async def close(self) -> None:
        self.sender.close()
        for engine in self.alive.values():
            await engine.close()


@pytest.mark.timeout(300)
async def test_twenty_engines_come_and_go_during_a_hundred_updates(tmp_path) -> None:
    rng, fleet = random.Random(0), Fleet(tmp_path)
    fleet.join()
    fleet.join()
    leaves, waits = 0, []
    for update in range(100):
        if fleet.serial < 20 and update % 5 == 0:
            # one in three will be killed somewhere in its first updates: entering, receiving or loading
            step = rng.choice(["join", "stage", "bucket", "commit", "committed"])
            fleet.join(Doom(step, rng.randint(1, 6), signal.SIGKILL) if fleet.serial % 3 == 2 else None)
        elif rng.random() < 0.1 and len(fleet.alive) > 3:
            await fleet.leave(rng.choice(sorted(fleet.alive.keys() - fleet.doomed)))
            leaves += 1
        waits.append(await fleet.push())
    quarantined = [f["engine"] for kind, f in fleet.events if kind == "engine_quarantined"]
    assert fleet.serial == 20 and leaves >= 3 and len(quarantined) >= 3, (fleet.serial, leaves, quarantined)
    blamed = [f for kind, f in fleet.events if kind == "engine_quarantined" and f["engine"] not in fleet.doomed]
    assert not blamed, "an engine that did nothing wrong was blamed"
    assert max(waits) < TIMEOUT_S, f"the learner waited {max(waits):.1f} s for one push"
    for name, engine in fleet.alive.items():
        (answer,) = await engine.answer("r", [1], SamplingParams(3, temperature=0.0), 1)
        assert set(answer.token_ids) == {fleet.version % V}, name
        assert [s.version for s in answer.versions] == [fleet.version]
    await fleet.close()
