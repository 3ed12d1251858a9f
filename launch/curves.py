"""curves.png: reward and held-out score, staleness, idle split, throughput; made for a README's first screen."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from launch.config import RunConfig
from launch.progress import Progress, duration

INK, SOFT, GRID = "#1d2126", "#68707a", "#e6e6e1"
REWARD, HELD_OUT, ROLLOUT, LEARNER, LIMIT = "#2f6fde", "#d9601a", "#0f8c7f", "#7a4fcf", "#c2374b"

STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": GRID,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "lines.linewidth": 2.2,
    "legend.frameon": False,
    "figure.facecolor": "white",
}


def draw(config: RunConfig, p: Progress, path: Path) -> bool:
    """Draw and save; False, and nothing drawn, where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    with matplotlib.rc_context(STYLE):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12.5, 5.6), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplot_mosaic("AAB;AAC;AAD")
        _reward(axes["A"], p)
        _staleness(axes["B"], p, config.staleness.bound)
        _roles(axes["C"], p, "Idle share of a step", "idle/{}", 100.0, "%")
        _roles(axes["D"], p, "Tokens per second", "throughput/{}_tokens_per_s", 1.0, "")
        figure.suptitle(_title(config, p), x=0.008, ha="left", fontsize=11, color=SOFT)
        axes["A"].set_xlabel("optimizer step")
        axes["D"].set_xlabel("optimizer step")
        draft = path.with_name(f".{path.name}")
        figure.savefig(draft, format="png")
    draft.replace(path)
    return True


def _title(config: RunConfig, p: Progress) -> str:
    """'sort3: smollm2-135m, dapo, 24 steps in 3:14'"""
    pace = p.step_s(len(p.rows))
    took = f" in {duration(pace * p.version)}" if pace else ""
    return f"{config.run.name}: {Path(config.model.path).name}, {config.algorithm.preset}, {p.version} steps{took}"


def _reward(ax: Any, p: Progress) -> None:
    ax.set_title("Reward")
    xy = p.series("reward/mean")
    if xy:
        ax.plot(*_columns(xy), color=REWARD, label="training reward (mean of the answers trained on)")
        ax.fill_between(*_columns(xy), color=REWARD, alpha=0.10, linewidth=0)
    for name, points in p.held_out.items():
        label = "held-out score (greedy)" if name == "held_out" else f"{name} (greedy)"
        ax.plot(*_columns(points), color=HELD_OUT, marker="o", markersize=8, label=label, zorder=3)
        for x, y in points if len(points) <= 8 else (points[0], points[-1]):
            ax.annotate(
                f"{y:.2f}",
                (x, y),
                xytext=(0, 11),
                textcoords="offset points",
                ha="center",
                fontweight="bold",
                color=HELD_OUT,
            )
    values = [y for _, y in xy] + [y for points in p.held_out.values() for _, y in points]
    if values and 0.3 < max(values) <= 1 and min(values) >= 0:
        ax.set_ylim(0, 1.06)
    elif values and min(values) >= 0:
        ax.set_ylim(0, max(values) * 1.15 or 1)
    ax.margins(x=0.03)
    _legend(ax, "upper left")


def _staleness(ax: Any, p: Progress, bound: int) -> None:
    ax.set_title("Staleness, versions")
    largest, mean = p.series("staleness/max"), p.series("staleness/mean")
    ax.axhline(bound, color=LIMIT, linestyle=(0, (5, 3)), linewidth=1.6, label=f"bound {bound}", zorder=4)
    if largest:
        ax.plot(*_columns(largest), color=LEARNER, label="max", drawstyle="steps-mid", linewidth=1.6)
    if mean:
        ax.plot(*_columns(mean), color=ROLLOUT, label="mean")
    ax.set_ylim(0, bound + 0.75)
    ax.yaxis.get_major_locator().set_params(integer=True)
    _legend(ax, "lower right", columns=3)


def _roles(ax: Any, p: Progress, title: str, key: str, scale: float, unit: str) -> None:
    ax.set_title(title + (f", {unit}" if unit else ""))
    top = 0.0
    for role, colour in (("rollout", ROLLOUT), ("learner", LEARNER)):
        xy = [(x, y * scale) for x, y in p.series(key.format(role))]
        if xy:
            ax.plot(*_columns(xy), color=colour, label=role)
            top = max(top, *(y for _, y in xy))
    ax.set_ylim(0, 100 if unit == "%" else top * 1.45 or 1)
    _legend(ax, "upper right", columns=2)


def _legend(ax: Any, where: str, columns: int = 1) -> None:
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc=where, ncols=columns, handlelength=1.5, columnspacing=1.2, borderaxespad=0.2)


def _columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
