"""The canary of a fleet: asks every engine that committed a version for its log-probs and judges them.

One `Canary` per engine, because what is normal for one (its arithmetic, its device) is not for another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from actors.weight_ports import CanaryPlan, EnginePort
from rollout.canary import Canary, Reading
from rollout.types import Float32


class CanaryCheck:
    """Counts updates and knows which of them are due. Without a plan, none is."""

    def __init__(self, plan: CanaryPlan | None) -> None:
        self.plan = plan
        self._canaries: dict[str, Canary] = {}
        self._updates = 0

    def admit(self, name: str) -> None:
        """A new engine, or a new process under an old name: it has no history."""
        self._canaries[name] = Canary(self.plan.tolerance if self.plan else 0.15)

    def forget(self, name: str) -> None:
        self._canaries.pop(name, None)

    def due(self) -> bool:
        """Whether this update is one to check; call it once per update."""
        self._updates += 1
        return self.plan is not None and self.plan.every > 0 and self._updates % self.plan.every == 0

    @property
    def quarantines(self) -> bool:
        return self.plan is not None and self.plan.quarantine

    async def wanted(self, version: int) -> Sequence[Float32]:
        """The learner's own log-probs of the fixed tokens."""
        assert self.plan is not None
        return await self.plan.score(version)

    async def ask(self, engine: EnginePort) -> list[Float32]:
        """The engine's, all texts at once: it decodes them in one batch."""
        assert self.plan is not None
        return list(await asyncio.gather(*(engine.score(t.prompt_ids, t.token_ids, 1.0) for t in self.plan.texts)))

    def read(
        self, name: str, version: int, seen: Sequence[Float32], wanted: Sequence[Float32], content: str
    ) -> Reading:
        return self._canaries[name].read(name, version, seen, wanted, content)
