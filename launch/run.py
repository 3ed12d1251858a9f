"""`headrace run`: one driver from a topology to a report. Startup, main loop, shutdown, read from top to bottom.

    preflight   what can be known to be wrong is said before anything starts
    start       the cluster: queue, engines, rewards, learner, first weights
    watch       loops run by themselves; the driver only looks: gauges every second, new lines of metrics and events
    finish      drain the queue, export the weights, audit the books, write the report

The driver moves no data and takes no decision during a run: if it is slow, nothing else is.
"""

from __future__ import annotations

import json
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.cluster import Cluster, RoleDied
from launch.config import RunConfig
from launch.inventory import local_inventory
from launch.live import LiveView
from launch.observers import Observers
from launch.plan import make_plan
from launch.preflight import preflight
from launch.run_dir import RunDirectory
from launch.span_check import check_spans
from launch.topology import Placement
from rollout.errors import HeadraceError
from rollout.event_log import EventLog, Row

LOOK_EVERY_S = 1.0
DRAIN_S = 60.0


def run(config: RunConfig, run_dir: Path, resume: bool = False) -> int:
    """Train to the end; returns the exit code: 0 done, 1 a role died or the books do not balance, 130 Ctrl-C.

    `run_dir` is empty, or a run to resume (launch/opening.py sees to that). Raises ConfigError before anything heavy
    starts when the run cannot work.
    """
    plan = make_plan(config, local_inventory())
    ready = preflight(config)
    directory = RunDirectory(run_dir).prepared()
    directory.write_config(config.to_yaml())
    view = LiveView(config, directory.path)
    events = EventLog(directory.events_path)
    try:
        with ExitStack() as stack:
            observers = stack.enter_context(Observers(config.observe, directory))
            stack.enter_context(view)
            cluster = Cluster(config, plan.placements, directory, ready.context, resume, view.setup)
            watch = Watch(cluster, directory, view, observers)
            if resume:
                watch.skip(directory.events_path)
            stack.enter_context(cluster)
            signal.signal(signal.SIGTERM, _interrupt)  # after Ray, which would only print a trace
            events.append("run_starting", resumed=resume, placements=[_seat(p) for p in plan.placements])
            cluster.start()
            if resume:  # only now: the learner has cut the metrics back to its checkpoint
                view.resume(directory.metrics())
                watch.skip(directory.metrics_path)
            events.append("run_started", version=cluster.version, resumed_from=cluster.version if resume else None)
            cluster.begin()
            watch.until_trained()
            _drain_and_export(cluster, directory, view)
            watch.look()
        outcome = _audit(directory, config.staleness.bound)
    except KeyboardInterrupt:
        outcome = {"outcome": "stopped", "reason": "interrupted"}
    except HeadraceError as error:
        outcome = {"outcome": "failed", "reason": str(error)}
    events.append("run_finished", **outcome)
    _report(directory)
    view.finish(outcome)
    return {"finished": 0, "stopped": 130}.get(str(outcome["outcome"]), 1)


def _interrupt(*_: object) -> None:
    """SIGTERM ends a run as Ctrl-C does."""
    raise KeyboardInterrupt


def _seat(placement: Placement) -> dict[str, Any]:
    return {"role": placement.name, "cores": list(placement.cores), "gpus": list(placement.gpus)}


@dataclass
class Watch:
    """What the driver does while the loops run: look, show, and write `gauges.json`."""

    cluster: Cluster
    directory: RunDirectory
    view: LiveView
    observers: Observers
    _offsets: dict[Path, int] = field(default_factory=dict)

    def until_trained(self) -> None:
        """Returns when every learner rank has finished. Raises RoleDied when some role ends before."""
        while not self.cluster.poll(LOOK_EVERY_S):
            self.look()
        self.look()

    def look(self) -> None:
        gauges = self.cluster.gauges()
        now = {"time_s": time.time(), "queue": gauges.pop("queue", {}), "roles": gauges}
        self.directory.write_gauges(now)
        self.view.gauges(now)
        self.observers.gauges(now)
        for row in self._new_lines(self.directory.events_path):
            self.view.event(row)
        for row in self._new_lines(self.directory.metrics_path):
            self.view.step(row)
            self.observers.metrics(row)

    def skip(self, path: Path) -> None:
        """A resumed run shows only what is new."""
        self._offsets[path] = path.stat().st_size if path.exists() else 0

    def _new_lines(self, path: Path) -> list[Row]:
        """Whole lines that were appended since the last look."""
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._offsets[path] = self._offsets.get(path, 0) + whole
        return [json.loads(line) for line in data[:whole].splitlines() if line.strip()]


def _drain_and_export(cluster: Cluster, directory: RunDirectory, view: LiveView) -> None:
    """Everything after the last step; loops end by themselves once the queue drains."""
    view.setup("draining the queue")
    cluster.call("learner", "drain", "run_ended")
    late = cluster.await_loops(("rollout", "reward"), DRAIN_S)
    if late:
        raise RoleDied(f"{', '.join(late)} did not end within {DRAIN_S:.0f} s of draining; see logs/")
    view.setup("exporting the final weights")
    cluster.call("learner", "export", str(directory.path / "model"))


def _audit(directory: RunDirectory, bound: int) -> dict[str, Any]:
    """The books, by an auditor that shares no code with the ledger; every finding goes into audit.json."""
    from rollout.audit import audit

    found = audit(directory.journal, directory.trained_path)
    spans = check_spans(directory, bound)
    row = found.as_row() | {"spans": {"groups": spans.groups, "tokens": spans.tokens, "wrong": spans.wrong}}
    (directory.path / "audit.json").write_text(json.dumps(row, indent=1))
    balanced = found.clean and not found.in_flight and not spans.wrong
    return {
        "outcome": "finished" if balanced else "unbalanced",
        "issued": found.issued,
        "trained": found.trained,
        "dropped": found.dropped,
        "lost": len(found.lost),
        "duplicated": len(found.duplicated),
        "max_staleness": found.max_staleness,
    }


def _report(directory: RunDirectory) -> None:
    from launch.report import write

    write(directory.path)
