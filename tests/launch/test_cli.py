"""Proves that the command starts fast and light, answers bad input with one line and exit code 2, and hands everything
else to the module that does it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from launch import cli
from rollout.errors import ConfigError, QueueError

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "launch/topologies/demo_cpu.yaml")
HEAVY = {"torch", "ray", "vllm", "deepspeed", "transformers", "matplotlib"}

PROBE = """
import sys
from launch.cli import main
code = main(sys.argv[1:])
print("HEAVY", sorted(set(sys.modules) & {heavy!r}), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize(
    "arguments",
    [["plan", DEMO], ["plan", DEMO, "--json"], ["explain", DEMO, "staleness.bound"], ["simulate", DEMO], ["doctor"]],
    ids=lambda a: a[0],
)
def test_light_commands_start_without_torch_ray_or_vllm(arguments: list[str]) -> None:
    code = PROBE.format(heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stderr.strip().endswith("HEAVY []"), done.stderr
    assert done.stdout.strip()


def test_plan_starts_in_under_two_seconds() -> None:
    """The best of three, so that a busy machine does not decide."""
    took = []
    for _ in range(3):
        started = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "launch.cli", "plan", DEMO], cwd=ROOT, capture_output=True, timeout=60, check=True
        )
        took.append(time.monotonic() - started)
    assert min(took) < 2.0


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "the following arguments are required: COMMAND; see headrace --help"),
        (("pln",), "'pln' is not known; did you mean plan?; see headrace --help"),
        (("plan",), "plan: the following arguments are required: T.yaml; see headrace plan --help"),
        (("plan", DEMO, "--jsn"), "plan: --jsn is not known; see headrace plan --help"),
        (("plan", "none.yaml"), "none.yaml: no such file"),
        (("plan", DEMO, "--set", "run.stepz=1"), "--set: run.stepz: 1: no such key; did you mean run.steps?"),
        (("plan", DEMO, "--inventory", "none.yaml"), "none.yaml: cannot be read as an inventory"),
        (("explain", DEMO, "run.stepz"), "explain run.stepz: no such key; did you mean run.steps?"),
        (("simulate", DEMO, "--from", "none"), "none: is no run directory"),
        (("status", "none"), "none: is no run directory"),
        (("why", "none"), "none: is no run directory"),
        (("report", "none"), "none: is no run directory"),
        (("run", DEMO, "--resume", "--run-dir", "none"), "none: is no run directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: str
) -> None:
    code, out, err = answer(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"headrace: {expected}") and err.count("\n") == 1


def test_plan_json_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answer(capsys, "plan", DEMO, "--json")
    assert code == 0 and {"placements", "derived", "warnings"} <= set(json.loads(out))


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)


def test_run_hands_over_config_and_directory_and_returns_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[Any] = []

    def run(config: Any, run_dir: Path, resume: bool) -> int:
        calls.append((config.run.steps, run_dir, resume))
        return 7

    fake_module(monkeypatch, "launch.run", run=run)
    assert cli.main(["run", DEMO, "--set", f"run.dir={tmp_path}", "--set", "run.steps=8"]) == 7
    assert calls == [(8, tmp_path / "sort3-001", False)]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("model.path: nowhere"), 2, "headrace: model.path: nowhere\n"),
        (QueueError("the queue\nis gone"), 1, "headrace: QueueError: the queue is gone\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_a_run_raises_becomes_an_exit_code_and_no_directory_is_left(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    error: BaseException,
    code: int,
    line: str,
) -> None:
    def run(config: Any, run_dir: Path, resume: bool) -> int:
        raise error

    fake_module(monkeypatch, "launch.run", run=run)
    assert answer(capsys, "run", DEMO, "--set", f"run.dir={tmp_path}") == (code, "", line)
    assert list(tmp_path.iterdir()) == []


def test_bench_and_soak_pass_everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    fake_module(monkeypatch, "benchmarks.some", main=lambda rest: seen.append(rest) or 3)
    monkeypatch.setattr(cli, "backends", lambda folder, prefix: ["some"])
    assert cli.main(["bench", "some", "--json", "f.json", "--help"]) == 3
    fake_module(monkeypatch, "launch.soak_some", main=lambda rest: seen.append(rest))
    assert cli.main(["soak", "some", "--seeds", "2"]) == 0
    assert seen == [["--json", "f.json", "--help"], ["--seeds", "2"]]
