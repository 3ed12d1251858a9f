"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from learner.config import AlgorithmConfig
from rollout.errors import ConfigError


def learning_rate(config: AlgorithmConfig, step: int, total_steps: int | None) -> float:
    """Linear warm-up to the peak, then constant, or down to 0 at `total_steps` (linear or half a cosine).

    learning_rate(AlgorithmConfig(learning_rate=1.0, warmup_steps=4), step=1, total_steps=None) -> 0.5
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    if total_steps is None:
        raise ConfigError(f"algorithm.schedule: {config.schedule!r} needs the number of steps of the run (run.steps)")
    span = max(total_steps - config.warmup_steps, 1)
    done = min((step - config.warmup_steps) / span, 1.0)
    if config.schedule == "linear":
        return config.learning_rate * (1 - done)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
