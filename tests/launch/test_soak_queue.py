"""Proves the queue's first claim on real processes under attack, and that the soak that shows it can fail."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from launch.soak_faults import SABOTAGE
from launch.soak_power import HastyDisk, PowerCutDisk, cut_power
from launch.soak_queue import WRONGS, main, soak_queue
from launch.soak_roles import LARGE, expected_group, is_right
from rollout.journal import read_groups
from rollout.ledger_states import LedgerSettings
from rollout.queue_client import QueueClient
from rollout.queue_server import QueueServer


@pytest.mark.timeout(180)
def test_nothing_is_lost_and_nothing_is_trained_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2", "--steps", "6"]) == 0
    total = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert total["seeds"] == 2 and total["kills"] > 5 and total["groups"] > 20 and total["looks"] > 5
    assert total["payload_files"] > 0, "no client has placed a large group"
    assert all(total[wrong] == 0 for wrong in WRONGS)


@pytest.mark.timeout(180)
def test_what_was_acknowledged_survives_power_cuts() -> None:
    cuts = seed = 0
    while cuts < 3:
        total = soak_queue([seed], aim="fsync", steps=4)
        assert total["groups"] >= 8 and all(total[wrong] == 0 for wrong in WRONGS)
        cuts, seed = cuts + total["cuts"], seed + 1


SLOW = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("protection", ["crc", *(pytest.param(p, marks=SLOW) for p in SABOTAGE if p != "crc")])
def test_without_any_one_protection_the_same_attack_does_damage(protection: str) -> None:
    """With all protections in place it does none."""
    assert soak_queue([0], aim=protection)["bad_seeds"] == []
    for seed in range(8):
        if soak_queue([seed], protection, attack_s=20.0, peace_s=20.0)["bad_seeds"]:
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
