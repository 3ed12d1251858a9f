"""A process and all it has started, however well hidden: double forks, new sessions, new process groups.

The worker adopts orphans (Linux: child subreaper), so that /proc shows every descendant below it until it dies.
Elsewhere only the process group is known.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, parents first; empty where /proc does not exist."""
    found: list[int] = []
    frontier = [pid]
    while frontier:
        children = _children(frontier.pop())
        found += children
        frontier += children
    return found


def kill_family(pid: int) -> None:
    """SIGKILL `pid`, its process group if it leads one, and its descendants. Safe to call on oneself."""
    if pid != os.getpid():
        _send(pid, signal.SIGSTOP)  # it forks no more while we look
    for _ in range(2):  # descendants may have forked between the look and the kill
        for one in descendants(pid):
            _send(one, signal.SIGKILL)
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        _send(pid, signal.SIGKILL)


def born(pid: int) -> int | None:
    """When a process started, in ticks since the machine did: with its number the name of one process for ever.

    None where it is gone, or where /proc does not exist.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def family(pid: int) -> dict[int, int]:
    """`pid` and everything below it, each with when it was born."""
    found = {one: born(one) for one in (pid, *descendants(pid))}
    return {one: when for one, when in found.items() if when is not None}


def kill_if_born(pid: int, when: int) -> None:
    """SIGKILL this very process and its family; another one that has got its number since is left alone."""
    if born(pid) == when:
        kill_family(pid)


def _send(pid: int, what: signal.Signals) -> None:
    try:
        os.kill(pid, what)
    except ProcessLookupError:
        return


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except OSError:
        return found  # gone in the meantime, or no /proc
    return found
