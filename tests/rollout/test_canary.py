"""Proves: a canary on frozen weights stays silent with slope 0; a jump, a doubled difference, a creeping error, a NaN
and a stretch of frozen weights each raise their alarm; an engine that trembles does not, and a stretch far smaller than
the tremble of one token is heard within three readings."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.canary import Canary, difference, slope

WANTED = [np.array([-1.0, -2.0], np.float32), np.array([-0.5], np.float32)]


def seen(shift: float) -> list[np.ndarray]:
    return [w + np.float32(shift) for w in WANTED]


def test_difference_over_all_tokens() -> None:
    mean_abs, bias, stretch = difference([np.array([-1.0, -3.0]), np.array([1.0])], [np.array([-2.0, -2.0, -1.0])])
    assert (mean_abs, bias) == pytest.approx((4 / 3, 2 / 3))
    assert stretch == pytest.approx((1 * -2 + -1 * -2 + 2 * -1) / (4 + 4 + 1))
    assert difference([np.array([np.nan])], [np.zeros(1)]) == (np.inf, np.inf, np.inf)


def test_slope_by_hand() -> None:
    assert slope([1.0, 3.0, 5.0]) == pytest.approx(2.0)
    assert slope([1.0, 2.0]) == 0.0


def test_frozen_weights_stay_silent_for_200_syncs() -> None:
    canary = Canary()
    readings = [canary.read("e", v, seen(0.02), WANTED, "same") for v in range(200)]
    assert all(r.alarm == "" and abs(r.slope) < 1e-9 for r in readings)
    assert "stretched" in canary.read("e", 200, seen(0.022), WANTED, "same").alarm


def trembling(rng: np.random.Generator, scale: float = 1.0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """An engine in bf16 under changing load: each of 64 log-probs is off by 0.02 or so, differently each time."""
    wanted = -np.random.default_rng(1).gamma(4.0, 3.0, 64)
    return [wanted * scale + rng.normal(0.01, 0.02, 64)], [wanted]


@pytest.mark.parametrize("seed", range(20))
def test_a_trembling_engine_is_no_alarm_but_a_stretch_of_a_thousandth_is(seed: int) -> None:
    rng, canary = np.random.default_rng(seed), Canary()
    assert not [a for v in range(200) if (a := canary.read("e", v, *trembling(rng), "same").alarm)]
    assert any(canary.read("e", v, *trembling(rng, 1.001), "same").alarm for v in range(3))


def test_training_may_stretch_what_frozen_weights_may_not() -> None:
    rng, canary = np.random.default_rng(0), Canary()
    alarms = [canary.read("e", v, *trembling(rng, 1 + 0.001 * (v % 3)), str(v)).alarm for v in range(50)]
    assert not any(alarms)


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
