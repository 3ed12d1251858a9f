"""Proves which committed groups stay readable offline: none, those of the latest steps with their verdicts, or all."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.journal import read_groups
from rollout.journal_segments import segment_numbers
from rollout.queue_client import QueueClient
from rollout.queue_server import QueueServer
from rollout.retention import Retain
from tests.rollout.queue_samples import GOOD, group, same, settings

pytestmark = pytest.mark.timeout(60)
STEPS = 8
SHORT, LONG = (3, 5), (3, 30_000)  # sent; placed by the client


def run(folder: Path, retain: Retain, steps: range, lengths: tuple[int, ...]) -> None:
    """Two groups per step; commits each step; a new segment at every flush."""
    made = QueueServer(settings(), folder, segment_bytes=1, retain=retain)
    with made as server, QueueClient(server.endpoint, "all") as client:
        for step in steps:
            leases = client.lease(2, wait_s=5.0)
            client.submit([group(x.ordinal, x.attempt, step, lengths) for x in leases])
            client.score({x.ordinal: GOOD for x in leases})
            client.take(step, wait_s=5.0)
            client.trained(step, step + 1, live=True)
            client.commit(step)


@pytest.mark.parametrize(
    ("retain", "first", "lengths"),
    [(0, STEPS, SHORT), (3, STEPS - 3, SHORT), (3, STEPS - 3, LONG), (99, 0, SHORT), ("all", 0, LONG)],
)
def test_the_latest_committed_steps_stay(tmp_path: Path, retain: Retain, first: int, lengths: tuple[int, ...]) -> None:
    """Over a restart, too."""
    run(tmp_path, retain, range(5), lengths)
    run(tmp_path, retain, range(5, STEPS), lengths)
    found = list(read_groups(tmp_path, fate="trained", verdict="scored" if retain else None))
    wanted = [group(o, 0, o // 2, lengths).with_verdicts(GOOD) for o in range(2 * first, 2 * STEPS)]
    assert [g.ordinal for g in found] == [g.ordinal for g in wanted]
    if retain:
        assert all(same(a, b) for a, b in zip(found, wanted, strict=True))


def test_less_retention_after_a_restart_lets_go(tmp_path: Path) -> None:
    run(tmp_path, 99, range(5), SHORT)
    before = len(segment_numbers(tmp_path))
    run(tmp_path, 1, range(5, STEPS), SHORT)
    assert before > 12 and len(segment_numbers(tmp_path)) < 12


def test_verdicts_of_a_live_group_are_read_though_the_segment_that_told_them_is_gone(tmp_path: Path) -> None:
    """Group 0 is scored and waits; everything else in the segments between is settled and deleted."""
    made = QueueServer(settings(), tmp_path, segment_bytes=1)
    with made as server, QueueClient(server.endpoint, "all") as client:
        for _ in range(2):
            client.submit([group(x.ordinal, x.attempt) for x in client.lease(1, wait_s=5.0)])
        client.score({0: GOOD})
        client.drop([1], "test")
        for _ in range(3):
            client.submit([group(x.ordinal, x.attempt) for x in client.lease(1, wait_s=5.0)])
            client.drop([server.core.ledger.issued - 1], "test")
    assert len(segment_numbers(tmp_path)) < 6, "nothing was deleted"
    (found,) = read_groups(tmp_path, fate="open")
    assert same(found, group(0).with_verdicts(GOOD))
