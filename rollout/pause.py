"""Pauses with a time to live: an engine un-pauses itself when whoever paused it does not come back.

    token = await pauses.hold("checkpoint", ttl_s=30)   # the engine stands still
    await pauses.release(token)                         # ... and goes on; releasing twice is harmless

Several holders may overlap; the engine runs again when the last is gone. A holder whose time ran out is named in an
event, and its later release does nothing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

Event = Callable[..., None]


class Pauses:
    """Owner gives what pauses and resumes the engine; lives on the owner's event loop."""

    def __init__(
        self, pause: Callable[[], Awaitable[None]], resume: Callable[[], Awaitable[None]], event: Event
    ) -> None:
        self._pause, self._resume, self._event = pause, resume, event
        self._numbers = itertools.count(1)
        self._held: dict[int, tuple[str, asyncio.Task[None]]] = {}
        self._lock = asyncio.Lock()
        self._running = asyncio.Event()
        self._running.set()

    async def hold(self, holder: str, ttl_s: float) -> int:
        """Pause (if nobody has yet) and return the token to release."""
        async with self._lock:
            if not self._held:
                self._running.clear()
                await self._pause()
            token = next(self._numbers)
            self._held[token] = (holder, asyncio.create_task(self._expire(token, holder, ttl_s)))
            return token

    async def release(self, token: int) -> bool:
        """False if the token had expired or been released before."""
        async with self._lock:
            held = self._held.pop(token, None)
            if held is None:
                return False
            held[1].cancel()
            await self._go_on()
            return True

    async def _expire(self, token: int, holder: str, ttl_s: float) -> None:
        await asyncio.sleep(ttl_s)
        async with self._lock:
            if self._held.pop(token, None) is None:
                return
            self._event("pause_expired", holder=holder, ttl_s=ttl_s)
            await self._go_on()

    async def _go_on(self) -> None:
        if not self._held:
            try:
                await self._resume()
            finally:
                self._running.set()

    async def over(self) -> None:
        """Returns while nobody holds the engine: a request that comes during a pause waits here."""
        await self._running.wait()

    @property
    def holders(self) -> list[str]:
        return [holder for holder, _ in self._held.values()]

    async def close(self) -> None:
        """Cancel the timers; the engine is going away."""
        tasks = [task for _, task in self._held.values()]
        self._held.clear()
        self._running.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
