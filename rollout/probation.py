"""Answers wait for the proof of the weights that made them: the engine goes on generating, what it makes stays inside.

    expect(v)      just before a commit: from here on tokens of v may exist, and nobody has vouched for them yet
    confirm(v)     the learner's canary agreed with this engine: answers that waited for v go out
    condemn(why)   it did not, or the engine was given up: what waits never goes out

    waits for                 unblocked by          if that does not come
    proven(versions)          confirm of each       DeadlineError after `hold_s` (the learner died after the commit);
                                                    Quarantined once condemned
    condemned()               condemn               waits on

Nothing here stops an engine: a commit costs its short pause, and a canary costs answers a moment in the corridor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NoReturn

from rollout.errors import DeadlineError, Quarantined


class Probation:
    """The versions of one engine that nobody has confirmed yet. Lives on the engine's event loop.

    Probation(hold_s=120.0) after expect(7): proven([6]) returns at once, proven([6, 7]) waits for confirm(7).
    """

    def __init__(self, hold_s: float) -> None:
        self.hold_s = hold_s
        self._unproven: set[int] = set()
        self._reason = ""
        self._news = asyncio.Event()

    def expect(self, version: int) -> None:
        """Call it before the commit: the first token of `version` may be there before the commit has returned."""
        self._unproven.add(version)

    def confirm(self, version: int) -> None:
        """The weights served as `version` are what the learner has. Idempotent."""
        self._unproven.discard(version)
        self._tell()

    def condemn(self, reason: str) -> None:
        """Nothing unproven ever goes out. The first reason stays."""
        self._reason = self._reason or reason
        self._tell()

    @property
    def unproven(self) -> tuple[int, ...]:
        return tuple(sorted(self._unproven))

    async def proven(self, versions: Iterable[int]) -> None:
        """Return once all of these are confirmed. Raises Quarantined, DeadlineError."""
        wanted = set(versions)
        try:
            async with asyncio.timeout(self.hold_s):
                while wanted & self._unproven:
                    if self._reason:
                        raise Quarantined(self._reason)
                    await self._news.wait()
        except TimeoutError:
            waits = ", ".join(map(str, sorted(wanted & self._unproven)))
            raise DeadlineError(f"the learner to confirm version {waits}", self.hold_s) from None

    async def condemned(self) -> NoReturn:
        """Raises Quarantined as soon as the engine is condemned."""
        while not self._reason:
            await self._news.wait()
        raise Quarantined(self._reason)

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
