"""Components made of lengths alone. They steer training and are no measure of being right: held-out answers, which
come without trajectories, are scored without them, and the components of a verdict keep the raw metric apart."""

from __future__ import annotations

from actors.config import RewardConfig


def overlong(tokens: int, longest: int, cache: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): 0, then a slope down to -1 over the last `cache`.

    overlong(90, 100, 20) = -0.5: tokens 81..100 are the punished interval and 90 is half-way.
    """
    if tokens <= longest - cache:
        return 0.0
    if tokens <= longest:
        return (longest - cache - tokens) / cache
    return -1.0


def shape(config: RewardConfig, tokens: int) -> float:
    """The value of a `length` or `overlong` component for an answer of so many tokens."""
    if config.kind == "length":
        return float(tokens)
    return overlong(tokens, config.args["max"], config.args["cache"])
