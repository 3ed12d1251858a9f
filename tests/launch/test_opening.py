"""Proves which directory a run uses, that a refused run leaves nothing behind, and that resuming cannot change what is
learnt from what."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.opening import open_run
from launch.run_dir import RunDirectory
from rollout.errors import ConfigError


@pytest.fixture
def topology(tmp_path: Path) -> str:
    path = tmp_path / "t.yaml"
    path.write_text(
        f"run: {{name: demo, dir: {tmp_path}/runs, steps: 4}}\n"
        "model: {path: m}\nprompts: {path: p.jsonl, held_out: 8}\nrewards: [{name: exact}]\n"
    )
    return str(path)


def begun(topology: str, run_dir: str | None = None) -> RunDirectory:
    config, directory = open_run(topology, [], run_dir, resume=False)
    directory.prepared().write_config(config.to_yaml())
    return directory


def test_a_new_run_gets_the_next_number(topology: str) -> None:
    assert [begun(topology).path.name for _ in range(2)] == ["demo-001", "demo-002"]


def test_a_directory_that_was_asked_for_is_used_and_not_made(topology: str, tmp_path: Path) -> None:
    _, directory = open_run(topology, [], str(tmp_path / "here"), resume=False)
    assert directory.path == tmp_path / "here" and not directory.path.exists()


def test_resume_takes_the_newest_or_the_named_or_the_given_directory(topology: str, tmp_path: Path) -> None:
    first, second = begun(topology), begun(topology)
    assert open_run(topology, [], None, resume=True)[1] == second
    assert open_run(topology, [], str(first.path), resume=True)[1] == first
    config, directory = open_run(str(first.path), ["run.steps=9"], None, resume=True)
    assert directory == first and config.run.steps == 9


@pytest.mark.parametrize(
    "override",
    ["algorithm.learning_rate=0.1", "prompts.held_out=9", "sampling.group_size=4", "run.seed=3", "model.path=x"],
)
def test_a_resumed_run_refuses_what_would_make_it_another_run(topology: str, override: str) -> None:
    begun(topology)
    key = override.partition("=")[0]
    with pytest.raises(
        ConfigError, match=rf"^--resume: {key} is .*, but .* was begun with .*; keep it, or start a new run$"
    ):
        open_run(topology, [override], None, resume=True)


@pytest.mark.parametrize("override", ["run.steps=8", "topology.rollout.replicas=2", "observe.tensorboard=true"])
def test_a_resumed_run_may_change_when_and_where(topology: str, override: str) -> None:
    begun(topology)
    open_run(topology, [override], None, resume=True)


def test_directories_that_cannot_be_meant_are_refused_and_untouched(topology: str, tmp_path: Path) -> None:
    run = begun(topology)
    (tmp_path / "files").mkdir()
    (tmp_path / "files/precious").write_text("x")
    cases = [
        ((topology, [], str(run.path), False), "holds a run already; add --resume"),
        ((topology, [], str(tmp_path / "files"), False), "holds other files"),
        ((topology, [], str(tmp_path / "files"), True), "is no run directory"),
        ((str(run.path), [], None, False), "is a run directory; add --resume"),
        ((str(run.path), [], str(tmp_path / "x"), True), "is a run directory already"),
        ((topology, ["run.name=other"], None, True), "has no run named other"),
    ]
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    for arguments, expected in cases:
        with pytest.raises(ConfigError, match=expected):
            open_run(*arguments)
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before
