"""Proves that a server at full speed keeps its memory and file descriptors flat (ten minutes of it in `make soak`)."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from rollout.ledger_states import LedgerSettings
from rollout.local_payloads import KEPT
from rollout.queue_client import Drained, QueueClient
from rollout.queue_server import QueueServer
from tests.rollout.queue_samples import GOOD, group

SHAPE = LedgerSettings(groups_per_step=16, group_size=2, bound=2, min_viable=1)


def serve(pipe: Connection, folder: str) -> None:
    with QueueServer(SHAPE, Path(folder) / "journal", durability="os", segment_bytes=1 << 20) as server:
        pipe.send(server.endpoint)
        pipe.recv()


def produce(endpoint: str) -> None:
    with QueueClient(endpoint, "producer") as queue:
        try:
            while True:
                leases = queue.lease(16, wait_s=10.0)
                queue.submit([group(x.ordinal, x.attempt, 1 << 40, lengths(x.ordinal)) for x in leases])
        except Drained:
            return


def score(endpoint: str) -> None:
    with QueueClient(endpoint, "scorer") as queue:
        try:
            while True:
                queue.score({g.ordinal: GOOD for g in queue.lease_scoring(16, wait_s=10.0)})
        except Drained:
            return


def lengths(ordinal: int) -> tuple[int, int]:
    """Every 32nd group is so large that the client writes what it hands in with it into the journal's folder itself."""
    return (8_000, 8_000) if ordinal % 32 == 0 else (64, 64)


def descriptors(pid: int | str) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def kilobytes(pid: int | str) -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024


SEEN = (kilobytes, descriptors)


@pytest.mark.parametrize("seconds", [8, pytest.param(600, marks=[pytest.mark.soak, pytest.mark.timeout(800)])])
def test_memory_and_descriptors_stay_flat(tmp_path: Path, seconds: int) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, str(tmp_path)), daemon=True)
    process.start()
    endpoint = here.recv()
    workers = [threading.Thread(target=work, args=(endpoint,)) for work in (produce, score)]
    for worker in workers:
        worker.start()
    samples: list[tuple[int, ...]] = []  # groups so far; kilobytes and descriptors of the server, and of the clients
    started, step = time.monotonic(), 0
    with QueueClient(endpoint, "learner") as learner:
        while time.monotonic() - started < seconds:
            learner.take(step, wait_s=20.0)
            step += 1
            learner.trained(step - 1, step)
            learner.release(step)
            if step % 8 == 0:
                learner.commit(step - 1)
                samples.append((step * 16, *(int(see(pid)) for pid in (process.pid, "self") for see in SEEN)))
        learner.drain("enough")
        for worker in workers:
            worker.join(30.0)
        assert learner.stats()["conserved"]
    here.send("close")
    process.join(20.0)
    warm = samples[len(samples) // 3 :]
    (groups, *before), (end, *after) = warm[0], warm[-1]
    grown = [(after[i] - before[i]) / ((end - groups) / 1000) for i in (0, 2)]
    print(
        f"{end:,} groups in {seconds} s; server {after[0]:,} KB, {grown[0]:+.1f} KB per 1,000 groups, "
        f"{after[1]} descriptors; clients {after[2]:,} KB, {grown[1]:+.1f} KB, {after[3]} descriptors"
    )
    assert len(warm) >= 5
    assert max(grown) < (50 if seconds > 60 else 400), samples[:: max(1, len(samples) // 20)]
    third = len(warm) // 3
    for i, more in ((2, 2), (4, 2 if seconds > 60 else 2 * KEPT)):  # scorer and learner each map a few files
        assert max(s[i] for s in warm[-third:]) <= max(s[i] for s in warm[:third]) + more
