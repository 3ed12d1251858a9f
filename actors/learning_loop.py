"""The learner's main loop, free of Ray, DeepSpeed and ZeroMQ: it is handed what it calls.

    step s     take P groups -> learn: version s becomes s+1 -> trained -> publish s+1 -> release the slots
                              every e steps: evaluate (beside the next step)
                              every k steps: checkpoint -> commit

    waits for          unblocked by
    take               reward actors finishing P groups with signal
    publish            engines that stage and commit; bounded by the weight plane's deadline
    evaluate           only the next publish waits for it, so that an evaluation sees exactly one version

Order matters twice. `release` comes after `publish`: a slot is free only once the weights of the step that consumed it
are live, which is the proof that staleness <= bound. `commit` comes after the checkpoint is durable: only then may the
journal forget, and a crash between the two merely trains from the checkpoint again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from rollout.event_log import JsonLines
from rollout.trained_log import TrainedLog
from rollout.types import Group

Metrics = dict[str, float]


class Queue(Protocol):
    """The part of the queue client a learner uses."""

    def take(self, step: int, rank: int, world: int, wait_s: float) -> list[Group]: ...
    def trained(self, step: int, version: int, skipped_ordinals: Sequence[int] = ()) -> None: ...
    def release(self, version: int) -> None: ...
    def commit(self, step: int) -> None: ...


class Learner(Protocol):
    """The part of `learner.engine.LearnerEngine` the loop uses."""

    @property
    def version(self) -> int: ...
    def train_step(self, groups: list[Group], step: int) -> Metrics: ...


@dataclass(frozen=True, slots=True)
class Schedule:
    """When the loop ends and what it does on the way. `every` of 0 means only at the end."""

    steps: int
    evaluate_at: frozenset[int]
    checkpoint_every: int
    take_wait_s: float
    evaluate_wait_s: float = 600.0

    def checkpoint_at(self, version: int) -> bool:
        return version == self.steps or (self.checkpoint_every > 0 and version % self.checkpoint_every == 0)


@dataclass
class Effects:
    """What the loop does to the world, each a plain callable, called on every rank at the same place.

    On ranks other than 0 `publish` and `checkpoint` only take part in the collectives, and the rest does nothing.
    """

    publish: Callable[[int, float | None], Metrics]  # version, gradient norm; every engine serves it on return
    evaluate: Callable[[int], Future[Metrics]]  # eval/* metrics of the version the engines serve
    checkpoint: Callable[[int], None]  # durable when it returns
    observe: Callable[[], Metrics]  # gauges of the other roles, for the metrics line


@dataclass
class Pending:
    """A metrics line that waits for its evaluation."""

    row: Metrics
    evaluation: Future[Metrics] | None = None


@dataclass
class LearningLoop:
    """One rank of the loop. `run` returns when `schedule.steps` steps are trained, or when `stopping()` says so.

    Every rank writes its own share of each step to `trained`: the learner's side of the books, for the auditor.
    """

    queue: Queue
    learner: Learner
    schedule: Schedule
    effects: Effects
    trained: TrainedLog
    metrics: JsonLines
    rank: int = 0
    world: int = 1
    stopping: Callable[[], bool] = lambda: False
    phase: str = "starting"  # what the loop is doing now, for `headrace why`
    phase_since: float = field(default_factory=time.monotonic)
    _pending: Pending | None = None

    def run(self) -> int:
        """Train until the end; returns the version reached. Raises what its parts raise."""
        if self.learner.version in self.schedule.evaluate_at:
            self._pending = Pending({}, self.effects.evaluate(self.learner.version))
        while self.learner.version < self.schedule.steps and not self.stopping():
            self._step(self.learner.version)
        self._enter("finishing")
        self._settle()
        return self.learner.version

    def _step(self, step: int) -> None:
        started = time.monotonic()
        self._enter("take")
        groups = self.queue.take(step, self.rank, self.world, self.schedule.take_wait_s)
        taken = time.monotonic()
        self._enter("learn")
        metrics = self.learner.train_step(groups, step)
        trained = time.monotonic()
        version = self.learner.version
        self.trained.trained(step, version, groups)
        self._tell(lambda: self.queue.trained(step, version))
        self._settle()
        self._enter("publish")
        moved = metrics.get("grad_norm") if metrics.get("lr") else None  # at a rate of 0 nothing moves, and rightly so
        metrics |= self.effects.publish(version, moved)
        self._tell(lambda: self.queue.release(version))
        published = time.monotonic()
        evaluation = self.effects.evaluate(version) if version in self.schedule.evaluate_at else None
        if self.schedule.checkpoint_at(version):
            self._enter("checkpoint")
            self.trained.sync()  # the books say of every step in a checkpoint which groups it was
            self.effects.checkpoint(version)
        row = metrics | self.effects.observe() | _timings(started, taken, trained, published)
        row |= {"step": step + 1, "version": version, "time_s": round(time.time(), 3)} | _staleness(groups, step)
        self._pending = Pending(row, evaluation)
        if evaluation is None:
            self._settle()
        if self.schedule.checkpoint_at(version):
            self._tell(lambda: self.queue.commit(step))

    def _tell(self, queue_call: Callable[[], None]) -> None:
        """Only rank 0 speaks for the step; the other ranks only take."""
        if self.rank == 0:
            queue_call()

    def _settle(self) -> None:
        """Write the line that waits for its evaluation; the next version must not go live before that is done."""
        if self._pending is None:
            return
        self._enter("evaluate")
        pending, self._pending = self._pending, None
        scores = pending.evaluation.result(self.schedule.evaluate_wait_s) if pending.evaluation else {}
        if pending.row and self.rank == 0:
            self.metrics.append(pending.row | scores)

    def _enter(self, phase: str) -> None:
        self.phase, self.phase_since = phase, time.monotonic()

    def gauges(self) -> dict[str, float | str]:
        return {
            "phase": self.phase,
            "phase_s": time.monotonic() - self.phase_since,
            "version": self.learner.version,
            "step": self.learner.version,
        }


def _timings(started: float, taken: float, trained: float, published: float) -> Metrics:
    whole = max(time.monotonic() - started, 1e-9)
    return {
        "time/wait": taken - started,
        "time/train": trained - taken,
        "time/weight_sync": published - trained,
        "time/step": whole,
        "idle/learner": (taken - started) / whole,
    }


def _staleness(groups: Sequence[Group], version: int) -> Metrics:
    ages = [version - g.oldest_version for g in groups]
    return {"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))}
