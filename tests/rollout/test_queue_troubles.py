"""Proves what clients see when the server's disk is full, when the server is stopped, and when the network is bad."""

from __future__ import annotations

import errno
import json
import threading
import time
from pathlib import Path

import pytest

from rollout.queue_client import Drained, QueueClient
from rollout.queue_protocol import Request
from rollout.queue_proxy import Proxy, Weather
from rollout.queue_server import QueueServer, ServedClock
from rollout.trained_log import TrainedLog
from rollout.wire import Buffer
from tests.rollout.queue_samples import GOOD, group, settings
from tests.rollout.test_journal import BadDisk

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize("at", ["write", "sync"])
def test_a_full_disk_holds_clients_back_and_loses_nothing(tmp_path: Path, at: str) -> None:
    disk, events = BadDisk(), tmp_path / "events.jsonl"
    made = QueueServer(settings(), tmp_path / "journal", disk=disk, events_path=events)
    with made as server, QueueClient(server.endpoint, "a") as client:
        leases = client.lease(2, wait_s=5.0)
        disk.refuses, disk.at = errno.ENOSPC, at
        answers: list[dict[int, str]] = []
        groups = [group(x.ordinal, x.attempt) for x in leases]
        submitting = threading.Thread(target=lambda: answers.append(client.submit(groups)))
        submitting.start()
        while not server.gauges()["stalled"]:
            time.sleep(0.01)
        assert "No space left" in server.gauges()["stalled"] and not answers
        disk.refuses = None
        submitting.join(20.0)
        assert answers == [{0: "accepted", 1: "accepted"}]
        assert client.stats()["conserved"]
    said = [json.loads(line) for line in events.read_text().splitlines()]
    assert [e.get("what", e["event"]) for e in said] == ["journal_stalled", "journal_resumed"]
    with QueueServer(settings(), tmp_path / "journal") as again:
        assert again.gauges()["counts"]["generated"] == 2


def test_a_server_that_was_stopped_does_not_blame_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten minutes asleep count as one second."""
    now = [100.0]
    monkeypatch.setattr("rollout.served_clock.time.monotonic", lambda: now[0])
    clock = ServedClock()
    now[0] += 0.5
    assert clock.advance() == 0.5
    now[0] += 600.0
    assert clock.advance() == 1.5


def test_a_late_double_of_a_request_keeps_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leases a second time, for a client that has its answer already; the client's next heartbeat ends that."""
    sent: dict[str, list[Buffer]] = {}
    server = QueueServer(settings(), tmp_path / "journal")
    with server, QueueClient(server.endpoint, "a", beat_s=0.1) as a, QueueClient(server.endpoint, "b") as b:
        push = a.connection._push

        def overhear(frames: list[Buffer]) -> None:
            sent[Request(frames).op] = frames
            push(frames)

        monkeypatch.setattr(a.connection, "_push", overhear)
        a.submit([group(x.ordinal, x.attempt) for x in a.lease(1, wait_s=5.0)])
        a.score({g.ordinal: GOOD for g in a.lease_scoring(1, wait_s=5.0)})
        b.submit([group(x.ordinal, x.attempt) for x in b.lease(1, wait_s=5.0)])
        with a.connection._wheel:
            for op in ("lease_scoring", "lease"):
                push(sent[op])
        while 2 not in server.core.ledger.entries or server.core.ledger.entries[2].state != "issued":
            time.sleep(0.01)
        assert [g.ordinal for g in b.lease_scoring(9, wait_s=20.0)] == [1]
        assert b.stats()["conserved"] and a.connection.leases == {} and a.connection.scoring == set()


def test_a_network_slower_than_a_client_s_patience_only_makes_it_slow(tmp_path: Path) -> None:
    """Answers take up to a second, and the client looks for another server after a seventh of one."""
    with QueueServer(settings(), tmp_path / "journal") as server:
        front, stop = f"ipc://{tmp_path}/front", threading.Event()
        proxy = Proxy(front, server.endpoint, Weather(delayed=1.0, delay_s=0.5), seed=1)
        network = threading.Thread(target=proxy.run, args=(stop.is_set,), daemon=True)
        network.start()
        with QueueClient(front, "a", patience_s=60.0, beat_s=0.05) as client:
            client.submit([group(x.ordinal, x.attempt) for x in client.lease(1, wait_s=30.0)])
            assert client.stats()["counts"]["generated"] == 1
            assert client.connection.reconnects < 20
        stop.set()
        network.join(5.0)


def test_the_same_groups_are_trained_over_a_network_that_loses_doubles_and_reorders(tmp_path: Path) -> None:
    """20 % of all messages lost, 20 % doubled, 30 % late: every ordinal is trained once."""
    with QueueServer(settings(max_steps=8), tmp_path / "journal") as server:
        front, stop = f"ipc://{tmp_path}/front", threading.Event()
        proxy = Proxy(front, server.endpoint, Weather(0.2, 0.2, 0.3, 0.1), seed=3)
        network = threading.Thread(target=proxy.run, args=(stop.is_set,), daemon=True)
        network.start()
        trained: list[int] = []

        def produce() -> None:
            with QueueClient(front, "producer", beat_s=0.2) as queue:
                try:
                    while True:
                        leases = queue.lease(2, wait_s=5.0)
                        queue.submit([group(x.ordinal, x.attempt, version=len(trained) // 2) for x in leases])
                except Drained:
                    return

        def score() -> None:
            with QueueClient(front, "scorer", beat_s=0.2) as queue:
                try:
                    while True:
                        queue.score({g.ordinal: GOOD for g in queue.lease_scoring(4, wait_s=5.0)})
                except Drained:
                    return

        workers = [threading.Thread(target=work, daemon=True) for work in (produce, score)]
        for worker in workers:
            worker.start()
        log = TrainedLog(tmp_path / "trained.jsonl")
        with QueueClient(front, "learner", beat_s=0.2) as queue:
            for step in range(8):
                groups = queue.take(step, wait_s=60.0)
                log.trained(step, step + 1, groups)
                trained += [g.ordinal for g in groups]
                queue.trained(step, step + 1)
                queue.release(step + 1)
            resent = queue.connection.resent
        for worker in workers:
            worker.join(30.0)
        stop.set()
        network.join(5.0)
        counts = server.core.ledger.balance()
    assert len(trained) == len(set(trained)) == 16 and resent > 0
    assert counts["trained"] == 16 and counts["issued_total"] == 16 + counts["dropped"]
