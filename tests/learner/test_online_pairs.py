"""Proves that a preference objective learns through the real DeepSpeed engine from the groups of a step.

The better answer of each group becomes likelier than the worse one; a step without a pair changes nothing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from learner.config import AlgorithmConfig, LearnerConfig
from learner.engine import LearnerEngine
from learner.presets import resolve
from rollout.types import Group, Scored, Status, Trajectory
from rollout.versions import VersionSpan

PROMPT = np.array([10, 11, 12, 13], np.int32)
GOOD, BAD = np.array([20, 21, 22], np.int32), np.array([30, 31, 32], np.int32)


@pytest.fixture
def engine(tiny_llama: Path) -> LearnerEngine:
    algorithm = AlgorithmConfig(preset="dpo", groups_per_step=2, learning_rate=3e-3)
    learner = LearnerConfig(compute_dtype="float32")
    return LearnerEngine(tiny_llama, resolve(algorithm), algorithm, learner, serving_dtype="float32")


def answer(ids: np.ndarray, value: float) -> Trajectory:
    n = len(ids)
    logprobs = np.full(n, -5.0, np.float32)
    return Trajectory(ids, np.ones(n, np.bool_), logprobs, (VersionSpan(0, 0, n),), Status.FINISHED, Scored(value))


def groups(good: float, bad: float) -> list[Group]:
    return [Group(o, PROMPT + o, (answer(BAD, bad), answer(GOOD, good))) for o in range(2)]


def margin(engine: LearnerEngine) -> float:
    return float(engine.score(PROMPT, GOOD, 1.0).sum() - engine.score(PROMPT, BAD, 1.0).sum())


def test_the_better_answer_becomes_likelier(engine: LearnerEngine) -> None:
    before = margin(engine)
    rows = [engine.train_step(groups(1.0, 0.0), step) for step in range(5)]
    assert margin(engine) > before + 1.0 and engine.version == 5
    assert rows[0]["loss/total"] == pytest.approx(np.log(2.0), abs=1e-5)  # policy and reference are equal at first
    assert rows[-1]["preference/margin"] > rows[0]["preference/margin"]
    assert rows[-1]["preference/pairs"] == 2 and rows[-1]["reward/mean"] == 0.5


def test_ties_give_no_pair_and_change_nothing(engine: LearnerEngine) -> None:
    before = margin(engine)
    row = engine.train_step(groups(1.0, 1.0), 0)
    assert (row["preference/pairs"], row["step/skipped"]) == (0, 1)
    assert margin(engine) == before and engine.bad_steps == 0 and engine.version == 1
