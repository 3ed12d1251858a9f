"""The canary: fixed tokens, scored by the learner and by each engine after a commit, and compared.

It sees what digests of received bytes cannot: weights loaded under a wrong name, a forgotten adapter, a scale, an
output head that stayed old. A jump beyond the tolerance alarms at once; a creeping error alarms by its trend; the same
content loaded again must give the same log-probs, which shows errors far below the usual difference of the two sides:

    reading 1   mean abs difference 0.0212      |  an engine in bf16 against a learner in fp32: an offset is normal
    reading 2                       0.0211      |
    reading 3                       0.0512      |  more than twice what was normal: alarm
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rollout.types import Float32


@dataclass(frozen=True, slots=True)
class CanaryText:
    """One fixed prompt and the tokens scored after it, at temperature 1."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """One engine at one version: `Reading("rollout-0", 7, mean_abs=0.021, bias=-0.0004, alarm="")`.

    bias is the mean of engine minus learner; moved is how far the engine's log-probs are from its own last ones (mean
    abs), 0 unless the content is the same; alarm names what is wrong, "" if nothing.
    """

    engine: str
    version: int
    mean_abs: float
    bias: float
    slope: float = 0.0
    moved: float = 0.0
    alarm: str = ""


def difference(engine: Sequence[Float32], learner: Sequence[Float32]) -> tuple[float, float]:
    """(mean abs, mean) of engine minus learner over all tokens; infinite where either is not finite."""
    gap = np.concatenate(engine).astype(np.float64) - np.concatenate(learner).astype(np.float64)
    if not np.isfinite(gap).all():
        return float("inf"), float("inf")
    return float(np.abs(gap).mean()), float(gap.mean())


def slope(values: Sequence[float]) -> float:
    """Least-squares slope per reading; 0 for fewer than three."""
    n = len(values)
    if n < 3:
        return 0.0
    x = np.arange(n) - (n - 1) / 2
    return float((x * (np.asarray(values) - np.mean(values))).sum() / (x * x).sum())


@dataclass
class Canary:
    """Judges the readings of one engine against `tolerance` and against the engine's own history.

    frozen    the same content was loaded again: no log-prob may move, `floor` on average allowed
    changed   training went on: the difference may grow with it, but not past `growth` times what was normal
    trend     over `window` readings the difference climbs steadily by more than that
    """

    tolerance: float = 0.15
    calibrate: int = 3
    window: int = 16
    growth: float = 2.0
    floor: float = 5.0e-4  # below this it is the noise of the arithmetic
    _history: list[float] = field(default_factory=list)
    _content: str = ""
    _seen: Sequence[Float32] = ()

    def read(
        self, engine: str, version: int, seen: Sequence[Float32], wanted: Sequence[Float32], content: str = ""
    ) -> Reading:
        """Judge one comparison. `content` is the root digest loaded: equal content must give equal readings."""
        mean_abs, bias = difference(seen, wanted)
        trend = slope([*self._history, mean_abs][-self.window :]) if np.isfinite(mean_abs) else float("inf")
        moved = difference(seen, self._seen)[0] if content and content == self._content else 0.0
        alarm = self._judge(mean_abs, trend, moved)
        if not alarm:  # an alarmed reading does not become part of what is normal
            self._history.append(mean_abs)
            self._content, self._seen = content, seen
        return Reading(engine, version, mean_abs, bias, trend, moved, alarm)

    def _judge(self, mean_abs: float, trend: float, moved: float) -> str:
        if not mean_abs <= self.tolerance:
            return f"log-probs differ by {mean_abs:.4f} on average, tolerance {self.tolerance}"
        if not moved <= self.floor:
            return f"log-probs moved by {moved:.5f} on average although the weights did not, {self.floor} allowed"
        if len(self._history) < self.calibrate:
            return ""
        normal = statistics.median(self._history[: max(self.calibrate, self.window)])
        allowed = max((self.growth - 1) * normal, self.floor)
        if mean_abs - normal > allowed:
            return f"log-probs differ by {mean_abs:.5f} on average where {normal:.5f} was normal"
        if len(self._history) + 1 >= self.window and trend * self.window > allowed:
            return f"log-probs drift: the difference climbs by {trend:.6f} per reading"
        return ""
