"""Reward functions as users write them on bad days; tests/actors/test_rewards.py runs each in a real worker process.

Loaded by path, in the worker, never by the test itself. `answer` decides what happens, so that good and bad mix.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

HOARD: list[bytearray] = []


def length_of(prompt: str, answer: str, meta: dict, factor: float = 1.0) -> float:
    """The well-behaved one."""
    return factor * len(answer)


def on_demand(prompt: str, answer: str, meta: dict) -> object:
    """The answer "good" is worth 1; any other answer names a way of going wrong."""
    return {"good": lambda: 1.0, **WAYS}[answer]()


def _raise() -> float:
    raise ZeroDivisionError("on purpose")


def _raise_unprintable() -> float:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    raise Unprintable


def _hang_in_c() -> float:
    import re

    re.match(r"(a+)+$", "a" * 64 + "b")  # exponential, and never lets another thread run
    return 1.0


def _hang_deaf() -> float:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1)


def _fork_and_return() -> float:
    """Parent and child both return to the worker's loop."""
    return 1.0 if os.fork() else 0.0


def _fork_and_raise() -> float:
    if os.fork() == 0:
        raise ValueError("in the child")
    return 1.0


def _leave_daemon() -> float:
    """A child that left the process group and the session, holding every pipe, and notes its pid for the test."""
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        with open(os.environ["MISBEHAVING_PID_FILE"], "a") as f:
            print(os.getpid(), file=f, flush=True)
        time.sleep(600)
    while not os.path.exists(os.environ["MISBEHAVING_PID_FILE"]):
        time.sleep(0.01)
    return 1.0


def _die_with_daemon() -> float:
    """The worker dies while a child keeps its end of the pipe open."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
    if os.fork() == 0:
        time.sleep(600)
    os._exit(3)


def _fork_many() -> float:
    for _ in range(40):
        if os.fork() == 0:
            time.sleep(600)
    return 1.0


def _leak() -> float:
    HOARD.append(bytearray(40 << 20))
    return 1.0


def _allocate_too_much() -> float:
    return float(len(bytearray(8 << 30)))


def _scribble() -> float:
    for fd in range(3, 32):
        try:
            os.write(fd, b"not json\n")
        except OSError:
            continue
    return 1.0


def _close_everything() -> float:
    os.closerange(0, 64)
    return 1.0


def _print() -> float:
    print('{"id": 1, "value": 99}')
    os.write(1, b'{"id": 1, "value": 99}\n')
    sys.stdin.readline()
    return 1.0


def _leave_thread() -> float:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return 1.0


def _interrupted() -> None:
    signal.raise_signal(signal.SIGINT)
    time.sleep(1)  # Python calls its handler at the latest in here


class _Strange:
    """Claims to be a scalar array and is none."""

    shape = ()

    def item(self) -> object:
        raise OverflowError("no number here")


WAYS = {
    "raise": _raise,
    "raise_unprintable": _raise_unprintable,
    "hang": lambda: time.sleep(600),
    "hang_in_c": _hang_in_c,
    "hang_deaf": _hang_deaf,
    "fork": _fork_and_return,
    "fork_raise": _fork_and_raise,
    "daemon": _leave_daemon,
    "die_with_daemon": _die_with_daemon,
    "fork_many": _fork_many,
    "leak": _leak,
    "too_much": _allocate_too_much,
    "scribble": _scribble,
    "close_everything": _close_everything,
    "print": _print,
    "thread": _leave_thread,
    "nan": lambda: float("nan"),
    "inf": lambda: float("-inf"),
    "none": lambda: None,
    "string": lambda: "1.0",
    "list": lambda: [1.0],
    "complex": lambda: 1j,
    "huge": lambda: 10**400,
    "strange": _Strange,
    "true": lambda: True,
    "exit": lambda: sys.exit(4),
    "die": lambda: os._exit(5),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "interrupt": _interrupted,
}
