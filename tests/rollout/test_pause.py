"""Proves: a pause whose holder died ends by itself and says so; overlapping holders do not un-pause each other; late
and repeated releases are harmless."""

from __future__ import annotations

import asyncio

from rollout.pause import Pauses


class Engine:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.events: list[tuple[str, str]] = []

    def pauses(self) -> Pauses:
        async def pause() -> None:
            self.log.append("pause")

        async def resume() -> None:
            self.log.append("resume")

        return Pauses(pause, resume, lambda kind, **f: self.events.append((kind, f["holder"])))


async def test_a_dead_holder_does_not_pause_for_ever() -> None:
    engine = Engine()
    pauses = engine.pauses()
    token = await pauses.hold("learner", ttl_s=0.01)
    while pauses.holders:  # noqa: ASYNC110 (nobody signals the end: that it comes by itself is the point)
        await asyncio.sleep(0.005)
    assert engine.log == ["pause", "resume"] and engine.events == [("pause_expired", "learner")]
    assert await pauses.release(token) is False
    assert engine.log == ["pause", "resume"]


async def test_the_last_holder_resumes() -> None:
    engine = Engine()
    pauses = engine.pauses()
    a, b = await pauses.hold("commit", 60), await pauses.hold("admin", 60)
    assert await pauses.release(a) and engine.log == ["pause"] and pauses.holders == ["admin"]
    assert await pauses.release(b) and engine.log == ["pause", "resume"]
    assert not await pauses.release(b) and engine.log == ["pause", "resume"]


async def test_an_expiring_holder_leaves_the_others_paused() -> None:
    engine = Engine()
    pauses = engine.pauses()
    keep = await pauses.hold("commit", 60)
    await pauses.hold("admin", 0.01)
    while len(pauses.holders) > 1:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert engine.log == ["pause"] and engine.events == [("pause_expired", "admin")]
    await pauses.release(keep)
    assert engine.log == ["pause", "resume"]


async def test_close_cancels_the_timers() -> None:
    engine = Engine()
    pauses = engine.pauses()
    await pauses.hold("learner", 60)
    await pauses.close()
    assert pauses.holders == [] and engine.log == ["pause"]


async def test_who_comes_during_a_pause_waits_until_the_last_holder_is_gone() -> None:
    engine = Engine()
    pauses = engine.pauses()
    await pauses.over()  # nobody holds
    token = await pauses.hold("commit", 60)
    await pauses.hold("admin", 0.01)
    waiting = asyncio.create_task(pauses.over())
    while len(pauses.holders) > 1:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert not waiting.done()
    await pauses.release(token)
    await asyncio.wait_for(waiting, 10)
