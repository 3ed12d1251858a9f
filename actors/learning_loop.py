"""The learner's main loop, free of Ray, DeepSpeed and ZeroMQ: it is handed what it calls.

    step s     take P groups -> learn: version s becomes s+1 -> trained -> publish s+1, and on to step s+1
                              every k steps: checkpoint -> commit
    beside     s+1 is staged, committed and confirmed by the engines -> live: release the slots
                              every e steps: evaluate

    waits for          unblocked by
    take               reward actors finishing P groups with signal; fails at once if a publication failed
    the update         the publication before it, until nobody reads the weights any more (actors/publisher.py)
    publish            the publication before it: one at a time, each bounded by the weight plane's deadlines
    evaluate           only the next publish waits for it, so that an evaluation sees exactly one version

Order matters twice. `release` comes when a version is live: a slot is free only once the weights of the step that
consumed it are served, which is the proof that staleness <= bound; with bound 0 every slot waits for it, so the next
step cannot be taken before. `commit` comes after the checkpoint is durable: only then may the journal forget, and a
crash between the two merely trains from the checkpoint again. A learner that dies before its version was live
publishes it again: what a resumed run does first is to make every engine serve the version of its checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from rollout.errors import DeadlineError
from rollout.event_log import JsonLines
from rollout.trained_log import TrainedLog
from rollout.types import Group

Metrics = dict[str, float]
TAKE_SLICE_S = 2.0


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

    updated: Callable[[int], None]  # the weights are those of this version now
    publish: Callable[[int, float | None, Callable[[int, Metrics], None]], Future[Metrics]]
    """version, gradient norm, what to call once every engine serves it or a later one: (which, weights/* metrics)"""
    blocked_s: Callable[[], float]  # seconds that the update waited for a publication, since last asked
    evaluate: Callable[[int], Future[Metrics]]  # eval/* metrics of the version the engines serve
    checkpoint: Callable[[int], None]  # durable when it returns
    observe: Callable[[], Metrics]  # gauges of the other roles, for the metrics line


@dataclass
class Pending:
    """A version on its way, and its metrics line: written when it is live and, where it is due, evaluated."""

    row: Metrics
    publication: Future[Metrics] | None = None
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
    _mark: float = field(default_factory=time.monotonic)  # where the time of the step under way begins
    _began_s: float = 0.0  # what the beginning of the last publication took of it

    def run(self) -> int:
        """Train until the end; returns the version reached. Raises what its parts raise."""
        if self.learner.version in self.schedule.evaluate_at:
            self._pending = Pending({}, evaluation=self.effects.evaluate(self.learner.version))
        self._mark = time.monotonic()
        while self.learner.version < self.schedule.steps and not self.stopping():
            self._step(self.learner.version)
        self._enter("finishing")
        self._settle()
        return self.learner.version

    def _step(self, step: int) -> None:
        began = time.monotonic()
        self._enter("take")
        groups = self._take(step)
        taken = time.monotonic()
        self._enter("learn")
        metrics = self.learner.train_step(groups, step)
        trained = time.monotonic()
        version = self.learner.version
        self.trained.trained(step, version, groups)
        self._tell(lambda: self.queue.trained(step, version))
        self.effects.updated(version)
        blocked_s = self.effects.blocked_s()
        self._settle()
        sync_s = blocked_s + time.monotonic() - trained
        row = metrics | self.effects.observe() | self._timings(taken - began, trained - taken - blocked_s, sync_s)
        row |= {"step": step + 1, "version": version, "time_s": round(time.time(), 3)} | _staleness(groups, step)
        self._publish(version, row)
        if self.schedule.checkpoint_at(version):
            self._checkpoint(step, version)

    def _take(self, step: int) -> list[Group]:
        """The groups of the step; asked for in slices, so that a publication that failed is heard of meanwhile."""
        deadline = time.monotonic() + self.schedule.take_wait_s
        while True:
            self._raise_if_failed()
            left = deadline - time.monotonic()
            try:
                return self.queue.take(step, self.rank, self.world, min(TAKE_SLICE_S, max(0.0, left)))
            except DeadlineError as late:
                if left <= TAKE_SLICE_S:
                    raise DeadlineError(late.awaited, self.schedule.take_wait_s, late.detail) from None

    def _publish(self, version: int, row: Metrics) -> None:
        self._enter("publish")
        began = time.monotonic()
        pending = self._pending = Pending(row)
        # at a learning rate of 0 nothing moves, and rightly so
        moved = row.get("grad_norm") if row.get("lr") else None
        pending.publication = self.effects.publish(version, moved, partial(self._live, pending, version))
        self._began_s = time.monotonic() - began

    def _live(self, pending: Pending, version: int, served: int, found: Metrics) -> None:
        """Every engine serves `version` (a later one where all were lost); called by the publication, on its thread."""
        self._tell(lambda: self.queue.release(version))
        pending.row |= found
        if version == served and version in self.schedule.evaluate_at:
            pending.evaluation = self.effects.evaluate(version)
        else:
            self._write(pending.row)

    def _checkpoint(self, step: int, version: int) -> None:
        """The line of the version is on disk before a run may be resumed after it, if no evaluation holds it up."""
        assert self._pending is not None and self._pending.publication is not None
        self._pending.publication.result()
        self._enter("checkpoint")
        self.trained.sync()  # the books say of every step in a checkpoint which groups it was
        self.effects.checkpoint(version)
        self._tell(lambda: self.queue.commit(step))

    def _tell(self, queue_call: Callable[[], None]) -> None:
        """Only rank 0 speaks for the step; the other ranks only take."""
        if self.rank == 0:
            queue_call()

    def _settle(self) -> None:
        """Wait until the version before is live and evaluated. The next must not begin before that."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.publication is not None:
            self._enter("publish")
            pending.publication.result()
        if pending.evaluation is not None:
            self._enter("evaluate")
            scores = pending.evaluation.result(self.schedule.evaluate_wait_s)
            if pending.row:  # none for the version that the run starts from
                self._write(pending.row | scores)

    def _raise_if_failed(self) -> None:
        publication = self._pending.publication if self._pending else None
        if publication is not None and publication.done():
            publication.result()

    def _write(self, row: Metrics) -> None:
        if self.rank == 0:
            self.metrics.append(row)

    def _timings(self, wait_s: float, learn_s: float, sync_s: float) -> Metrics:
        """Where the time since the last step's line went. What went on beside the learner is not in it."""
        now = time.monotonic()
        whole, self._mark = max(now - self._mark, 1e-9), now
        return {
            "time/wait": wait_s,
            "time/train": learn_s,
            "time/weight_sync": sync_s + self._began_s,
            "time/step": whole,
            "idle/learner": wait_s / whole,
        }

    def _enter(self, phase: str) -> None:
        self.phase, self.phase_since = phase, time.monotonic()

    def gauges(self) -> dict[str, float | str]:
        return {
            "phase": self.phase,
            "phase_s": time.monotonic() - self.phase_since,
            "version": self.learner.version,
            "step": self.learner.version,
        }


def _staleness(groups: Sequence[Group], version: int) -> Metrics:
    ages = [version - g.oldest_version for g in groups]
    return {"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))}
