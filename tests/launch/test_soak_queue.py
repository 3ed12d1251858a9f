"""Proves the queue's first claim on real processes under attack, and that the soak that shows it can fail."""

from __future__ import annotations

import json

import pytest

from launch.soak_faults import SABOTAGE
from launch.soak_queue import WRONGS, main, soak_queue


@pytest.mark.timeout(180)
def test_nothing_is_lost_and_nothing_is_trained_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2", "--steps", "6"]) == 0
    total = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert total["seeds"] == 2 and total["kills"] > 5 and total["groups"] > 20 and total["looks"] > 5
    assert all(total[wrong] == 0 for wrong in WRONGS)


SLOW = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("protection", ["crc", *(pytest.param(p, marks=SLOW) for p in SABOTAGE if p != "crc")])
def test_without_any_one_protection_the_same_attack_does_damage(protection: str) -> None:
    """With all protections in place it does none."""
    assert soak_queue([0], aim=protection)["bad_seeds"] == []
    for seed in range(8):
        if soak_queue([seed], protection, deadline_s=20.0)["bad_seeds"]:
            return
    raise AssertionError(f"nobody misses {protection}")
