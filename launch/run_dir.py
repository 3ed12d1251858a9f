"""The run directory: where everything a run leaves behind stands, and how it is written and read back.

    <run dir>/
      config.yaml       the resolved topology             written once, at start
      metrics.jsonl     one line per optimizer step       MetricsLog (the driver)
      events.jsonl      starts, deaths, drops, commits    EventLog (any process of the run)
      trained.jsonl     what each step consumed           the learner itself; read by the audit
      gauges.json       what every role is doing now      the driver, every second or two, replaced atomically
      evaluations/      the held-out answers of each evaluated version, one file each
      journal/ checkpoints/ logs/ keys/                   the queue, the learner, every role
      report.html curves.png                              `headrace report`

Logs are written and read by `rollout.event_log`: whole lines, torn ones skipped.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError
from rollout.event_log import EventLog, MetricsLog, Row, plain, read_lines, replace_file

__all__ = ["EventLog", "MetricsLog", "Row", "RunDirectory", "read_lines"]


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Names of everything in a run directory. `RunDirectory.create(Path("runs"), "sort3")` -> runs/sort3-001."""

    path: Path

    @classmethod
    def create(cls, parent: Path, name: str) -> RunDirectory:
        """Make `<parent>/<name>-NNN` with the next free number; two runs started at once get two numbers."""
        parent.mkdir(parents=True, exist_ok=True)
        taken = [int(p.name[len(name) + 1 :]) for p in parent.glob(f"{name}-*") if p.name[len(name) + 1 :].isdigit()]
        number = max(taken, default=0) + 1
        while True:
            try:
                (parent / f"{name}-{number:03d}").mkdir()
                break
            except FileExistsError:
                number += 1
        return cls(parent / f"{name}-{number:03d}")

    def forget_if_empty(self) -> None:
        """Take back a directory that was made for a run which was refused before it began."""
        with contextlib.suppress(OSError):
            self.path.rmdir()

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """An existing run. Raises ConfigError where there is none, naming runs that are near."""
        run = cls(Path(path))
        if not run.config_path.is_file():
            parent = run.path.parent if run.path.parent.is_dir() else Path()
            near = sorted(p.parent.name for p in parent.glob("*/config.yaml"))[-4:]
            hint = f"; {parent} has {', '.join(near)}" if near else "; start one with `headrace run T.yaml`"
            raise ConfigError(f"{run.path}: is no run directory (no config.yaml){hint}")
        return run

    @classmethod
    def latest(cls, parent: Path, name: str) -> RunDirectory | None:
        """The run of that name with the highest number, for `--resume` without `--run-dir`."""
        runs = [
            p for p in parent.glob(f"{name}-*") if p.name[len(name) + 1 :].isdigit() and (p / "config.yaml").is_file()
        ]
        return cls(max(runs, key=lambda p: int(p.name[len(name) + 1 :]))) if runs else None

    def prepared(self) -> RunDirectory:
        """Make the folders; harmless where they exist."""
        for folder in (self.path, self.journal, self.checkpoints, self.evaluations, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        return self

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def trained_path(self) -> Path:
        return self.path / "trained.jsonl"

    @property
    def gauges_path(self) -> Path:
        return self.path / "gauges.json"

    @property
    def prometheus_path(self) -> Path:
        return self.path / "prometheus.json"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def report_path(self) -> Path:
        return self.path / "report.html"

    @property
    def curves_path(self) -> Path:
        return self.path / "curves.png"

    def write_config(self, text: str) -> None:
        """config.yaml, whole or not at all."""
        replace_file(self.config_path, text)

    def write_gauges(self, gauges: Mapping[str, Any]) -> None:
        """{"time_s": 1764475000.0, "roles": {"rollout-0": {...}}, "queue": {...}}; readers never see half of it."""
        replace_file(self.gauges_path, json.dumps(plain(gauges), allow_nan=False))

    def read_gauges(self) -> Row:
        """The last gauges; {} before the first."""
        try:
            value = json.loads(self.gauges_path.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return value if isinstance(value, dict) else {}

    def metrics(self) -> list[Row]:
        """One row per step in order; where a step was made again after a resume, the later row counts."""
        rows = {row["step"]: row for row in read_lines(self.metrics_path) if isinstance(row.get("step"), int)}
        return [rows[step] for step in sorted(rows)]

    def events(self) -> list[Row]:
        return [row for row in read_lines(self.events_path) if isinstance(row.get("event"), str)]
