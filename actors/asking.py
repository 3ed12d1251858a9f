"""Asking an engine, or the learner's sender, something within a deadline: an answer, its error, or its silence.

(await ask("rollout-0", engine.stage_weights(manifest), 65.0)) -> Outcome("rollout-0", value=0.21)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from rollout.errors import DeadlineError, WeightError


@dataclass
class Outcome:
    """One member's answer to one question."""

    name: str
    value: Any = None
    error: Exception | None = None
    silent: bool = False  # it did not answer at all, or its process is gone

    def named_by(self, error: Exception | None) -> bool:
        """Whether somebody else's "waited for ... to enter" names this member."""
        if not isinstance(error, DeadlineError):
            return False
        return self.name in error.awaited.removesuffix("to enter").replace(",", " ").split()


async def ask(name: str, question: Awaitable[Any], wait_s: float) -> Outcome:
    """Never raises for what a member does."""
    try:
        return Outcome(name, await asyncio.wait_for(question, wait_s))
    except TimeoutError:
        return Outcome(name, error=DeadlineError(f"an answer of {name}", wait_s), silent=True)
    except (WeightError, DeadlineError) as error:
        return Outcome(name, error=error)
    except Exception as error:  # noqa: BLE001 - a dead actor raises whatever its transport raises: a named outcome
        return Outcome(name, error=error, silent=True)
