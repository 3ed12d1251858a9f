"""Configs and run directories made up for the tests of this folder; nothing here starts a process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.config import RunConfig, from_data
from launch.run_dir import MetricsLog, RunDirectory

ROOT = Path(__file__).parents[2]
MakeConfig = Callable[..., RunConfig]
MakeRun = Callable[..., RunDirectory]


def smallest() -> dict[str, Any]:
    """The least that a topology must say."""
    return {
        "model": {"path": "models/m"},
        "prompts": {"path": "data/p.jsonl", "held_out": 8},
        "rewards": [{"name": "exact"}],
    }


@pytest.fixture
def make_config() -> MakeConfig:
    """make_config({"staleness": {"bound": 1}}): the smallest topology with sections merged over it."""

    def make(over: dict[str, Any] | None = None) -> RunConfig:
        data = smallest()
        for section, values in (over or {}).items():
            data[section] = {**data.get(section, {}), **values} if isinstance(values, dict) else values
        return from_data(data)

    return make


def row(version: int, **values: float) -> dict[str, Any]:
    """One line of metrics.jsonl of a run that learns steadily."""
    return {
        "step": version,
        "version": version,
        "time_s": 1000.0 + 7.0 * version,
        "reward/mean": 0.1 * version,
        "staleness/mean": 1.5,
        "staleness/max": 2.0,
        "idle/learner": 0.05,
        "idle/rollout": 0.4,
        "time/wait": 0.4,
        "time/train": 6.0 + 0.1 * (version % 3),
        "time/weight_sync": 0.5,
        "throughput/rollout_tokens_per_s": 300.0,
        "throughput/learner_tokens_per_s": 90.0,
        "groups/trained": 8,
        **values,
    }


@pytest.fixture
def make_run(tmp_path: Path, make_config: MakeConfig) -> MakeRun:
    """make_run(steps=4, events=[...]): a run directory with that many metrics lines, these events, these gauges."""

    def make(
        steps: int = 4,
        events: list[dict[str, Any]] | None = None,
        gauges: dict[str, Any] | None = None,
        over: dict[str, Any] | None = None,
    ) -> RunDirectory:
        run = RunDirectory(tmp_path / "run-001").prepared()
        run.write_config(make_config({"run": {"steps": 8}, **(over or {})}).to_yaml())
        metrics = MetricsLog(run.metrics_path)
        for version in range(1, steps + 1):
            metrics.append(row(version))
        metrics.close()
        told = [{"time": 1000.0, "event": "run_started", "version": 0}, *(events or [])]
        run.events_path.write_text("".join(json.dumps(e) + "\n" for e in told))
        if gauges is not None:
            run.write_gauges(gauges)
        return run

    return make
