"""`headrace simulate T.yaml`: what a topology will do, by playing its loops with stage times instead of machines.

    predict(config, Stages(generate_s=4.0, score_s=0.05, train_s=6.5, sync_s=0.45)) ->
        Prediction(step_s=7.0, idle_learner=0.01, idle_rollout=0.42, staleness_mean=1.6, staleness_max=2, ...)

A discrete-event simulation around the ledger itself (rollout/ledger.py), on a clock of its own: slots, order, the
staleness bound and the end of the run are the real rules. The groups in one engine share its speed evenly. Work varies
by `spread` around its mean with a fixed seed, so a prediction repeats.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import asdict, dataclass, field

from launch.config import RunConfig
from launch.ledger_settings import ledger_settings
from launch.run_dir import RunDirectory
from rollout.errors import ConfigError
from rollout.ledger import Ledger
from rollout.selection import Waiting
from rollout.types import Scored

FOREVER = float("inf")
HOLDER = "engine"


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds of each stage: one engine making P groups, one group being scored, one step, one weight update."""

    generate_s: float
    score_s: float
    train_s: float
    sync_s: float
    spread: float = 0.15
    origin: str = "given"

    @classmethod
    def assumed(cls, config: RunConfig) -> Stages:
        """A guess for a model of 135 M parameters with one core per role: 350 tokens/s made, 100 learnt from."""
        tokens = config.samples_per_step * config.sampling.max_tokens
        rollout, learner = config.topology.rollout, config.topology.learner
        generate, train = tokens / (350 * rollout.cpus), tokens / (100 * learner.ranks * learner.cpus)
        return cls(generate, 0.05, train, 0.45, origin="assumed for a 135M model on CPU; --from D takes a run's own")

    @classmethod
    def measured(cls, run: RunDirectory) -> Stages:
        """The means of a run's own steps, the first left out. Raises ConfigError where there are too few."""
        rows = [row for row in run.metrics()[1:] if "time/train" in row and "time_s" in row]
        if len(rows) < 3:
            raise ConfigError(f"--from {run.path}: has {len(rows)} measured steps after the first; it takes 3")
        mean, train = statistics.fmean, [row["time/train"] for row in rows]
        pace = (rows[-1]["time_s"] - rows[0]["time_s"]) / (len(rows) - 1)
        busy = mean(1 - row.get("idle/rollout", 0.0) for row in rows)  # this share of a step, engines made its P groups
        sync = mean(row.get("time/weight_sync", 0.0) for row in rows)
        spread = min(1.0, statistics.stdev(train) / mean(train))
        return cls(busy * pace, 0.05, mean(train), sync, spread, f"measured in {run.path}")


@dataclass(frozen=True, slots=True)
class Prediction:
    """Means over the run without the steps in which the queue fills or runs dry; the whole run for staleness."""

    step_s: float
    idle_learner: float
    idle_rollout: float
    staleness_mean: float
    staleness_max: int
    total_s: float
    origin: str

    def as_dict(self) -> dict[str, float | int | str]:
        return asdict(self)

    def text(self) -> str:
        slower = "learning" if self.idle_rollout > self.idle_learner else "generation"
        idle = f"learner {100 * self.idle_learner:.0f} %, rollout {100 * self.idle_rollout:.0f} %"
        return (
            f"  step        {self.step_s:.2f} s; the whole run {self.total_s:.0f} s\n"
            f"  idle        {idle}: {slower} is the bottleneck\n"
            f"  staleness   mean {self.staleness_mean:.2f}, max {self.staleness_max}\n"
            f"  stage times {self.origin}"
        )


@dataclass(slots=True)
class Step:
    """What one simulated step was like."""

    end: float
    waited: float
    engines_idle: float
    ages: list[int]


@dataclass(slots=True)
class Engine:
    """Groups that share one engine: ordinal -> seconds of work left if it had the engine alone."""

    left: dict[int, float] = field(default_factory=dict)
    idle: float = 0.0

    def next_done(self) -> float:
        return min(self.left.values()) * len(self.left) if self.left else FOREVER

    def advance(self, seconds: float) -> list[int]:
        """Let time pass; the groups that are finished."""
        if not self.left:
            self.idle += seconds
            return []
        share = seconds / len(self.left)
        self.left = {ordinal: work - share for ordinal, work in self.left.items()}
        done = [ordinal for ordinal, work in self.left.items() if work <= 1e-9]
        for ordinal in done:
            del self.left[ordinal]
        return done


class Loop:
    """The simulated run; `run` plays it to the end."""

    def __init__(self, config: RunConfig, stages: Stages, seed: int) -> None:
        self.ledger = Ledger(ledger_settings(config))
        self.p, self.steps_wanted = config.algorithm.groups_per_step, config.run.steps
        self.verdicts = tuple(Scored(float(n % 2)) for n in range(config.sampling.group_size))
        self.stages, self.rng, self.room = stages, random.Random(seed), config.groups_in_flight
        self.engines = [Engine() for _ in range(config.topology.rollout.replicas)]
        self.scoring: list[tuple[float, int]] = []  # (when scored, ordinal)
        self.clock = self.waiting_since = 0.0
        self.step_ends = FOREVER
        self.steps: list[Step] = []

    def run(self) -> list[Step]:
        while len(self.steps) < self.steps_wanted or self.step_ends < FOREVER:
            self._lease()
            self._take()
            self._pass_time(min(self.step_ends, min(self.scoring, default=(FOREVER, 0))[0], self._next_generated()))
            self.ledger.facts.clear()  # nobody keeps a journal of this run
        return self.steps

    def _next_generated(self) -> float:
        return self.clock + min(engine.next_done() for engine in self.engines)

    def _vary(self, mean: float) -> float:
        """Log-normal: never negative, its mean kept."""
        s = self.stages.spread
        return mean * self.rng.lognormvariate(-s * s / 2, s)

    def _lease(self) -> None:
        """While the ledger gives leases and engines have room: one more group for the engine with the fewest."""
        while self.ledger.ending is None:
            engine = min(self.engines, key=lambda e: len(e.left))
            if len(engine.left) >= self.room:
                return
            leases = self.ledger.lease(1, HOLDER, f"{self.ledger.issued}", self.clock)
            if not leases:
                return
            engine.left[leases[0].ordinal] = self._vary(self.stages.generate_s / self.p)

    def _take(self) -> None:
        """An idle learner takes its next step; it ends with its weights live."""
        if self.step_ends < FOREVER or len(self.steps) == self.steps_wanted:
            return
        taken = self.ledger.take(self.ledger.next_step, self.clock)
        if isinstance(taken, Waiting):
            return
        self.step_ends = self.clock + self._vary(self.stages.train_s) + self._vary(self.stages.sync_s)
        ages = [self.ledger.version - self.ledger.entries[ordinal].version for ordinal in taken]
        self.steps.append(Step(self.step_ends, self.clock - self.waiting_since, 0.0, ages))

    def _pass_time(self, until: float) -> None:
        for engine in self.engines:
            for ordinal in engine.advance(until - self.clock):
                self._generated(ordinal, until)
        self.clock = until
        for _, ordinal in sorted(scored for scored in self.scoring if scored[0] <= until):
            self.ledger.score(ordinal, self.verdicts, until)
        self.scoring = [scored for scored in self.scoring if scored[0] > until]
        if self.step_ends <= until:
            self.step_ends, self.waiting_since = FOREVER, until
            self.ledger.trained(self.ledger.version, self.ledger.version + 1)
            self.ledger.release(self.ledger.version)
            self.ledger.commit(self.ledger.version - 1)
            self.steps[-1].engines_idle = sum(engine.idle for engine in self.engines) / len(self.engines)

    def _generated(self, ordinal: int, now: float) -> None:
        entry = self.ledger.entries.get(ordinal)
        if entry is None:  # dropped meanwhile
            return
        self.ledger.submit(ordinal, entry.attempt, HOLDER, 1, entry.version, now)
        self.scoring.append((now + self._vary(self.stages.score_s), ordinal))


def predict(config: RunConfig, stages: Stages, seed: int = 0) -> Prediction:
    """Play the whole run. Pure."""
    steps = Loop(config, stages, seed).run()
    filling = min(config.staleness.bound + 1, len(steps) // 3)
    emptying = filling  # at the end nothing new is leased, so engines run dry
    whole, skipped = steps[: len(steps) - emptying], filling
    kept, start = whole[skipped:], whole[skipped - 1] if skipped else Step(0.0, 0.0, 0.0, [])
    seconds = max(kept[-1].end - start.end, 1e-9)
    ages = [age for step in steps for age in step.ages]
    return Prediction(
        step_s=seconds / len(kept),
        idle_learner=sum(step.waited for step in kept) / seconds,
        idle_rollout=min(1.0, max(0.0, kept[-1].engines_idle - start.engines_idle) / seconds),
        staleness_mean=statistics.fmean(ages),
        staleness_max=max(ages),
        total_s=steps[-1].end,
        origin=stages.origin,
    )
