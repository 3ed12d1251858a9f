"""`headrace run`: one driver from a topology to a report. Startup, main loop, shutdown, read from top to bottom.

    preflight   what can be known to be wrong is said before anything starts
    start       the cluster: queue, engines, rewards, learner, first weights
    watch       loops run by themselves; the driver only looks: gauges every second, new lines of metrics and events
    finish      drain the queue, export the weights, audit the books, write the report

The driver moves no data and takes no decision during a run: if it is slow, nothing else is.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.cluster import Cluster, RoleDied
from launch.config import RunConfig
from launch.inventory import local_inventory
from launch.live import LiveView
from launch.plan import make_plan
from launch.preflight import preflight
from launch.run_dir import RunDirectory
from rollout.audit import AuditReport, audit
from rollout.errors import ConfigError, HeadraceError
from rollout.event_log import EventLog, Row

LOOK_EVERY_S = 1.0
DRAIN_S = 60.0


def run(config: RunConfig, run_dir: Path, resume: bool = False) -> int:
    """Train to the end; returns the exit code (0 done, 1 a role died or the books do not balance, 130 Ctrl-C)."""
    plan = make_plan(config, local_inventory())
    ready = preflight(config)
    directory = _open(config, run_dir, resume)
    view = LiveView(config, directory)
    events = EventLog(directory.events_path)
    cluster = Cluster(config, plan.placements, directory, ready.context, resume, view.setup)
    watch = Watch(cluster, directory, view)
    try:
        with cluster:
            events.append("run_starting", resume=resume, placements=[_seat(p) for p in plan.placements])
            cluster.start()
            events.append("run_started", resumed=resume)
            cluster.begin()
            watch.until_trained()
            outcome = _finish(cluster, directory, view)
        watch.look()
    except KeyboardInterrupt:
        events.append("run_finished", outcome="interrupted")
        view.stop(
            f"interrupted; continue with: headrace run {directory.config_path} --run-dir {directory.path} --resume"
        )
        return 130
    except HeadraceError as error:
        events.append("run_finished", outcome="failed", reason=str(error))
        view.stop(f"{error}\ncontinue with: headrace run {directory.config_path} --run-dir {directory.path} --resume")
        return 1
    events.append("run_finished", outcome="balanced" if outcome.balanced else "unbalanced")
    _report(directory, view, outcome)
    return 0 if outcome.balanced else 1


def _open(config: RunConfig, run_dir: Path, resume: bool) -> RunDirectory:
    directory = RunDirectory(run_dir)
    used = (run_dir / "journal").is_dir() and any((run_dir / "journal").iterdir())
    if used and not resume:
        raise ConfigError(f"--run-dir: {run_dir} holds a run already; add --resume to continue it, or name another")
    if resume and not used:
        raise ConfigError(f"--resume: {run_dir} holds no run to continue; leave --resume out, or name its --run-dir")
    directory.prepared()
    directory.write_config(config.to_yaml())
    return directory


def _seat(placement: Any) -> dict[str, Any]:
    return {"role": placement.name, "cores": list(placement.cores), "gpus": list(placement.gpus)}


@dataclass
class Watch:
    """What the driver does while the loops run: look, show, and write `gauges.json`."""

    cluster: Cluster
    directory: RunDirectory
    view: LiveView
    _offsets: dict[Path, int] = field(default_factory=dict)

    def until_trained(self) -> None:
        """Returns when every learner rank has finished. Raises RoleDied when some role ends before."""
        while not self.cluster.poll(LOOK_EVERY_S):
            self.look()
        self.look()

    def look(self) -> None:
        if self.cluster.roles:
            gauges = self.cluster.gauges()
            queue = gauges.pop("queue", {})
            self.directory.write_gauges({"time_s": time.time(), "roles": gauges, "queue": queue})
            self.view.gauges({"roles": gauges, "queue": queue})
        for row in self._new_lines(self.directory.events_path):
            self.view.event(row)
        for row in self._new_lines(self.directory.metrics_path):
            self.view.step(row)

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


def _finish(cluster: Cluster, directory: RunDirectory, view: LiveView) -> AuditReport:
    """Everything after the last step. The engines are alive until the weights they serve have been exported."""
    view.setup("draining the queue")
    cluster.call("learner", "drain", "run_ended")
    late = cluster.await_loops(("rollout", "reward"), DRAIN_S)
    if late:
        raise RoleDied(f"{', '.join(late)} did not end within {DRAIN_S:.0f} s of draining; see logs/")
    view.setup("exporting the final weights")
    cluster.call("learner", "export", str(directory.path / "model"))
    cluster.call("queue", "close")
    return audit(directory.journal, directory.trained_path)


def _report(directory: RunDirectory, view: LiveView, outcome: AuditReport) -> None:
    from launch.report import write

    (directory.path / "audit.json").write_text(json.dumps(outcome.to_dict(), indent=1))
    write(directory.path)
    view.finish(outcome.to_dict())
