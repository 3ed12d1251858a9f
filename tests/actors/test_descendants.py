"""Proves that a process is killed with all it has started, also where its own end goes unnoticed by them, and that one
which merely has the same number is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from actors.rewards.descendants import born, descendants, family, kill_if_born


@pytest.fixture
def parent():
    """A process with a child in a session of its own."""
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
    child += "start_new_session=True); print('ready', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.wait()


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)


def test_a_family_is_killed_with_its_head(parent) -> None:
    kin = family(parent.pid)
    assert next(iter(kin)) == parent.pid and len(kin) == 2
    kill_if_born(parent.pid, kin[parent.pid])
    wait_until_gone(list(kin))


def test_a_family_that_lost_its_head_is_killed_as_it_was_written_down(parent) -> None:
    kin = family(parent.pid)
    parent.kill()
    parent.wait()
    (orphan,) = [pid for pid in kin if pid != parent.pid]
    assert not gone(orphan) and not descendants(parent.pid)
    for pid, when in kin.items():
        kill_if_born(pid, when)
    wait_until_gone(list(kin))


def test_another_process_under_an_old_number_is_left_alone(parent) -> None:
    kill_if_born(parent.pid, born(parent.pid) - 1)
    time.sleep(0.1)
    assert parent.poll() is None and born(os.getpid()) is not None
    assert born(2**22 + 1) is None
