"""Proves that run directories are named without collisions, found again, and read the same before, during and after."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from launch.run_dir import MetricsLog, RunDirectory
from rollout.errors import ConfigError


def test_runs_started_at_once_get_directories_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: RunDirectory.create(tmp_path, "demo").path.name, range(24)))
    assert sorted(runs) == [f"demo-{n:03d}" for n in range(1, 25)]


def test_numbers_go_on_after_the_highest_and_names_do_not_mix(tmp_path: Path) -> None:
    for name in ("demo-007", "demo-2-001", "demo-x"):
        (tmp_path / name).mkdir()
    assert RunDirectory.create(tmp_path, "demo").path.name == "demo-008"


def test_the_latest_is_the_highest_number_that_holds_a_run(tmp_path: Path) -> None:
    assert RunDirectory.latest(tmp_path, "demo") is None
    for n in (9, 10, 11):
        run = RunDirectory(tmp_path / f"demo-{n:03d}")
        run.path.mkdir()
        if n < 11:
            run.write_config("run: {}\n")
    latest = RunDirectory.latest(tmp_path, "demo")
    assert latest is not None and latest.path.name == "demo-010"


def test_opening_what_is_no_run_names_runs_that_are_near(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "demo")
    run.write_config("run: {}\n")
    assert RunDirectory.open(run.path) == run
    with pytest.raises(ConfigError, match=r"is no run directory \(no config\.yaml\); .* has demo-001"):
        RunDirectory.open(tmp_path / "dem")


def test_a_step_that_was_made_again_counts_once_with_its_later_line(make_run: Any) -> None:
    run = make_run(steps=3)
    metrics = MetricsLog(run.metrics_path)
    metrics.append({"step": 2, "version": 2, "again": True})
    metrics.close()
    rows = run.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[1]["again"]


def test_gauges_are_whole_or_absent(make_run: Any) -> None:
    run = make_run()
    assert run.read_gauges() == {}
    run.write_gauges({"time_s": 1.0, "roles": {"learner-0": {"loss": float("nan")}}})
    assert run.read_gauges() == {"time_s": 1.0, "roles": {"learner-0": {"loss": None}}}
    run.gauges_path.write_text('{"time_s": 1')
    assert run.read_gauges() == {}
    run.gauges_path.write_text(json.dumps([1]))
    assert run.read_gauges() == {}


def test_only_an_empty_directory_is_taken_back(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "demo")
    run.write_config("run: {}\n")
    run.forget_if_empty()
    assert run.path.exists()
    run.config_path.unlink()
    run.forget_if_empty()
    assert not run.path.exists()
