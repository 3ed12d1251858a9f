"""Proves the queue's first claim on real processes under attack, and that the soak that shows it can fail."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.soak_faults import SABOTAGE
from launch.soak_power import HastyDisk, PowerCutDisk, cut_power
from launch.soak_queue import WRONGS
from launch.soak_roles import LARGE, expected_group, is_right
from rollout.journal import read_groups
from rollout.ledger_states import LedgerSettings
from rollout.queue_client import QueueClient
from rollout.queue_server import QueueServer

ROOT = Path(__file__).parents[2]


def soak(*words: object) -> tuple[int, dict[str, Any]]:
    """`headrace soak queue WORDS` as a user runs it: its exit status and its JSON line."""
    command = [sys.executable, "-m", "launch.cli", "soak", "queue", *map(str, words)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert ended.returncode in (0, 1), ended.stderr
    return ended.returncode, json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.timeout(180)
def test_nothing_is_lost_and_nothing_is_trained_twice() -> None:
    status, total = soak("--seeds", 3, "--steps", 8, "--attack", 15)
    assert status == 0 and all(total[wrong] == 0 for wrong in WRONGS)
    assert total["seeds"] == 3 and total["kills"] > 5 and total["groups"] > 20 and total["looks"] > 5
    assert total["payload_files"] > 0, "no client has placed a large group"


@pytest.mark.timeout(180)
def test_what_was_acknowledged_survives_power_cuts() -> None:
    cuts = seed = 0
    while cuts < 3:
        status, total = soak("--first", seed, "--seeds", 1, "--aim", "fsync", "--steps", 4, "--attack", 15)
        assert status == 0 and total["groups"] >= 8
        cuts, seed = cuts + total["cuts"], seed + 1


SLOW = [pytest.mark.soak, pytest.mark.timeout(1800)]
DAMAGE = {  # what each protection stands against; a slow machine alone may leave a short run unfinished
    "fsync": ("lost", "duplicated", "damaged"),
    "placed": ("lost", "damaged"),
    "idempotency": ("duplicated", "replayed_differently", "lost"),
    "leases": ("unfinished",),
    "crc": ("corrupt",),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("protection", ["crc", *(pytest.param(p, marks=SLOW) for p in SABOTAGE if p != "crc")])
def test_without_any_one_protection_the_same_attack_does_damage(protection: str) -> None:
    """With all protections in place it does none."""
    attack = ("--seeds", 1, "--attack", 15)
    assert soak("--aim", protection, *attack)[0] == 0
    for seed in range(8):
        status, total = soak("--sabotage", protection, "--first", seed, "--peace", 20, *attack)
        if any(total[wrong] for wrong in DAMAGE[protection]):
            assert status == 1
            return
    raise AssertionError(f"nobody misses {protection}")


@pytest.mark.parametrize("disk", [PowerCutDisk, HastyDisk])
def test_a_power_cut_takes_back_the_arrays_that_were_acknowledged_without_a_sync(
    tmp_path: Path, disk: type[PowerCutDisk]
) -> None:
    shape, journal, durable = LedgerSettings(4, 2), tmp_path / "journal", tmp_path / "durable"
    with QueueServer(shape, journal, disk=disk(durable)) as server, QueueClient(server.endpoint, "a") as client:
        client.submit([expected_group(x.ordinal, x.attempt, 0) for x in client.lease(3, wait_s=5.0)])
    assert len(list(journal.glob("*.payload"))) == 1, f"{LARGE} tokens are not placed"
    undone = cut_power(journal, durable, random.Random(0))
    with QueueServer(shape, journal) as server:
        dropped = dict(server.core.ledger.dropped)
    if disk is PowerCutDisk:
        assert dropped == {} and undone == 0
        assert [is_right(g) for g in read_groups(journal)] == [True] * 3
    else:
        assert dropped == {"journal_damaged": 1} and undone > 10_000
