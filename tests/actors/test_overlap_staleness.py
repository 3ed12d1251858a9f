"""Proves with the real ledger that weights which travel beside the learner leave the bound on staleness as it was.

With bound 0 every token is of the version that the step starts from, and no step is taken before that version is live;
with a larger bound there is overlap, and no token is older than it allows.
"""

from __future__ import annotations

import random
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from actors.learning_loop import Effects, LearningLoop, Schedule
from rollout.event_log import JsonLines
from rollout.ledger import Ledger
from rollout.ledger_states import LedgerSettings
from rollout.trained_log import TrainedLog
from rollout.types import Group, Scored, Status, Trajectory
from rollout.versions import VersionSpan

P, STEPS = 2, 40


class World:
    """One engine that generates whenever it may, at a random pace; publications that are live when chance says so."""

    def __init__(self, bound: int, seed: int, folder: Path) -> None:
        self.rng, self.version, self.live = random.Random(seed), 0, 0
        settings = LedgerSettings(groups_per_step=P, group_size=2, bound=bound, max_steps=STEPS, zero_signal="train")
        self.ledger = Ledger(settings)
        self.publication: Future[dict[str, float]] | None = None
        self.going: list[tuple[int, int, int]] = []  # ordinal, attempt, the version that made its first token
        self.ages: list[int] = []
        self.early = 0  # takes while a version was still on its way
        effects = Effects(lambda v: None, self.publish, lambda: 0.0, self.evaluate, lambda v: None, dict)
        self.loop = LearningLoop(
            self,
            self,
            Schedule(STEPS, frozenset(), 0, take_wait_s=3600.0),
            effects,
            TrainedLog(folder / "trained", 0),
            JsonLines(folder / "metrics"),
        )

    def something_happens(self) -> None:
        """One of: the engine leases, the engine finishes a group, the version on its way is live."""
        chance = self.rng.random()
        if chance < 0.4 and not self.ledger.ending:
            for lease in self.ledger.lease(self.rng.randint(1, 3), "e", f"k{self.rng.random()}", 0.0):
                self.going.append((lease.ordinal, lease.attempt, self.live))
        elif chance < 0.8 and self.going:
            ordinal, attempt, version = self.going.pop(self.rng.randrange(len(self.going)))
            self.ledger.submit(ordinal, attempt, "e", 2, version, 0.0)
            self.ledger.score(ordinal, (Scored(0.0), Scored(1.0)), 0.0)
        elif self.publication is not None and not self.publication.done():
            self.publication.result()

    # ---- the queue

    def take(self, step: int, rank: int, world: int, wait_s: float) -> list[Group]:
        while not isinstance(taken := self.ledger.take(step, 0.0), tuple):
            self.something_happens()
        self.early += self.publication is not None and not self.publication.done()
        versions = [self.ledger.entries[o].version for o in taken]
        self.ages += [step - v for v in versions]
        return [_group(o, v) for o, v in zip(taken, versions, strict=True)]

    def trained(self, step: int, version: int, skipped_ordinals=()) -> None:
        self.ledger.trained(step, version)

    def release(self, version: int) -> None:
        self.ledger.release(version)

    def commit(self, step: int) -> None:
        self.ledger.commit(step)

    # ---- the learner and its effects

    def train_step(self, groups: list[Group], step: int) -> dict[str, float]:
        for _ in range(self.rng.randint(0, 6)):
            self.something_happens()
        self.version += 1
        return {}

    def publish(self, version: int, grad_norm: float | None, live) -> Future[dict[str, float]]:
        world = self

        class OnItsWay(Future):
            def result(self, timeout=None):
                if not self.done():
                    world.live = version
                    live(version, {})
                    self.set_result({})
                return super().result(timeout)

        self.publication = OnItsWay()
        return self.publication

    def evaluate(self, version: int) -> Future[dict[str, float]]:
        raise AssertionError("nothing is to be evaluated")


def _group(ordinal: int, version: int) -> Group:
    ids, mask, logprobs = np.zeros(2, np.int32), np.ones(2, np.bool_), np.zeros(2, np.float32)
    answer = Trajectory(ids, mask, logprobs, (VersionSpan(version, 0, 2),), Status.FINISHED, Scored(1.0))
    return Group(ordinal, np.zeros(3, np.int32), (answer, answer))


@pytest.mark.parametrize("seed", range(20))
def test_bound_0_is_strictly_on_policy(tmp_path: Path, seed: int) -> None:
    world = World(0, seed, tmp_path)
    assert world.loop.run() == STEPS
    assert len(world.ages) == P * STEPS and set(world.ages) == {0}
    assert world.early == 0, "a step was taken before the weights it depends on were live"


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_a_larger_bound_overlaps_and_holds(tmp_path: Path, bound: int) -> None:
    ages, early = [], 0
    for seed in range(20):
        world = World(bound, seed, tmp_path / str(seed))
        assert world.loop.run() == STEPS
        ages += world.ages
        early += world.early
    assert max(ages) == bound and early > 0
