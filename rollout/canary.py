"""The canary: fixed tokens, scored by the learner and by each engine after a commit, and compared.

It sees what digests of received bytes cannot: weights loaded under a wrong name, a forgotten adapter, a scale, an
output head that stayed old. Three rules, from coarse to fine:

    difference   mean abs difference beyond `tolerance`, or twice what was normal, or climbing steadily
    stretch      the factor by which the engine's log-probs are larger than the learner's, minus 1; a random error of
                 each token averages out in it, a systematic one of 0.1 % does not. Judged while the weights stay the
                 same: training moves it too

    reading 1    difference 0.0212  stretch -0.0003   |  an engine in bf16 against a learner in float32: an offset is
    reading 2               0.0211          -0.0002   |  normal, and it trembles with the batch the canary falls into
    reading 9               0.0214           0.0009   |  ten times as far off as it trembles: alarm
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
    """One engine at one version: `Reading("rollout-0", 7, mean_abs=0.021, bias=-0.0004, stretch=-2e-4, alarm="")`.

    bias is the mean of engine minus learner; slope that of mean_abs per reading; alarm names what is wrong, or "".
    """

    engine: str
    version: int
    mean_abs: float
    bias: float
    stretch: float
    slope: float = 0.0
    alarm: str = ""


def difference(engine: Sequence[Float32], learner: Sequence[Float32]) -> tuple[float, float, float]:
    """(mean abs, mean) of engine minus learner over all tokens, and the stretch; infinite where one is not finite.

    stretch = sum over tokens of (engine - learner) * learner / sum of learner ** 2: least squares through the origin.
    Logits that are c times too large make it about c - 1 times the share of unlikely tokens.
    """
    wanted = np.concatenate(learner).astype(np.float64)
    gap = np.concatenate(engine).astype(np.float64) - wanted
    if not np.isfinite(gap).all():
        return float("inf"), float("inf"), float("inf")
    return float(np.abs(gap).mean()), float(gap.mean()), float(gap @ wanted) / (float(wanted @ wanted) or 1.0)


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

    jump      the difference is past `growth` times what was normal
    trend     over `window` readings it climbs steadily by more than that
    stretch   on frozen weights: the mean of the last one, two or three is `far` standard errors off what was normal
    """

    tolerance: float = 0.15
    calibrate: int = 3
    window: int = 16
    growth: float = 2.0
    floor: float = 5.0e-4  # below this a difference is the noise of the arithmetic
    far: float = 5.0
    tremble: float = 1.0e-4  # standard deviation of a stretch, at least: exact engines do not tremble at all
    enough: int = 16  # readings from which normal and tremble are known
    _history: list[float] = field(default_factory=list)
    _stretches: list[float] = field(default_factory=list)
    _content: str = ""

    def read(
        self, engine: str, version: int, seen: Sequence[Float32], wanted: Sequence[Float32], content: str = ""
    ) -> Reading:
        """Judge one comparison. `content` is the root digest of what was loaded: equal content, frozen weights."""
        if not content or content != self._content:
            self._content, self._stretches = content, []
        mean_abs, bias, stretch = difference(seen, wanted)
        trend = slope([*self._history, mean_abs][-self.window :]) if np.isfinite(mean_abs) else float("inf")
        alarm = self._judge(mean_abs, trend) or self._judge_stretch(stretch)
        if not alarm:  # an alarmed reading does not become part of what is normal
            self._history.append(mean_abs)
            self._stretches.append(stretch)
        return Reading(engine, version, mean_abs, bias, stretch, trend, alarm)

    def _judge(self, mean_abs: float, trend: float) -> str:
        if not mean_abs <= self.tolerance:
            return f"log-probs differ by {mean_abs:.4f} on average, tolerance {self.tolerance}"
        if len(self._history) < self.calibrate:
            return ""
        normal = statistics.median(self._history[: max(self.calibrate, self.window)])
        allowed = max((self.growth - 1) * normal, self.floor)
        if mean_abs - normal > allowed:
            return f"log-probs differ by {mean_abs:.5f} on average where {normal:.5f} was normal"
        if len(self._history) + 1 >= self.window and trend * self.window > allowed:
            return f"log-probs drift: the difference climbs by {trend:.6f} per reading"
        return ""

    def _judge_stretch(self, stretch: float) -> str:
        latest, before = [*self._stretches[-2:], stretch], self._stretches[:-2][-4 * self.window :]
        if len(before) < self.enough:
            return ""
        normal, tremble = statistics.fmean(before), max(statistics.stdev(before), self.tremble)
        errors = [tremble * (1 / k + 1 / len(before)) ** 0.5 for k in (1, 2, 3)]
        off = max(abs(statistics.fmean(latest[-k:]) - normal) / e for k, e in enumerate(errors, start=1))
        if off > self.far:
            return f"log-probs are stretched by {stretch:.3%} where {normal:.3%} was normal, {off:.1f} standard errors"
        return ""
