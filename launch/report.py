"""`headrace report D`: one self-contained page and one picture, from the run directory's files alone.

    write(Path("runs/sort3-001")) -> [runs/sort3-001/report.html, runs/sort3-001/curves.png]

Works while a run is going on, after it, and after it died. The page has no script and loads nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from launch.charts import SMALL, Series, line_chart, percent, plain
from launch.config import RunConfig, load
from launch.curves import draw
from launch.outcome import final_rows
from launch.progress import Progress, decimals, described, duration
from launch.report_style import CSS
from launch.run_dir import RunDirectory
from rollout.event_log import Row, replace_file

QUIET = {"weights_committed", "weights_staged", "dropped", "leased", "waiting"}  # too many to list one by one
MOST_EVENTS = 200


def write(run_dir: Path) -> list[Path]:
    """Write the report; returns what was written. Raises ConfigError where there is no run."""
    run = RunDirectory.open(run_dir)
    config = load(run.config_path)
    rows, events = run.metrics(), run.events()
    progress = told(config, rows, events)
    replace_file(run.report_path, page(config, progress, events, run.path.name))
    written = [run.report_path]
    if draw(config, progress, run.curves_path):
        written.append(run.curves_path)
    return written


def told(config: RunConfig, rows: Sequence[Row], events: Sequence[Row]) -> Progress:
    """A run's progress as its files tell it."""
    progress = Progress(config.run.steps)
    for row in rows:
        progress.step(row)
    for event in events:
        progress.event(event)
    return progress


def summary_of(events: Sequence[Row]) -> dict[str, Any]:
    """What the driver said at the end; that it is still running (or died) where it said nothing."""
    for event in reversed(events):
        if event["event"] in ("run_starting", "run_started"):  # resumed since
            break
        if event["event"] == "run_finished":
            return {k: v for k, v in event.items() if k not in ("time", "event")}
    return {"outcome": "not finished"}


def page(config: RunConfig, p: Progress, events: Sequence[Row], name: str) -> str:
    """The whole page."""
    summary = summary_of(events)
    seconds = float(events[-1]["time"]) - float(events[0]["time"]) if events else 0.0
    rows = final_rows(config, p, summary, seconds)
    body = [
        _headline(config, p, summary, name, seconds),
        f"<div class='charts hero'>{''.join(_hero(config, p))}</div>",
        "<h2>What it came to</h2>" + _table(rows),
        f"<h2>How it went</h2><div class=charts>{''.join(_details(p))}</div>",
        _dropped(p),
        _events(events),
        f"<details><summary>Topology</summary><pre>{escape(config.to_yaml())}</pre></details>",
        f"<footer>{escape(time.strftime('%Y-%m-%d %H:%M', time.localtime()))} by headrace report</footer>",
    ]
    title = escape(f"{name}: {config.run.name}")
    head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><title>{title}</title>"
    head += f"<style>{CSS}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body><main>{''.join(body)}</main></body></html>"


def _headline(config: RunConfig, p: Progress, summary: dict[str, Any], name: str, seconds: float) -> str:
    tiles = []
    for what, points in p.held_out.items():
        tiles.append(("held-out score" if what == "held_out" else what, f"{points[0][1]:.2f} → {points[-1][1]:.2f}"))
    tiles.append(("steps", f"{p.version} of {p.steps}"))
    tiles.append(("time, with start-up", duration(seconds)))
    oldest = max((value for _, value in p.series("staleness/max")), default=None)
    tiles.append(("staleness", f"max {decimals(oldest, 0)} of {config.staleness.bound}"))
    if "lost" in summary:
        tiles.append(("lost / trained twice", f"{summary['lost']} / {summary.get('duplicated', '?')}"))
    shown = "".join(f"<div class=tile><span>{escape(k)}</span><b>{escape(v)}</b></div>" for k, v in tiles)
    state = str(summary.get("outcome", "finished"))
    model = escape(f"{config.model.path} · {config.algorithm.preset} · {config.plane} weight plane")
    badge = f"<em class='badge {escape(state.split()[0])}'>{escape(state)}</em>"
    return f"<header><h1>{escape(name)} {badge}</h1><p>{model}</p></header><div class=tiles>{shown}</div>"


def _hero(config: RunConfig, p: Progress) -> list[str]:
    rewards = [Series("training reward", p.series("reward/mean"), "a", area=True)]
    rewards += [Series(_spoken(name), points, "b", dots=True) for name, points in p.held_out.items()]
    high = max((y for s in rewards for _, y in s.points), default=1.0)
    steps = p.series("staleness/max")
    bound = [(x, float(config.staleness.bound)) for x, _ in (steps[:1] + steps[-1:])]
    stale = [
        Series("max", steps, "d"),
        Series("mean", p.series("staleness/mean"), "c", area=True),
        Series("bound", bound, "limit", dashed=True),
    ]
    idle = [Series(role, p.series(f"idle/{role}"), c) for role, c in (("rollout", "c"), ("learner", "d"))]
    speed = [
        Series(role, p.series(f"throughput/{role}_tokens_per_s"), c) for role, c in (("rollout", "c"), ("learner", "d"))
    ]
    return [
        line_chart("Reward", rewards, y_low=0.0, y_high=1.0 if 0.3 < high <= 1 else None),
        line_chart("Staleness, versions", stale, y_low=0.0, y_high=config.staleness.bound + 0.5),
        line_chart("Idle share of a step", idle, "waiting for the other side", y_low=0.0, y_high=1.0, show=percent),
        line_chart("Tokens per second", speed, "answer tokens generated, and trained on", y_low=0.0),
    ]


def _details(p: Progress) -> list[str]:
    times = [
        Series(label, p.series(f"time/{key}"), colour)
        for label, key, colour in (("train", "train", "d"), ("wait", "wait", "c"), ("weights", "weight_sync", "b"))
    ]
    small = (
        ("Entropy, nats", "policy/entropy", "a", plain),
        ("KL to the sampling policy", "policy/kl_behaviour", "b", plain),
        ("Gradient norm", "grad_norm", "d", plain),
        ("Clipped tokens", "policy/clip_fraction", "a", percent),
        ("Answer length, tokens", "length/mean", "c", plain),
    )
    charts = [line_chart("Where a step's time goes, s", times, y_low=0.0, size=SMALL)]
    for title, key, colour, show in small:
        series = [Series(title.partition(",")[0].lower(), p.series(key), colour)]
        charts.append(line_chart(title, series, y_low=0.0, show=show, size=SMALL))
    return charts


def _dropped(p: Progress) -> str:
    if not p.dropped:
        return ""
    rows = [(reason, f"{n} group{'' if n == 1 else 's'}") for reason, n in p.dropped.most_common()]
    return "<h2>What was dropped, and why</h2>" + _table(rows)


def _events(events: Sequence[Row]) -> str:
    told = [e for e in events if e["event"] not in QUIET]
    if not told:
        return ""
    start = float(events[0]["time"])
    rows = [(duration(float(e["time"]) - start), described(e)) for e in told[-MOST_EVENTS:]]
    note = f" (the last {MOST_EVENTS} of {len(told)})" if len(told) > MOST_EVENTS else ""
    return f"<details open><summary>Events{note}</summary>{_table(rows)}</details>"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><th>{escape(a)}</th><td>{escape(b)}</td></tr>" for a, b in rows) + "</table>"


def _spoken(name: str) -> str:
    return "held-out (greedy)" if name == "held_out" else f"{name} (greedy)"
