"""The owner's end of a worker process: start it, ask it, and when it does not answer in time, kill it and its kin.

    process = RewardProcess(spec, log=a_file_descriptor)
    process.start()                                   None, or Failed("unloadable" | "raised" | ..., why)
    process.ask("2+2=", "4", {"answer": "4"})         1.0 | Failed(kind, detail) | TimedOut(5.0)
    process.close()

Every call returns within its deadline plus the time a SIGKILL takes. After a death or a retirement the next `ask`
starts a fresh process. One thread at a time; the Scorer sees to it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from actors.config import RewardConfig
from actors.rewards.descendants import kill_family
from rollout.types import Failed, TimedOut

START_DEADLINE_S = 120.0  # imports of a reward may be heavy (torch, sympy) and the machine busy
GLANCE_S = 0.05  # how soon the death of a process is seen whose children keep its pipe open
PACKAGE_ROOT = Path(__file__).resolve().parents[2]

Outcome = float | Failed | TimedOut


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What the worker is told first: WorkerSpec("verifier", "exact", None, {}, 5.0, 2048)."""

    kind: str
    name: str | None
    path: str | None
    args: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float = 5.0
    memory_mb: int = 2048

    @classmethod
    def of(cls, config: RewardConfig) -> WorkerSpec:
        return cls(config.kind, config.name, config.path, config.args, config.deadline_s, config.memory_mb)


class _Silent(Exception):
    """The process did not answer: `died` tells a death from a passed deadline."""

    def __init__(self, died: bool) -> None:
        super().__init__(died)
        self.died = died


class RewardProcess:
    """One killable process that computes one component."""

    def __init__(self, spec: WorkerSpec, log: int = subprocess.DEVNULL) -> None:
        self.spec, self.log = spec, log
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""
        self._jobs = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> Failed | None:
        """Start and load the component unless it runs already; None when it is ready."""
        if self._process is not None:
            return None
        self._spawn()
        try:
            reply = self._exchange(asdict(self.spec), START_DEADLINE_S)
        except _Silent as silent:
            how = self._kill()
            if silent.died:
                return Failed("crashed", f"the reward's process died while loading ({how})")
            return Failed("start_timed_out", f"not loaded after {START_DEADLINE_S:.0f} s")
        if reply.get("ready") is True:
            return None
        self._kill()
        return Failed(reply["failed"], reply["detail"])

    def ask(self, prompt: str, answer: str, meta: Mapping[str, Any]) -> Outcome:
        """The component's value for one answer."""
        refused = self.start()
        if refused is not None:
            return refused
        self._jobs += 1
        job = {"id": self._jobs, "prompt": prompt, "answer": answer, "meta": meta}
        try:
            reply = self._exchange(job, self.spec.deadline_s)
        except _Silent as silent:
            how = self._kill()
            if silent.died:
                return Failed("crashed", f"the reward's process died ({how})")
            return TimedOut(self.spec.deadline_s)
        if "retire" in reply:
            self._kill()
        return Failed(reply["failed"], reply["detail"]) if "failed" in reply else float(reply["value"])

    def interrupt(self) -> None:
        """From another thread: make the `ask` in flight, if any, return a failure now."""
        process = self._process
        if process is not None and process.poll() is None:
            kill_family(process.pid)

    def close(self) -> None:
        """Kill the process and all it has started. Idempotent."""
        self._kill()

    # ---- the process ------------------------------------------------------------------------------------------

    def _spawn(self) -> None:
        paths = [str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "actors.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            bufsize=0,
            start_new_session=True,  # a group of its own to kill, and no Ctrl-C from the terminal
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._received = b""
        self.starts += 1

    def _kill(self) -> str:
        """Kill and reap; says how the process ended."""
        process, self._process = self._process, None
        if process is None:
            return "not running"
        ended = process.poll()
        kill_family(process.pid)
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        if ended is None:
            return "killed"
        return f"exit code {code}" if code >= 0 else f"signal {-code}"

    # ---- one question, one answer -----------------------------------------------------------------------------

    def _exchange(self, message: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        until = time.monotonic() + deadline_s
        self._send(json.dumps(message, default=str).encode() + b"\n", until)
        while True:
            line = self._line(until)
            try:
                reply: dict[str, Any] = json.loads(line)
            except ValueError:  # the reward scribbled on our pipe: nothing that comes from there can be trusted now
                raise _Silent(died=True) from None
            if reply.get("id") == message.get("id"):
                return reply

    def _send(self, data: bytes, until: float) -> None:
        assert self._process is not None and self._process.stdin is not None
        fd = self._process.stdin.fileno()
        while data:
            self._wait(fd, select.POLLOUT, until)
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise _Silent(died=True) from None

    def _line(self, until: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._received:
            self._wait(fd, select.POLLIN, until)
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                self._await_exit()
                raise _Silent(died=True)
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _wait(self, fd: int, event: int, until: float) -> None:
        """Until the pipe is ready. Raises _Silent when the process is dead or the time is up."""
        assert self._process is not None
        poller = select.poll()
        poller.register(fd, event)
        while True:
            left = until - time.monotonic()
            if poller.poll(max(0.0, min(left, GLANCE_S)) * 1000):
                return
            if self._process.poll() is not None:
                raise _Silent(died=True)
            if left <= 0:
                raise _Silent(died=False)

    def _await_exit(self) -> None:
        """The pipe is closed: give the process a moment to end by itself, so that its exit code can be told."""
        assert self._process is not None
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return
