"""Proves the learning rate by hand-worked numbers."""

from __future__ import annotations

import pytest

from learner.config import AlgorithmConfig
from learner.schedule import learning_rate
from rollout.errors import ConfigError


def rates(schedule: str, warmup: int, steps: int) -> list[float]:
    config = AlgorithmConfig.model_validate({"learning_rate": 1.0, "warmup_steps": warmup, "schedule": schedule})
    return [learning_rate(config, step, steps) for step in range(steps)]


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    assert rates("constant", 4, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_and_cosine_fall_to_zero_after_the_warm_up() -> None:
    assert rates("linear", 2, 6) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert rates("cosine", 0, 4) == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)


def test_past_the_end_the_rate_stays_at_zero() -> None:
    config = AlgorithmConfig(learning_rate=1.0, schedule="linear")
    assert learning_rate(config, 99, 10) == 0


def test_a_falling_schedule_needs_the_end() -> None:
    with pytest.raises(ConfigError, match=r"'linear' needs .*run.steps"):
        learning_rate(AlgorithmConfig(learning_rate=1.0, schedule="linear"), 3, None)
