"""`headrace why D`: which loop waits for what, for how long, and what would end the wait. Pure, after `read_run`.

    loop      waits for                          seen in                                      ended by
    engine    a free slot                        groups_in_flight 0, every slot used          the learner's next release
    reward    a finished group                   queue.counts.generated 0                     engines
    learner   P scored groups (take)             phase take                                   rewards, else engines
    learner   engines that commit (publish)      phase publish                                engines, or the deadline

Sources: gauges.json (what every role does now), events.jsonl (who died, what was refused), metrics.jsonl (how long
things usually take). Findings come worst first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from launch.config import RunConfig, load
from launch.progress import TROUBLE, Progress, duration, number, percent
from launch.report import summary_of, told
from launch.run_dir import RunDirectory
from rollout.event_log import Row

SILENT_S = 15.0  # the driver writes gauges.json every second; older than this, it is gone
UNUSUAL = 5.0  # times the usual duration of a phase before it counts as stuck

Severity = Literal["dead", "stuck", "alarm", "slow", "waiting", "working", "ended"]
ORDER: tuple[Severity, ...] = ("dead", "stuck", "ended", "alarm", "slow", "waiting", "working")


class Finding(NamedTuple):
    """Finding("waiting", "learner-0", "waits for groups, 12 s: 3 of 8 are scored", "unblocked by the engines")."""

    severity: Severity
    who: str
    what: str
    remedy: str = ""

    def text(self) -> str:
        return f"{self.severity:<8} {self.who}: {self.what}" + (f"\n         -> {self.remedy}" if self.remedy else "")


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything the run directory says, and when it was read."""

    directory: RunDirectory
    config: RunConfig
    progress: Progress
    events: tuple[Row, ...]
    gauges: Mapping[str, Any]
    now: float

    @property
    def summary(self) -> dict[str, Any]:
        return summary_of(self.events)

    @property
    def ended(self) -> bool:
        return self.summary["outcome"] != "not finished"

    @property
    def roles(self) -> dict[str, Mapping[str, Any]]:
        return {k: v for k, v in dict(self.gauges.get("roles", {})).items() if isinstance(v, Mapping)}

    @property
    def queue(self) -> Mapping[str, Any]:
        return dict(self.gauges.get("queue", {}))

    @property
    def counts(self) -> Mapping[str, int]:
        return dict(self.queue.get("counts", {}))

    @property
    def silent_s(self) -> float | None:
        """Seconds since the driver wrote gauges; None before it first did."""
        written = number(self.gauges.get("time_s"))
        return None if written is None else max(0.0, self.now - written)

    def dead(self) -> dict[str, Row]:
        """Roles whose last life-or-death event is a death; one that is being started again is not among them."""
        dead: dict[str, Row] = {}
        for event in self.events:
            if event["event"] == "role_died" or event["event"] == "role_given_up":
                dead[str(event.get("role"))] = event
            elif event["event"] in ("role_started", "role_restarting", "role_restarted"):
                dead.pop(str(event.get("role")), None)
            elif event["event"] in ("run_starting", "run_started"):
                dead.clear()
        return dead


def read_run(path: str | Path, now: float | None = None) -> RunState:
    """Read a run directory as it is. Raises ConfigError where there is none."""
    run = RunDirectory.open(path)
    config, events = load(run.config_path), run.events()
    progress = told(config, run.metrics(), events)
    return RunState(run, config, progress, tuple(events), run.read_gauges(), time.time() if now is None else now)


def diagnose(state: RunState) -> list[Finding]:
    """Every finding, worst first; never empty."""
    found = list(_lives(state))
    if not any(f.severity in ("ended", "dead") and f.who == "run" for f in found):
        for name, gauges in sorted(state.roles.items()):
            found += _role(state, name, gauges)
        found += _queue(state)
    found += _trouble(state)
    found += _balance(state)
    found.sort(key=lambda f: ORDER.index(f.severity))
    return found or [Finding("working", "run", "nothing is waiting")]


def _lives(state: RunState) -> Iterator[Finding]:
    resume = f"headrace run {state.directory.path} --resume"
    for role, event in state.dead().items():
        ago, on = duration(state.now - float(event["time"])), event["event"] == "role_given_up" and not state.ended
        what = f"died {ago} ago: {event.get('reason', 'no reason given')}"
        if event["event"] == "role_given_up":
            what = f"given up {ago} ago after {event.get('restarts', '?')} restarts: {event.get('reason')}"
        remedy = f"logs/{role}.log; " + ("the run goes on with the other engines" if on else resume)
        yield Finding("dead", role, what, remedy)
    if state.ended:
        s = state.summary
        why = f": {s['reason']}" if s.get("reason") else ""
        remedy = "" if s["outcome"] == "finished" else resume
        yield Finding("ended", "run", f"{s['outcome']} at version {state.progress.version}{why}", remedy)
    elif state.silent_s is None:
        last = state.events[-1] if state.events else None
        since = f", {duration(state.now - float(last['time']))} since {last['event']}" if last else ""
        yield Finding(
            "waiting", "run", f"is still starting{since}", "engines and learner import torch: most of a minute"
        )
    elif state.silent_s > SILENT_S:
        yield Finding(
            "dead", "run", f"the driver has said nothing for {duration(state.silent_s)}: it was killed", resume
        )


def _role(state: RunState, name: str, gauges: Mapping[str, Any]) -> Iterator[Finding]:
    if "absent" in gauges:
        yield from _absent(state, name, gauges)
    elif "silent" in gauges:
        yield Finding("stuck", name, f"does not answer: {gauges['silent']}", f"logs/{name}.log")
    elif name.startswith("learner"):
        yield from _learner(state, name, gauges)
    elif name.startswith("rollout"):
        yield from _engine(state, name, gauges)


def _absent(state: RunState, name: str, gauges: Mapping[str, Any]) -> Iterator[Finding]:
    stage = {"waiting": "waits to be started again", "starting": "is starting again", "joining": "takes the weights"}
    if gauges["absent"] in stage:
        restart = f"restart {gauges.get('restarts', 0):.0f} of {state.config.topology.rollout.restarts}"
        what = f"{stage[gauges['absent']]} ({restart}): {gauges.get('reason')}"
        yield Finding(
            "waiting", name, what, "its leases expire to the others; it serves once its weights are confirmed"
        )


def _engine(state: RunState, name: str, gauges: Mapping[str, Any]) -> Iterator[Finding]:
    in_flight = number(gauges.get("groups_in_flight"))
    slots = dict(state.queue.get("slots", {}))
    if in_flight is None:
        return
    if unproven := number(gauges.get("groups_held")):
        what = f"holds {unproven:.0f} groups"
        yield Finding("waiting", name, what, "unblocked when the learner confirms their weights")
    if in_flight > 0:
        yield Finding("working", name, f"generates {in_flight:.0f} groups")
    elif slots and slots.get("used", 0) >= slots.get("all", 0):
        held = _held(state.counts)
        what = f"waits for a slot: all {slots['all']} are used ({held})"
        yield Finding("waiting", name, what, "unblocked when the weights of the learner's next step are live")
    else:
        yield Finding(
            "waiting", name, "has nothing in flight though slots are free", f"it should lease at once: logs/{name}.log"
        )


def _learner(state: RunState, name: str, gauges: Mapping[str, Any]) -> Iterator[Finding]:
    phase, since = str(gauges.get("phase", "unknown")), number(gauges.get("phase_s")) or 0.0
    usual = state.progress.mean(
        {"take": "time/wait", "learn": "time/train", "publish": "time/weight_sync"}.get(phase, "")
    )
    took = f"for {since:.0f} s" + (f" (usually {usual:.1f} s)" if usual is not None else "")
    late: Severity | None = "stuck" if usual is not None and since > max(30.0, UNUSUAL * usual) else None
    if phase == "take":
        what, remedy = _missing_groups(state)
        yield Finding(late or "waiting", name, f"waits for groups {took}: {what}", remedy)
    elif phase == "publish":
        remedy = (
            f"unblocked by every engine's commit; an engine that does not answer is left out after {_timeout(state)}"
        )
        if not any("groups_in_flight" in g for n, g in state.roles.items() if n.startswith("rollout")):
            remedy = "unblocked by an engine that comes back"
        yield Finding(late or "waiting", name, f"waits for engines to take the new weights {took}", remedy)
    elif phase == "evaluate":
        yield Finding(late or "waiting", name, f"waits for the held-out answers {took}", "unblocked by the engines")
    else:
        words = {"learn": "computes a step", "checkpoint": "writes a checkpoint", "starting": "is starting"}
        yield Finding(late or "working", name, f"{words.get(phase, phase)} {took}")


def _missing_groups(state: RunState) -> tuple[str, str]:
    """What stands between the learner and its next P groups, and who removes it."""
    counts, p = state.counts, state.config.algorithm.groups_per_step
    scored, generated, leased = (counts.get(k, 0) for k in ("scored", "generated", "leased"))
    what = f"{scored} of {p} scored, {generated} wait for a reward, {leased} being generated"
    if scored >= p:
        return what, "enough are there: the queue's own word for it is below"
    if generated >= max(leased, p - scored):
        return what, "unblocked by the reward actors; if that is usual, raise topology.reward.replicas"
    if leased:
        return what, "unblocked by the engines; if that is usual, add engines or shorten sampling.max_tokens"
    if counts.get("issued", 0) or dict(state.queue.get("slots", {})).get("used", 0) == 0:
        return what, "no engine holds a lease: see the engines"
    return what, f"slots are held by {_held(counts)}: unblocked by their release"


def _queue(state: RunState) -> Iterator[Finding]:
    queue = state.queue
    for line in queue.get("waiting", ()):
        yield Finding("waiting", "queue", str(line))
    if queue.get("stalled"):
        yield Finding(
            "stuck", "queue", f"cannot write its journal: {queue['stalled']}", "make room; it goes on by itself"
        )
    if queue and queue.get("conserved") is False:
        yield Finding(
            "alarm",
            "queue",
            f"the books do not balance: {dict(state.counts)}",
            "keep the run directory and report this",
        )
    held = dict(queue.get("bytes", {}))
    if held.get("limit") and held.get("in_memory", 0) >= held["limit"]:
        remedy = "unblocked by the learner's next take; raise topology.queue.max_bytes"
        yield Finding("waiting", "queue", f"holds its {held['limit']} bytes, so submits are pushed back", remedy)


def _trouble(state: RunState) -> Iterator[Finding]:
    """The last of each kind of trouble in the events."""
    last: dict[tuple[str, str], Row] = {}
    for event in state.events:
        if event["event"] in TROUBLE:
            last[event["event"], str(event.get("engine", event.get("what", "")))] = event
    for (kind, who), event in last.items():
        ago = duration(state.now - float(event["time"]))
        detail = event.get(TROUBLE[kind], "")
        who, what = ("run", who) if kind == "alarm" else (who or "run", kind)
        yield Finding("alarm", who, f"{what} {ago} ago" + (f": {detail}" if detail else ""))


def _balance(state: RunState) -> Iterator[Finding]:
    """Which side the other waits for, over the whole run."""
    p = state.progress
    no_signal, trained = p.dropped.get("zero_signal", 0), p.total("groups/trained")
    wasted = no_signal > trained / 2
    if wasted:
        what = f"{no_signal} groups had answers that were all equally good, against {trained:.0f} trained"
        remedy = "all right or all wrong: harder or easier prompts, more answers per group, a higher temperature"
        yield Finding("slow", "run", what, remedy)
    learner, rollout, sync = p.mean("idle/learner"), p.mean("idle/rollout"), p.mean("time/weight_sync")
    if learner is not None and learner > 0.25 and learner > (rollout or 0.0):
        remedy = "add engines or cores to topology.rollout, or shorten answers"
        if wasted:
            remedy = "most of what is generated is thrown away for want of signal: mend that first"
        what = f"the learner is idle {percent(learner)} of a step: generation is the bottleneck"
        yield Finding("slow", "run", what, remedy)
    elif rollout is not None and rollout > 0.25:
        remedy = "give topology.learner more cores or ranks, or fewer engines; a larger staleness.bound only hides it"
        what = f"engines are idle {percent(rollout)} of a step: learning is the bottleneck"
        yield Finding("slow", "run", what, remedy)
    pace = p.step_s(len(p.rows))
    if sync and pace and sync > max(0.2 * pace, 0.5):
        yield Finding("slow", "run", f"weights take {sync:.1f} s of a {pace:.1f} s step", "see weights.plane")


def _held(counts: Mapping[str, int]) -> str:
    names = ("leased", "generated", "scored", "taken", "trained")
    return ", ".join(f"{counts[n]} {n}" for n in names if counts.get(n)) or "nobody"


def _timeout(state: RunState) -> str:
    return f"weights.timeout_s = {state.config.weights.timeout_s:g} s"
