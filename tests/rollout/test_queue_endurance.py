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
                queue.submit([group(x.ordinal, x.attempt, version=1 << 40, lengths=(64, 64)) for x in leases])
        except Drained:
            return


def score(endpoint: str) -> None:
    with QueueClient(endpoint, "scorer") as queue:
        try:
            while True:
                queue.score({g.ordinal: GOOD for g in queue.lease_scoring(16, wait_s=10.0)})
        except Drained:
            return


def kilobytes(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024


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
    samples: list[tuple[int, float, int]] = []  # groups so far, kilobytes, descriptors
    started, step = time.monotonic(), 0
    with QueueClient(endpoint, "learner") as learner:
        while time.monotonic() - started < seconds:
            learner.take(step, wait_s=20.0)
            step += 1
            learner.trained(step - 1, step)
            learner.release(step)
            if step % 8 == 0:
                learner.commit(step - 1)
                fds = len(os.listdir(f"/proc/{process.pid}/fd"))
                samples.append((step * 16, kilobytes(process.pid or 0), fds))
        learner.drain("enough")
        for worker in workers:
            worker.join(30.0)
        assert learner.stats()["conserved"]
    here.send("close")
    process.join(20.0)
    warm = samples[len(samples) // 3 :]
    grown = (warm[-1][1] - warm[0][1]) / ((warm[-1][0] - warm[0][0]) / 1000)
    print(f"{warm[-1][0]:,} groups, {warm[-1][1]:,.0f} KB, {grown:+.1f} KB per 1,000 groups, {warm[-1][2]} descriptors")
    assert len(warm) >= 5
    assert grown < (50 if seconds > 60 else 400), samples[:: max(1, len(samples) // 20)]
    assert warm[-1][2] <= warm[0][2] + 2
