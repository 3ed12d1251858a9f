"""What the tests of the learner share: a tiny model, and groups as a rollout actor would hand them over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from actors.models import make_tiny_llama
from rollout.types import Group, Scored, Status, Trajectory, Verdict
from rollout.versions import VersionSpan

MakeGroups = Callable[..., list[Group]]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 107,968 parameters that speaks bytes, float32."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", seed=0)


def trajectory(
    rng: np.random.Generator,
    length: int,
    verdict: Verdict | None,
    version: int = 0,
    status: Status = Status.FINISHED,
    masked: int = 0,
) -> Trajectory:
    """An answer of random bytes whose first `masked` tokens came from a tool."""
    mask = np.ones(length, bool)
    mask[:masked] = False
    return Trajectory(
        token_ids=rng.integers(0, 256, length).astype(np.int32),
        loss_mask=mask,
        behaviour_logprobs=rng.normal(-5.5, 0.3, length).astype(np.float32),
        versions=(VersionSpan(version, 0, length),) if length else (),
        status=status,
        verdict=verdict,
    )


@pytest.fixture
def make_groups() -> MakeGroups:
    def make(n_groups: int = 4, size: int = 4, seed: int = 0, prompt: int = 12, longest: int = 9) -> list[Group]:
        """Ragged groups with rewards 0, 1, 0, 1, ...: every group has signal."""
        rng = np.random.default_rng(seed)
        return [
            Group(
                ordinal=100 + g,
                prompt_ids=rng.integers(0, 256, int(rng.integers(3, prompt + 1))).astype(np.int32),
                trajectories=tuple(
                    trajectory(rng, int(rng.integers(2, longest + 1)), Scored(float(i % 2), {"exact": float(i % 2)}))
                    for i in range(size)
                ),
            )
            for g in range(n_groups)
        ]

    return make
