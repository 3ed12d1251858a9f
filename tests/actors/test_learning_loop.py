"""Proves the order of the learner's loop with fakes and an event list: release only after publish, commit only after
a durable checkpoint, one metrics line per step, an evaluation sees one version, and a resumed loop starts where it was.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.learning_loop import Effects, LearningLoop, Schedule
from rollout.errors import DeadlineError
from rollout.event_log import JsonLines, read_lines
from rollout.trained_log import TrainedLog
from rollout.types import Group, Scored, Status, Trajectory
from rollout.versions import VersionSpan


def group(ordinal: int, version: int) -> Group:
    answer = Trajectory(
        np.zeros(2, np.int32),
        np.ones(2, np.bool_),
        np.zeros(2, np.float32),
        (VersionSpan(version, 0, 2),),
        Status.FINISHED,
        Scored(1.0),
    )
    return Group(ordinal, np.zeros(3, np.int32), (answer, answer))


class World:
    """Everything the loop calls, writing down what was called in which order."""

    def __init__(self, path: Path, start: int = 0) -> None:
        self.version, self.calls, self.path = start, [], path
        self.evaluations: dict[int, Future[dict[str, float]]] = {}
        self.publications: list[Future[dict[str, float]]] = []
        self.publication = AtOnce

    def take(self, step, rank, world, wait_s):
        self.calls.append(f"take {step}")
        return [group(2 * step, max(0, step - 1)), group(2 * step + 1, step)]

    def trained(self, step, version, skipped_ordinals=()):
        self.calls.append(f"trained {step}->{version}")

    def release(self, version):
        self.calls.append(f"release {version}")

    def commit(self, step):
        self.calls.append(f"commit {step}")

    def train_step(self, groups, step):
        self.calls.append(f"learn {step}")
        self.version += 1
        return {"loss/total": 0.5}

    def effects(self) -> Effects:
        def publish(version, grad_norm, live):
            assert all(done.done() for done in self.evaluations.values()), "published while an evaluation was running"
            assert all(p.done() for p in self.publications), "published while a publication was under way"
            self.calls.append(f"publish {version}")
            self.publications.append(self.publication(version, live))
            return self.publications[-1]

        def evaluate(version):
            self.calls.append(f"evaluate {version}")
            result = self.evaluations[version] = LateFuture()
            return result

        updated = lambda v: None  # noqa: E731
        return Effects(updated, publish, lambda: 0.0, evaluate, lambda v: self.calls.append(f"checkpoint {v}"), dict)

    def loop(self, steps: int, evaluate_at: set[int], checkpoint_every: int, rank: int = 0) -> LearningLoop:
        schedule = Schedule(steps, frozenset(evaluate_at), checkpoint_every, take_wait_s=1.0)
        trained, metrics = TrainedLog(self.path / "trained", rank), JsonLines(self.path / "metrics")
        return LearningLoop(self, self, schedule, self.effects(), trained, metrics, rank)

    def rows(self, name: str) -> list[dict[str, object]]:
        return list(read_lines(self.path / name))


class AtOnce(Future):
    """A publication that is live before the learner goes on."""

    def __init__(self, version, live) -> None:
        super().__init__()
        live(version, {"weights/stall_s": 0.1})
        self.set_result({})


class AtLast(Future):
    """A publication that goes on beside the learner until somebody waits for it."""

    def __init__(self, version, live) -> None:
        super().__init__()
        self.live, self.served = live, version

    def result(self, timeout=None):
        if not self.done():
            self.live(self.served, {"weights/stall_s": 0.1})
            self.set_result({})
        return super().result(timeout)


class LateFuture(Future):
    """An evaluation that is done only when somebody waits for it."""

    def result(self, timeout=None):
        if not self.done():
            self.set_result({"eval/held_out/reward": 0.25})
        return super().result(timeout)


def test_the_order_of_one_step(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.loop(steps=1, evaluate_at=set(), checkpoint_every=1).run() == 1
    assert world.calls == ["take 0", "learn 0", "trained 0->1", "publish 1", "release 1", "checkpoint 1", "commit 0"]


def test_an_evaluation_is_finished_before_the_next_version_goes_live(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.loop(steps=3, evaluate_at={0, 1, 3}, checkpoint_every=0).run()
    assert set(world.evaluations) == {0, 1, 3}
    rows = world.rows("metrics")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row.get("eval/held_out/reward") for row in rows] == [0.25, None, 0.25]


def test_the_last_step_makes_a_checkpoint_whatever_the_interval(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.loop(steps=5, evaluate_at=set(), checkpoint_every=2).run()
    assert [c for c in world.calls if c.startswith("checkpoint")] == ["checkpoint 2", "checkpoint 4", "checkpoint 5"]


def test_a_resumed_loop_takes_the_step_after_its_version(tmp_path: Path) -> None:
    world = World(tmp_path, start=2)
    world.loop(steps=4, evaluate_at={2, 4}, checkpoint_every=0).run()
    assert [c for c in world.calls if c.startswith("take")] == ["take 2", "take 3"]
    assert world.calls[0] == "evaluate 2"


def test_the_books_name_every_ordinal_and_the_ages_of_its_tokens(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.loop(steps=2, evaluate_at=set(), checkpoint_every=0).run()
    assert [(r["step"], r["version"], r["ordinals"], r["oldest_versions"]) for r in world.rows("trained")] == [
        (0, 1, [0, 1], [0, 0]),
        (1, 2, [2, 3], [0, 1]),
    ]
    assert [row["staleness/max"] for row in world.rows("metrics")] == [0.0, 1.0]


def test_the_next_step_is_learnt_beside_a_publication_and_the_next_version_waits_for_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.publication = AtLast
    world.loop(steps=2, evaluate_at={1}, checkpoint_every=0).run()
    assert world.calls == [
        *("take 0", "learn 0", "trained 0->1", "publish 1"),
        *("take 1", "learn 1", "trained 1->2", "release 1", "evaluate 1", "publish 2"),
        *("release 2", "checkpoint 2", "commit 1"),
    ]
    assert [(r["step"], r["weights/stall_s"]) for r in world.rows("metrics")] == [(1, 0.1), (2, 0.1)]


def test_a_version_that_a_later_one_was_served_for_is_released_and_not_evaluated(tmp_path: Path) -> None:
    """All engines were lost after it was sent; the one that came back was brought what the learner had by then."""
    world = World(tmp_path)

    class Overtaken(AtLast):
        def __init__(self, version, live) -> None:
            super().__init__(2, live)

    world.publication = Overtaken
    world.loop(steps=2, evaluate_at={1, 2}, checkpoint_every=0).run()
    assert [c for c in world.calls if c.startswith(("release", "evaluate"))] == ["release 1", "release 2", "evaluate 2"]
    assert [row.get("eval/held_out/reward") for row in world.rows("metrics")] == [None, 0.25]


def test_a_failing_publication_stops_the_loop_while_it_waits_for_groups_and_frees_no_slot(tmp_path: Path) -> None:
    world = World(tmp_path)
    loop = world.loop(steps=2, evaluate_at=set(), checkpoint_every=0)

    def broken(version, grad_norm, live):
        world.publications.append(Future())
        return world.publications[-1]

    def take(step, rank, size, wait_s):
        if step == 0:
            return [group(0, 0), group(1, 0)]
        world.publications[0].set_exception(ConnectionError("engine rollout-0 is gone"))
        raise DeadlineError("step 1", wait_s)

    loop.effects.publish, world.take = broken, take
    loop.schedule = replace(loop.schedule, take_wait_s=3600.0)
    with pytest.raises(ConnectionError, match="rollout-0"):
        loop.run()
    assert not [c for c in world.calls if c.startswith(("release", "commit", "learn 1"))]
    assert loop.phase == "take"


def test_groups_that_do_not_come_end_at_the_deadline_that_was_said(tmp_path: Path) -> None:
    world = World(tmp_path)

    def take(step, rank, size, wait_s):
        raise DeadlineError(f"step {step}", wait_s, "0 of 2 scored")

    world.take = take
    with pytest.raises(DeadlineError, match=r"waited 1.0 s for step 0 \(0 of 2 scored\)"):
        world.loop(steps=1, evaluate_at=set(), checkpoint_every=0).run()


def test_stopping_ends_between_two_steps(tmp_path: Path) -> None:
    world = World(tmp_path)
    loop = world.loop(steps=9, evaluate_at=set(), checkpoint_every=0)
    loop.stopping = lambda: world.version == 2
    assert loop.run() == 2
    assert len(world.rows("metrics")) == 2


def test_other_ranks_take_part_in_everything_and_speak_for_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.loop(steps=1, evaluate_at=set(), checkpoint_every=1, rank=1).run()
    assert world.calls == ["take 0", "learn 0", "publish 1", "checkpoint 1"]
    assert not world.rows("metrics") and [row["rank"] for row in world.rows("trained")] == [1]
