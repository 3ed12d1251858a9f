"""Proves the two rules of the layout: imports only point down, and each heavy dependency has one door.

Also that the light parts stay light: planning a run and the queue client import neither torch nor Ray nor vLLM.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import gc
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# folder -> the folders it may know, itself left out
MAY_KNOW = {
    "rollout": set(),
    "learner": {"rollout"},
    "actors": {"rollout", "learner"},
    "launch": {"rollout", "learner", "actors", "benchmarks"},  # benchmarks: only the CLI, by name
    "benchmarks": {"rollout", "learner", "actors", "launch"},
}
DOORS = {
    "msgpack": ["rollout/wire*.py"],
    "zmq": ["rollout/queue_*.py", "benchmarks/*.py"],
    "vllm": ["rollout/vllm_*.py", "benchmarks/*.py"],
    "deepspeed": ["learner/zero.py"],
    "ray": ["actors/*_actor.py", "launch/cluster.py", "benchmarks/*.py"],
    "prometheus_client": ["rollout/metrics.py"],
}


@functools.cache
def imports(path: Path) -> list[str]:
    """Every module named by an import statement of the file, wherever it stands."""
    gc.disable()  # CPython 3.11 miscounts its recursion when a collection runs Python code inside ast.parse
    tree = ast.parse(path.read_text())
    gc.enable()
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
    return found


def sources() -> list[Path]:
    files = [p for folder in MAY_KNOW for p in (ROOT / folder).rglob("*.py")]
    assert len(files) > 30, "the walk found too few files to prove anything"
    return files


def test_imports_only_point_down() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources()
        for module in imports(path)
        for folder in [path.relative_to(ROOT).parts[0]]
        if (top := module.split(".")[0]) in MAY_KNOW and top != folder and top not in MAY_KNOW[folder]
    ]
    assert not wrong


def test_only_the_cli_reaches_for_benchmarks() -> None:
    users = {str(p.relative_to(ROOT)) for p in sources() if any(m.split(".")[0] == "benchmarks" for m in imports(p))}
    assert {u for u in users if not u.startswith("benchmarks/")} <= {"launch/cli.py"}


@pytest.mark.parametrize("package", sorted(DOORS))
def test_each_heavy_dependency_has_one_door(package: str) -> None:
    users = {str(p.relative_to(ROOT)) for p in sources() if any(m.split(".")[0] == package for m in imports(p))}
    strays = {user for user in users if not any(fnmatch.fnmatch(user, door) for door in DOORS[package])}
    assert users, f"nobody imports {package}: the rule would prove nothing"
    assert not strays


@pytest.mark.parametrize(
    "module",
    ["launch.config", "launch.plan", "rollout.queue_client", "rollout.wire", "actors.config", "learner.presets"],
)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    probe = f"import sys, {module}; print(*[m for m in ('torch', 'ray', 'vllm', 'deepspeed') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_the_walk_sees_an_import_inside_a_function(tmp_path: Path) -> None:
    """A rule that cannot be broken proves nothing: this is what a breach looks like to it."""
    file = tmp_path / "x.py"
    file.write_text("def f():\n    import ray.util\n    from launch.cli import main\n")
    assert imports(file) == ["ray.util", "launch.cli"]
