"""Line charts as inline SVG whose colours follow the reader's light or dark theme. Pure: numbers in, text out.

    line_chart("Reward", [Series("training", [(1, 0.1), (2, 0.3)], "a"), Series("held-out", [(0, 0.1)], "b")])

A colour is a CSS variable of the page (`--a`, `--b`, ...); the page decides what it looks like.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

LEFT, RIGHT, TOP, BOTTOM = 46, 16, 14, 34
LARGE, SMALL = (560, 250), (380, 190)  # units of the drawing; it is scaled to the width of its place

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Series:
    """One line: points (x, y) in order of x, the colour's letter, dots for sparse series, dashes for limits."""

    label: str
    points: Points
    colour: str
    dots: bool = False
    dashed: bool = False
    area: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """A span of values mapped to pixels, with round ticks."""

    low: float
    high: float
    start: float
    end: float

    @property
    def middle(self) -> float:
        return (self.start + self.end) / 2

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, most: int) -> list[float]:
        """At most `most` round numbers inside the span."""
        if self.high <= self.low:
            return [self.low]
        raw = (self.high - self.low) / max(1, most - 1)
        size = 10 ** math.floor(math.log10(raw))
        step = next(size * m for m in (1, 2, 5, 10) if size * m >= raw - 1e-12)
        first = math.ceil(self.low / step - 1e-9)
        return [round(n * step, 10) for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def plain(value: float) -> str:
    """1200 -> '1,200', 0.25 -> '0.25'"""
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.3g}"


def percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def line_chart(
    title: str,
    series: Sequence[Series],
    note: str = "",
    y_low: float | None = None,
    y_high: float | None = None,
    show: Callable[[float], str] = plain,
    size: tuple[int, int] = LARGE,
) -> str:
    """A figure with a legend; one that says so where there are no points."""
    legend = "".join(_key(s) for s in series if s.points) if len(series) > 1 else ""
    head = f"<figcaption><b>{escape(title)}</b><span class=keys>{legend}</span></figcaption>"
    foot = f"<p class=note>{escape(note)}</p>" if note else ""
    if not any(s.points for s in series):
        return f"<figure>{head}<p class=note>no data yet</p></figure>"
    x, y = _axes(series, y_low, y_high, size)
    parts = [
        *_grid(x, y, show),
        *(_area(s, x, y) for s in series if s.area and len(s.points) > 1),
        *(_line(s, x, y) for s in series if s.points),
        *(_dots(s, x, y, show) for s in series),
    ]
    label = escape(f"{title}: {', '.join(s.label for s in series)}", quote=True)
    svg = f'<svg viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f"<figure>{head}{svg}{foot}</figure>"


def _axes(
    series: Sequence[Series], y_low: float | None, y_high: float | None, size: tuple[int, int]
) -> tuple[Axis, Axis]:
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points]
    low = min(ys) if y_low is None else min(y_low, *ys)
    high = max(ys) if y_high is None else max(y_high, *ys)
    if high <= low:
        high = low + 1
    if y_high is None:
        high += 0.06 * (high - low)
    if y_low is None:
        low -= 0.06 * (high - low)
    return Axis(min(xs), max(xs), LEFT, size[0] - RIGHT), Axis(low, high, size[1] - BOTTOM, TOP)


def _grid(x: Axis, y: Axis, show: Callable[[float], str]) -> list[str]:
    out = []
    for tick in y.ticks(5):
        out.append(f'<line class=grid x1="{x.start}" x2="{x.end}" y1="{y.at(tick)}" y2="{y.at(tick)}"/>')
        label = escape(show(tick))
        out.append(f'<text class=tick x="{x.start - 8}" y="{y.at(tick) + 4}" text-anchor="end">{label}</text>')
    for tick in x.ticks(8):
        if tick == int(tick):
            out.append(f'<text class=tick x="{x.at(tick)}" y="{y.start + 17}" text-anchor="middle">{tick:.0f}</text>')
    out.append(f'<text class=tick x="{x.middle}" y="{y.start + 32}" text-anchor="middle">optimizer step</text>')
    return out


def _path(points: Points, x: Axis, y: Axis) -> str:
    return " ".join(f"{'M' if n == 0 else 'L'}{x.at(a)} {y.at(b)}" for n, (a, b) in enumerate(points))


def _line(s: Series, x: Axis, y: Axis) -> str:
    dash = ' stroke-dasharray="5 4"' if s.dashed else ""
    return f'<path class=line style="stroke:var(--{s.colour})"{dash} d="{_path(s.points, x, y)}"/>'


def _area(s: Series, x: Axis, y: Axis) -> str:
    base = y.at(y.low)
    closed = f"{_path(s.points, x, y)} L{x.at(s.points[-1][0])} {base} L{x.at(s.points[0][0])} {base} Z"
    return f'<path style="fill:var(--{s.colour});opacity:.12" d="{closed}"/>'


def _dots(s: Series, x: Axis, y: Axis, show: Callable[[float], str]) -> str:
    """Visible dots for sparse series; for the others invisible ones that carry the value for the mouse."""
    if s.dashed:
        return ""
    style = f'style="fill:var(--{s.colour})" r="4.5"' if s.dots else 'class=touch r="7"'
    marks = []
    for a, b in s.points:
        tip = escape(f"{s.label} at {a:g}: {show(b)}")
        marks.append(f'<circle cx="{x.at(a)}" cy="{y.at(b)}" {style}><title>{tip}</title></circle>')
        if s.dots and len(s.points) <= 8:
            above = y.at(b) - 10 if y.at(b) > TOP + 20 else y.at(b) + 18
            anchor = "end" if x.at(a) > x.end - 24 else "start" if x.at(a) < x.start + 24 else "middle"
            marks.append(f'<text class=value x="{x.at(a)}" y="{above}" text-anchor="{anchor}">{escape(show(b))}</text>')
    return "".join(marks)


def _key(s: Series) -> str:
    return f'<span class=key><i style="background:var(--{s.colour})"></i>{escape(s.label)}</span>'
