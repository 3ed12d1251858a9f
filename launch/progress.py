"""What a run has done so far, as the live view, `status` and the report tell it. Pure: rows in, numbers out.

progress = Progress(steps=24)
progress.step({"step": 3, "reward/mean": 0.2, ...}); progress.event({"event": "dropped", ...})
progress.fraction, progress.left_s(now), progress.held_out     # 0.125, 181.0, {"held_out": [(0, 0.12), (8, 0.66)]}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]
TROUBLE = {  # events that somebody should look at, with the field that says why
    "alarm": "detail",
    "canary_alarm": "reason",
    "weights_refused": "reason",
    "weights_interrupted": "reason",
    "weights_unchanged": "digest",
    "engine_quarantined": "reason",
    "journal_stalled": "reason",
    "journal_torn": "reason",
    "checkpoint_passed_over": "reason",
    "pause_expired": "holder",
    "evaluation_abandoned": "reason",
}
BARS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class Progress:
    """Filled in by `step` and `event`; a resumed run is told its old rows first."""

    steps: int
    rows: list[Row] = field(default_factory=list)
    held_out: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  # name -> (version, score), in order
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> groups
    deaths: Counter[str] = field(default_factory=Counter)  # role -> times it died
    alarms: list[str] = field(default_factory=list)

    def step(self, row: Row) -> None:
        self.rows.append(row)
        version = row.get("version")
        for key, value in row.items():
            parts = key.split("/")
            if parts[0] == "eval" and parts[-1] == "reward" and isinstance(version, int) and number(value) is not None:
                self.evaluation(version, "/".join(parts[1:-1]), float(value))

    def evaluation(self, version: int, name: str, score: float) -> None:
        """One held-out score; said twice (as an event and in a metrics line) it counts once."""
        points = [p for p in self.held_out.get(name, []) if p[0] != version]
        self.held_out[name] = sorted([*points, (version, score)])

    def event(self, event: Row) -> None:
        kind = event.get("event")
        if kind == "dropped":
            ordinals = event.get("ordinals", ())
            count = event.get("count", len(ordinals) if isinstance(ordinals, Sequence) else 1)
            self.dropped[str(event.get("reason", "unknown"))] += int(count)
        elif kind == "role_died":
            self.deaths[str(event.get("role", "unknown"))] += 1
        elif kind in TROUBLE:
            who, why = event.get("engine", event.get("what", "")), event.get(TROUBLE[str(kind)], "")
            self.alarms.append(" ".join(str(word) for word in (kind, who, why) if word))
        elif kind == "evaluation" and number(event.get("score")) is not None:
            self.evaluation(int(event.get("version", 0)), str(event.get("name", "held_out")), float(event["score"]))

    @property
    def version(self) -> int:
        return int(self.rows[-1].get("version", len(self.rows))) if self.rows else 0

    @property
    def fraction(self) -> float:
        return min(1.0, self.version / self.steps)

    def latest(self, key: str) -> float | None:
        """The last value of a metric; None before the first."""
        return next((v for row in reversed(self.rows) if (v := number(row.get(key))) is not None), None)

    def recent(self, key: str, last: int = 4) -> float | None:
        """The mean of a metric's last few values: what one step says of a rate is mostly chance."""
        values = [value for _, value in self.series(key)][-last:]
        return sum(values) / len(values) if values else None

    def series(self, key: str) -> list[tuple[int, float]]:
        """(version, value) of one metric, steps without it left out."""
        pairs = ((int(row.get("version", n + 1)), number(row.get(key))) for n, row in enumerate(self.rows))
        return [(version, value) for version, value in pairs if value is not None]

    def mean(self, key: str) -> float | None:
        values = [value for _, value in self.series(key)]
        return sum(values) / len(values) if values else None

    def total(self, key: str) -> float:
        return sum(value for _, value in self.series(key))

    def step_s(self, last: int = 8) -> float | None:
        """Seconds per step over the last few, by their clocks; None before the second step."""
        times = [t for row in self.rows[-last - 1 :] if (t := number(row.get("time_s"))) is not None]
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    def left_s(self) -> float | None:
        """Seconds until the last step at the present pace."""
        pace = self.step_s()
        return None if pace is None else pace * max(0, self.steps - self.version)


def number(value: object) -> float | None:
    """The value if it is a number, else None."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def spark(values: Iterable[float], width: int = 24) -> str:
    """The last `width` values as a line of bars: spark([0, 1, 2]) == '▁▅█'."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((v - low) * scale)] for v in shown)


def duration(seconds: float | None) -> str:
    """75 -> '1:15', 4000 -> '1:06:40', None -> '?'"""
    if seconds is None:
        return "?"
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{s:02d}" if hours else f"{minutes}:{s:02d}"


def decimals(value: float | None, digits: int = 2) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def per_second(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} tokens/s"


def described(event: Row) -> str:
    """An event in one line, without its clock: 'role_died role=rollout-0 reason=exit code -9'."""
    rest = (f"{k}={_short(v)}" for k, v in event.items() if k not in ("time", "event") and v not in (None, [], {}))
    return " ".join([str(event.get("event", "event")), *rest])


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k} {_short(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence) and value and isinstance(value[0], Mapping):
        return f"[{len(value)}]"
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 6:
        return f"[{', '.join(map(str, value[:5]))}, ... {len(value)} in all]"
    return str(value)
