"""Proves the queue's first claim on real processes under attack, and that the soak that shows it can fail."""

from __future__ import annotations

import json

import pytest

from launch.soak_faults import SABOTAGE
from launch.soak_queue import WRONGS, main, soak_queue

# a seed on which each sabotage shows within seconds
TELLING_SEEDS = {"fsync": range(0, 6), "idempotency": range(0, 6), "leases": range(0, 6), "crc": range(0, 6)}


@pytest.mark.timeout(180)
def test_nothing_is_lost_and_nothing_is_trained_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2", "--steps", "6"]) == 0
    total = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert total["seeds"] == 2 and total["kills"] > 5 and total["groups"] > 20 and total["looks"] > 5
    assert all(total[wrong] == 0 for wrong in WRONGS)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("protection", SABOTAGE)
def test_without_any_one_protection_the_soak_fails(protection: str) -> None:
    for seed in TELLING_SEEDS[protection]:
        total = soak_queue([seed], protection, deadline_s=25.0)
        if total["bad_seeds"]:
            return
    raise AssertionError(f"nobody misses {protection}")
