"""What actors answered, within deadlines, and in one line why they did not. The caller hands Ray in.

answers = Answers(ray)
answers.outcome(reference)                              -> None (not yet), "" (well) or "EngineError: vLLM's engine ..."
answers.of(reference, "the queue to start")             -> what it answered, or RoleDied
answers.of_all({"rollout-0": r0, "rollout-1": r1}, "start")  -> both answers, or RoleDied at the first that refused
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from launch.crew import START_S, RoleDied

CALL_S = 30.0


def first_line(error: BaseException) -> str:
    """What really happened, on one line: Ray wraps what an actor raised in the traceback of its task."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return first_line(cause)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else '(no message)'}"


class Answers:
    """See above; references are Ray's."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def outcome(self, reference: Any) -> str | None:
        """None while it is not answered; "" when all went well; else the error, on one line."""
        done, _ = self._ray.wait([reference], timeout=0, fetch_local=False)
        if not done:
            return None
        try:
            self._ray.get(reference, timeout=CALL_S)
        except Exception as error:  # noqa: BLE001 - whatever ends a call of a dead actor is the answer
            return first_line(error)
        return ""

    def of(self, reference: Any, what: str) -> Any:
        """The answer. Raises RoleDied if it does not come, or is an error."""
        started = time.monotonic()
        try:
            return self._ray.get(reference, timeout=START_S)
        except Exception as error:
            waited = time.monotonic() - started
            raise RoleDied(f"waited {waited:.0f} s for {what}: {first_line(error)}") from error

    def of_all(self, asked: Mapping[str, Any], doing: str, timeout_s: float = START_S) -> list[Any]:
        """Every role's answer, failing at the first refusal instead of waiting for the slowest role."""
        pending = {reference: name for name, reference in asked.items()}
        deadline = time.monotonic() + timeout_s
        while pending:
            done, _ = self._ray.wait(list(pending), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                names = ", ".join(sorted(pending.values()))
                raise RoleDied(f"waited {timeout_s:.0f} s for {names} to {doing}; see logs/")
            name = pending.pop(done[0])
            try:
                self._ray.get(done[0])
            except Exception as error:
                raise RoleDied(f"{name} could not {doing}: {first_line(error)}; see logs/{name}.log") from error
        return [self._ray.get(reference) for reference in asked.values()]
