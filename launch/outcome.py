"""How a run ended, in words: the rows of the final table and the next three things to try. Pure.

The driver's summary may hold (all optional; what is missing is left out of the table):

    {"outcome": "finished" | "stopped" | "failed", "reason": "Ctrl-C", "seconds": 287.1, "issued": 203,
     "trained": 192, "dropped": {"zero_signal": 3, "run_ended": 8}, "lost": 0, "duplicated": 0,
     "max_staleness": 2}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.config import RunConfig
from launch.progress import Progress, decimals, duration, per_second, percent


def final_rows(config: RunConfig, p: Progress, summary: Mapping[str, Any], elapsed_s: float) -> list[tuple[str, str]]:
    """(what, result) in the order in which one asks."""
    rows: list[tuple[str, str]] = []
    if summary.get("reason"):
        rows.append(("reason", str(summary["reason"])))
    for name, points in p.held_out.items():
        rows.append((f"{name} score", " → ".join(f"{s:.3f}" for _, s in _thinned(points)) + " (greedy)"))
    rewards = [value for _, value in p.series("reward/mean")]
    if rewards:
        rows.append(("training reward", f"{rewards[0]:.3f} → {rewards[-1]:.3f}"))
    seconds = summary.get("seconds", elapsed_s)
    rows.append(("steps", f"{p.version} of {p.steps} in {duration(seconds)} ({decimals(p.step_s(10_000), 1)} s each)"))
    rollout, learner = p.mean("throughput/rollout_tokens_per_s"), p.mean("throughput/learner_tokens_per_s")
    rows.append(("tokens per second", f"rollout {per_second(rollout)}, learner {per_second(learner)}"))
    rows.append(("idle", f"rollout {percent(p.mean('idle/rollout'))}, learner {percent(p.mean('idle/learner'))}"))
    oldest = summary.get("max_staleness", max((v for _, v in p.series("staleness/max")), default=None))
    rows.append(
        (
            "staleness",
            f"mean {decimals(p.mean('staleness/mean'), 2)}, max {decimals(oldest, 0)} (bound {config.staleness.bound})",
        )
    )
    stalls = [value for _, value in p.series("weights/stall_s")]
    if stalls:
        rows.append(("weight updates", f"{len(stalls)}, generation stood still {sum(stalls) / len(stalls):.2f} s each"))
    rows += _books(summary, p)
    if p.deaths:
        rows.append(("deaths survived", ", ".join(f"{role} {n}" for role, n in p.deaths.items())))
    return rows


def _books(summary: Mapping[str, Any], p: Progress) -> list[tuple[str, str]]:
    """issued = trained + dropped, and what the audit measured."""
    dropped = dict(summary.get("dropped") or p.dropped)
    reasons = f" ({', '.join(f'{k} {v}' for k, v in sorted(dropped.items()))})" if dropped else ""
    rows = []
    if "issued" in summary and "trained" in summary:
        total = f"{summary['issued']} issued = {summary['trained']} trained + {sum(dropped.values())} dropped{reasons}"
        rows.append(("groups", total))
    if "lost" in summary:
        rows.append(("audit", f"{summary['lost']} lost, {summary.get('duplicated', '?')} trained twice"))
    return rows


def next_steps(config: RunConfig, run_dir: Path, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Three (what to open or to type, why), by how the run ended."""
    if summary.get("outcome", "finished") != "finished":
        again = "goes on from the last checkpoint; nothing is lost or trained twice"
        return [
            (f"headrace run {run_dir} --resume", again),
            (f"headrace why {run_dir}", "says what every loop was waiting for"),
            (f"headrace report {run_dir}", "curves and events up to here, in one page"),
        ]
    bound, compare = 0, "the same work without asynchrony: compare the time and the curve"
    if config.staleness.bound == 0:
        bound, compare = 2, "the same work with generation and training overlapping"
    return [
        (f"{run_dir}/report.html", "open it in a browser: curves, staleness, idle split and every event"),
        (f"vllm serve {run_dir}/model", "the trained weights, a Hugging Face directory, behind an OpenAI API"),
        (f"headrace run {run_dir}/config.yaml --set staleness.bound={bound}", compare),
    ]


def _thinned(points: list[tuple[int, float]], most: int = 6) -> list[tuple[int, float]]:
    """At most `most` points, first and last among them."""
    if len(points) <= most:
        return points
    every = (len(points) - 1) / (most - 1)
    return [points[round(n * every)] for n in range(most)]
