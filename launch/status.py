"""`headrace status D`: what a run is doing and has done, on one screen or as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.diagnosis import RunState
from launch.progress import decimals, described, duration, number, per_second, percent

LAST_EVENTS = 6


def status_data(state: RunState) -> dict[str, Any]:
    """For scripts: the keys are a contract."""
    p = state.progress
    return {
        "run": str(state.directory.path),
        "outcome": _outcome(state),
        "version": p.version,
        "steps": p.steps,
        "left_s": None if state.ended else p.left_s(),
        "held_out": {name: [list(point) for point in points] for name, points in p.held_out.items()},
        "last_step": dict(p.rows[-1]) if p.rows else {},
        "roles": {name: dict(gauges) for name, gauges in state.roles.items()},
        "queue": dict(state.queue),
        "dropped": dict(p.dropped),
        "dead": sorted(state.dead()),
    }


def status_text(state: RunState) -> str:
    """For people."""
    p = state.progress
    left = "" if state.ended else f", {duration(p.left_s())} left"
    lines = [f"{state.directory.path}: {_outcome(state)}, version {p.version} of {p.steps}{left}"]
    if p.rows:
        lines.append(f"  reward     {decimals(p.latest('reward/mean'), 3)}")
    for name, points in p.held_out.items():
        lines.append(f"  {name:<10} " + ", ".join(f"{score:.3f} at {version}" for version, score in points[-5:]))
    if p.rows:
        mean, oldest = decimals(p.latest("staleness/mean"), 1), decimals(p.latest("staleness/max"), 0)
        lines.append(f"  staleness  mean {mean}, max {oldest} of {state.config.staleness.bound}")
        for role in ("rollout", "learner"):
            speed, idle = p.recent(f"throughput/{role}_tokens_per_s"), p.recent(f"idle/{role}")
            lines.append(f"  {role:<10} {per_second(speed)}, idle {percent(idle)}")
    if state.counts:
        lines.append("  queue      " + ", ".join(f"{n} {name}" for name, n in state.counts.items() if n))
    if p.dropped:
        lines.append("  dropped    " + ", ".join(f"{reason} {n}" for reason, n in p.dropped.most_common()))
    if not state.ended:
        lines += [f"  {name:<10} {_gauges(gauges)}" for name, gauges in sorted(state.roles.items())]
    recent = [e for e in state.events if e["event"] != "dropped"][-LAST_EVENTS:]
    lines += [f"  {duration(state.now - float(e['time']))} ago  {described(e)}" for e in recent]
    return "\n".join(lines)


def _outcome(state: RunState) -> str:
    if state.ended:
        return str(state.summary["outcome"])
    if state.silent_s is None:
        return "starting"
    return "running" if state.silent_s < 15 else "died (its driver is gone)"


def _gauges(gauges: Mapping[str, Any], most: int = 6) -> str:
    shown = []
    for key, value in list(gauges.items())[:most]:
        as_number = number(value)
        shown.append(f"{key} {value if as_number is None else f'{as_number:.4g}'}")
    return ", ".join(shown)
