"""What tests of the whole loop share: a `headrace run` as a user starts it, and its processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from launch.run_dir import RunDirectory

ROOT = Path(__file__).resolve().parent.parent
TOPOLOGY = ROOT / "launch" / "topologies" / "tiny_cpu.yaml"


class Run:
    """A `headrace run` in a process of its own, with everything it starts."""

    def __init__(self, folder: Path, model: Path, prompts: Path, *settings: str) -> None:
        self.directory = RunDirectory(folder / "run")
        self.arguments = [f"model.path={model}", f"prompts.path={prompts}", *settings]
        self.log = folder / "output.txt"

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        sets = [word for setting in self.arguments for word in ("--set", setting)]
        command = [sys.executable, "-m", "launch.cli", "run", str(TOPOLOGY), *sets, *flags]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*command, "--run-dir", str(self.directory.path)], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
            )

    def output(self) -> str:
        return self.log.read_text()

    def logs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.read_text()[-2000:]}" for p in self.directory.logs.glob("*.log"))


def tree(pid: int) -> list[psutil.Process]:
    """The process and all its descendants."""
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def wait_until(condition: Any, deadline_s: float, what: str) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {deadline_s} s for {what}"
        time.sleep(0.1)


def kill_whole(process: subprocess.Popen[bytes]) -> None:
    """`kill -9` of the run and of everything it started; returns when all of it is gone."""
    victims = tree(process.pid)
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGKILL)
    process.wait(30)
    wait_until(lambda: not any(v.is_running() and v.status() != psutil.STATUS_ZOMBIE for v in victims), 20, "the dead")
