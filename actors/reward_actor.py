"""The reward actor: leases generated groups, returns verdicts. A thin shell around a Scorer.

run      lease_scoring -> decode -> score (in worker processes) -> verdicts; the tokens never travel back
judge    the same scorer for held-out answers
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import ray

from actors.config import RewardConfig
from actors.role import Seat, Task, settled, take
from rollout.errors import Drained
from rollout.types import Group, Prompt, Verdict

LEASE_WAIT_S = 2.0
GROUPS_PER_LEASE = 8


@ray.remote(max_restarts=0, max_concurrency=4)
class RewardActor:
    """`run` occupies one thread; `judge`, `gauges` and `close` come in beside it."""

    def __init__(self, task: Task, seat: Seat, rewards: tuple[RewardConfig, ...]) -> None:
        self.task, self.seat, self.rewards = task, seat, rewards
        self._closing = threading.Event()
        self._groups = 0
        take(seat, task)

    def start(self) -> None:
        from actors.rewards import build

        self.prompts = self.task.prompt_source()
        log_dir = Path(self.task.run_dir) / "logs"
        processes = max(1, len(self.seat.cores))
        self.scorer = build(self.rewards, self.task.events().append, processes=processes, log_dir=log_dir)
        settled()

    def run(self) -> str:
        """Score until the run drains; returns what the queue said."""
        from rollout.queue_client import QueueClient

        with QueueClient(self.task.queue, self.seat.name) as queue:
            try:
                groups = queue.lease_scoring(GROUPS_PER_LEASE, LEASE_WAIT_S)
                while not self._closing.is_set():
                    judged = {g.ordinal: self._verdicts(g) for g in groups}
                    self._groups += len(groups)
                    groups = queue.score_then_lease(judged, GROUPS_PER_LEASE, LEASE_WAIT_S)
            except Drained as end:
                return str(end)
        return "closed"

    def _verdicts(self, group: Group) -> tuple[Verdict, ...]:
        from actors.prompts import answer_text

        prompt = self.prompts.prompt_for(group.ordinal)
        stop = self.task.sampling.stop
        texts = [answer_text(self.prompts.tokenizer, t.token_ids, stop) for t in group.trajectories]
        return tuple(self.scorer.score(prompt, texts, group.trajectories))

    def judge(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        """One verdict per held-out prompt and its answer."""
        return self.scorer.judge(prompts, texts)

    def gauges(self) -> dict[str, float]:
        return {"groups_scored": self._groups, **self.scorer.gauges()}

    def close(self) -> None:
        self._closing.set()
        self.scorer.close()
