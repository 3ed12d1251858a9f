"""Proves that runs on one host never meet: three at once, started alike, each with its own server and clients."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from rollout.audit import audit
from rollout.queue_client import QueueClient
from rollout.queue_server import QueueServer
from rollout.trained_log import TrainedLog
from tests.rollout.queue_samples import GOOD, group, settings

STEPS = 20


def run(folder: Path, durability: str, go: Connection) -> None:
    """All roles of a run, in a process of its own. The first tokens of a group tell whose it is."""
    mine = int(folder.name) * 1000
    made = QueueServer(settings(max_steps=STEPS), folder / "journal", durability=durability)  # type: ignore[arg-type]
    with made as server, QueueClient(server.endpoint, "rollout-0") as client:
        go.send(server.endpoint)
        go.recv()
        log = TrainedLog(folder / "trained.jsonl")
        for step in range(STEPS):
            leases = client.lease(2, wait_s=30.0)
            client.submit([group(x.ordinal, x.attempt, step, (mine + 1, 30_000)) for x in leases])
            scored = client.lease_scoring(2, wait_s=30.0)
            client.score({g.ordinal: GOOD for g in scored})
            taken = client.take(step, wait_s=30.0)
            assert [len(g.trajectories[0].token_ids) for g in (*scored, *taken)] == [mine + 1] * 4
            log.trained(step, step + 1, taken)
            client.trained(step, step + 1, live=True)
            client.commit(step)
        assert client.stats()["counts"]["committed"] == 2 * STEPS
    go.send("done")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("durability", ["memory", "fsync"])
def test_three_at_once(tmp_path: Path, durability: str) -> None:
    context = multiprocessing.get_context("spawn")
    runs = []
    for name in "123":
        here, there = context.Pipe()
        (tmp_path / name).mkdir()
        process = context.Process(target=run, args=(tmp_path / name, durability, there), daemon=True)
        process.start()
        runs.append((process, here))
    assert len({here.recv() for _, here in runs}) == 3
    for _, here in runs:
        here.send("go")
    for process, here in runs:
        assert here.recv() == "done"
        process.join(30.0)
        assert process.exitcode == 0
    if durability == "fsync":
        reports = [audit(tmp_path / name / "journal", tmp_path / name / "trained.jsonl") for name in "123"]
        assert all(r.clean and r.trained == 2 * STEPS for r in reports), reports
