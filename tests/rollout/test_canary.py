"""Proves: a canary on frozen weights stays silent with slope 0; a jump, a doubled difference, a creeping error, a moved
reading on unmoved weights and a NaN each raise their alarm."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.canary import Canary, difference, slope

WANTED = [np.array([-1.0, -2.0], np.float32), np.array([-0.5], np.float32)]


def seen(shift: float) -> list[np.ndarray]:
    return [w + np.float32(shift) for w in WANTED]


def test_difference_over_all_tokens() -> None:
    mean_abs, bias = difference([np.array([1.0, -1.0]), np.array([2.0])], [np.zeros(2), np.zeros(1)])
    assert (mean_abs, bias) == pytest.approx((4 / 3, 2 / 3))
    assert difference([np.array([np.nan])], [np.zeros(1)]) == (np.inf, np.inf)


def test_slope_by_hand() -> None:
    assert slope([1.0, 3.0, 5.0]) == pytest.approx(2.0)
    assert slope([1.0, 2.0]) == 0.0


def test_frozen_weights_stay_silent_for_200_syncs() -> None:
    canary = Canary()
    readings = [canary.read("e", v, seen(0.02), WANTED, "same") for v in range(200)]
    assert all(r.alarm == "" and abs(r.slope) < 1e-9 for r in readings)
    assert "although the weights did not" in canary.read("e", 200, seen(0.022), WANTED, "same").alarm


def test_a_jump_alarms_at_once() -> None:
    assert "tolerance 0.15" in Canary().read("e", 1, seen(0.76), WANTED).alarm
    assert "tolerance" in Canary().read("e", 1, [np.full(3, np.nan)], [np.zeros(3)]).alarm


def test_training_noise_is_no_alarm_but_a_doubled_difference_is() -> None:
    rng = np.random.default_rng(0)
    canary = Canary()
    for v in range(100):
        assert canary.read("e", v, seen(0.02 + 0.003 * rng.standard_normal()), WANTED, str(v)).alarm == ""
    assert "was normal" in canary.read("e", 100, seen(0.05), WANTED, "100").alarm


def test_a_creeping_error_is_alarmed_before_it_doubles() -> None:
    canary, alarms = Canary(), []
    for v in range(60):
        reading = canary.read("e", v, seen(0.02 * (1 + max(0, v - 20) * 0.05)), WANTED, str(v))
        alarms.append(reading.alarm)
    first = next(i for i, a in enumerate(alarms) if a)
    assert 20 < first <= 42


def test_an_alarmed_reading_does_not_become_normal() -> None:
    canary = Canary()
    for v in range(5):
        canary.read("e", v, seen(0.001), WANTED, str(v))
    assert all(canary.read("e", 5 + v, seen(0.1), WANTED, str(5 + v)).alarm for v in range(20))
