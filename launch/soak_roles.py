"""The processes of the queue soak: server, network, producers, scorers, the learner's ranks. Any of them may be killed.

    folder/  journal/  server.sock  front.sock   served  (the live version)   checkpoint (a version)   trained.jsonl
             life, rank-1 (how far which rank is in which life of the learner)
             durable/ (what a power cut leaves)   corrupt (ordinals whose content was wrong)   done (by the learner)

What an ordinal must contain, what it scores and whether it has signal are pure functions of the ordinal, so every role
can tell a right group from a wrong one.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from launch.soak_faults import believe_everything, core_type, disk
from rollout.errors import DeadlineError, QueueError
from rollout.event_log import replace_file
from rollout.ledger_states import LedgerSettings
from rollout.queue_client import Drained, Lease, QueueClient
from rollout.queue_proxy import Proxy, Weather
from rollout.queue_server import QueueServer
from rollout.trained_log import TrainedLog
from rollout.types import Group, Scored, Status, Trajectory, Verdict
from rollout.versions import VersionSpan

BEAT_S = 0.1
RANKS = 2  # of the learner: processes "learner" and "rank-1"
LARGE = 6_000  # tokens of an answer: two of them are over the 64 KiB from which clients place groups
SEGMENTS = (20_000, 400_000)  # bytes: so small that segments roll and go all the time
BAD_WEATHER = Weather(lost=0.02, doubled=0.05, delayed=0.1, delay_s=0.3)
DOUBLE_WEATHER = Weather(lost=0.02, doubled=0.4, delayed=0.4, delay_s=0.8)


@dataclass(frozen=True)
class Plan:
    """What every process of one seed is told."""

    folder: str
    settings: LedgerSettings
    sabotage: str = ""
    weather: Weather = BAD_WEATHER

    def path(self, name: str) -> Path:
        return Path(self.folder) / name

    @property
    def front(self) -> str:
        return f"ipc://{self.path('front.sock')}"

    @property
    def server(self) -> str:
        return f"ipc://{self.path('server.sock')}"

    def client(self, name: str) -> QueueClient:
        return QueueClient(self.front, name, beat_s=BEAT_S)

    def number(self, name: str) -> int:
        """A small file that holds one number; 0 while it is missing."""
        try:
            return int(self.path(name).read_text())
        except (OSError, ValueError):
            return 0


def expected_group(ordinal: int, attempt: int, version: int) -> Group:
    """Two answers made of the ordinal: of 8 tokens, or, every third time, of so many that the client places them."""
    n = LARGE if ordinal % 3 == 2 else 8
    tokens = np.arange(n, dtype=np.int32) + ordinal * 100
    answers = tuple(
        Trajectory(
            tokens + k,
            np.ones(n, np.bool_),
            np.linspace(-1, -0.5, n, dtype=np.float32),
            (VersionSpan(version, 0, n),),
            Status.FINISHED,
        )
        for k in range(2)
    )
    return Group(ordinal, np.array([ordinal], np.int32), answers, attempt)


def expected_verdicts(ordinal: int) -> tuple[Verdict, ...]:
    """Every ninth group has no signal."""
    return (Scored(1.0), Scored(1.0 if ordinal % 9 == 4 else 0.0))


def is_right(group: Group) -> bool:
    wanted = expected_group(group.ordinal, 0, 0)
    return all(
        np.array_equal(a.token_ids, b.token_ids)
        and np.array_equal(a.loss_mask, b.loss_mask)
        and np.array_equal(a.behaviour_logprobs, b.behaviour_logprobs)
        for a, b in zip(group.trajectories, wanted.trajectories, strict=True)
    )


def server(plan: Plan) -> None:
    if plan.sabotage == "crc":
        believe_everything()
    made = QueueServer(
        plan.settings, plan.path("journal"), plan.server, segment_bytes=random.choice(SEGMENTS),
        disk=disk(plan.sabotage, plan.path("durable")), events_path=plan.path("events.jsonl"),
    )  # fmt: skip
    made.core_type = core_type(plan.sabotage)
    made.start()
    while True:
        time.sleep(0.2)
        made.gauges()  # raises if the server has died of itself


def network(plan: Plan) -> None:
    Proxy(plan.front, plan.server, plan.weather, random.randrange(1 << 30)).run()


def producer(plan: Plan, name: str) -> None:
    """Hands in and asks for more, in one message or in two."""
    rng = random.Random()
    with plan.client(name) as queue, suppress(Drained):
        leases: list[Lease] = []
        while True:
            version = plan.number("served")
            time.sleep(rng.random() * 0.1)
            if leases and rng.random() < 0.05:
                queue.give_back([leases.pop().ordinal], "changed its mind", failed=False)
            groups = [expected_group(x.ordinal, x.attempt, version) for x in leases]
            if groups and rng.random() < 0.5:
                leases = queue.submit_then_lease(groups, rng.randint(1, 3), wait_s=5.0)
                continue
            if groups:
                queue.submit(groups)
            leases = queue.lease(rng.randint(1, 3), wait_s=5.0)


def scorer(plan: Plan, name: str) -> None:
    with plan.client(name) as queue, suppress(Drained):
        groups: list[Group] = []
        while True:
            verdicts = {g.ordinal: expected_verdicts(g.ordinal) for g in groups}
            if groups and random.random() < 0.5:
                groups = queue.score_then_lease(verdicts, 4, wait_s=5.0)
                continue
            if groups:
                queue.score(verdicts)
            groups = queue.lease_scoring(4, wait_s=5.0)


def learner(plan: Plan) -> None:
    """Rank 0. Starts from its checkpoint, like any learner; checkpoints at random."""
    rng, life = random.Random(), uuid.uuid4().hex
    version = plan.number("checkpoint")
    log = TrainedLog(plan.path("trained.jsonl"))
    with plan.client("learner") as queue:
        log.resumed(version)
        queue.restarted(version)
        replace_file(plan.path("served"), str(version))
        replace_file(plan.path("life"), f"{life} {version}")
        while True:
            try:
                groups = queue.take(version, 0, RANKS, wait_s=120.0)
            except Drained:
                break
            inspect(plan, groups)
            time.sleep(rng.random() * 0.03)
            log.trained(version, version + 1, groups)
            while not reached(plan, life, version + 1):
                time.sleep(0.01)
            queue.trained(version, version + 1)
            version += 1
            replace_file(plan.path("served"), str(version))
            queue.release(version)
            if rng.random() < 0.4:
                checkpoint(plan, log, version)
                queue.commit(version - 1)
        checkpoint(plan, log, version)
        if version:
            queue.commit(version - 1)
    replace_file(plan.path("done"), str(version))


def second_rank(plan: Plan) -> None:
    """Rank 1 takes its own share of each step of the learner's present life, and says so when it has it in the log."""
    log = TrainedLog(plan.path("trained.jsonl"), rank=1)
    with plan.client("rank-1") as queue:
        while not plan.path("done").exists():
            life, version = life_of(plan, "life")
            if not life:  # the first learner has not begun
                time.sleep(0.05)
                continue
            mine, made = life_of(plan, "rank-1")
            step = made if mine == life else version
            try:
                groups = queue.take(step, 1, RANKS, wait_s=1.0)
            except (DeadlineError, Drained, QueueError):  # nothing yet, or the learner has gone back
                time.sleep(0.05)
                continue
            inspect(plan, groups)
            if life_of(plan, "life")[0] == life:
                log.trained(step, step + 1, groups)
                replace_file(plan.path("rank-1"), f"{life} {step + 1}")


def life_of(plan: Plan, name: str) -> tuple[str, int]:
    """Which life of the learner a rank is in, and the version it has reached there."""
    try:
        life, version = plan.path(name).read_text().split()
    except FileNotFoundError:
        return "", 0
    return life, int(version)


def reached(plan: Plan, life: str, version: int) -> bool:
    """Whether rank 1 has made `version` in this life. It may be further: its shares of later steps may be ready."""
    mine, made = life_of(plan, "rank-1")
    return mine == life and made >= version


def inspect(plan: Plan, groups: Sequence[Group]) -> None:
    """Write down the groups that are not what they must be."""
    for wrong in (g for g in groups if not is_right(g)):
        with open(plan.path("corrupt"), "a") as file:
            file.write(f"{wrong.ordinal}\n")


def checkpoint(plan: Plan, log: TrainedLog, version: int) -> None:
    replace_file(plan.path("durable/log_bytes"), str(log.sync()))
    replace_file(plan.path("checkpoint"), str(version))


def role(plan: Plan, name: str) -> None:
    """The body of every process. Dies with the process that started it."""
    threading.Thread(target=_die_with_the_conductor, daemon=True).start()
    sys.stderr = open(plan.path(f"{name}.log"), "a")  # noqa: SIM115 (for the life of the process)
    kind = name.split("-")[0]
    if kind in ("producer", "scorer"):
        {"producer": producer, "scorer": scorer}[kind](plan, name)
    else:
        {"server": server, "network": network, "learner": learner, "rank": second_rank}[kind](plan)
    os._exit(0)


def _die_with_the_conductor() -> None:
    conductor = multiprocessing.parent_process()
    assert conductor is not None
    conductor.join()
    os._exit(1)
