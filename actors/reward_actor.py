"""The reward actor: leases generated groups, returns verdicts. A thin shell around a Scorer.

run      lease_scoring -> decode -> score (in worker processes) -> verdicts; the tokens never travel back
judge    the same scorer for held-out answers
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import ray

from actors.config import ModelConfig, PromptsConfig, RewardConfig
from actors.pinning import pin
from rollout.types import Prompt, Verdict


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """Everything one reward actor is told."""

    name: str
    model: ModelConfig
    prompts: PromptsConfig
    rewards: tuple[RewardConfig, ...]
    stop: tuple[str, ...]
    seed: int
    queue_endpoint: str
    events_path: str
    cores: tuple[int, ...] = ()
    groups_per_lease: int = 4


@ray.remote(max_restarts=0, max_concurrency=4)
class RewardActor:
    """`run` occupies one thread; `judge`, `gauges` and `close` come in beside it."""

    def __init__(self, spec: RewardSpec) -> None:
        self.spec = spec
        pin(spec.cores)
        self._closing = threading.Event()
        self._groups = self._failures = 0

    def start(self) -> None:
        from actors.prompts import PromptSource
        from actors.rewards import build
        from rollout.event_log import EventLog

        self.prompts = PromptSource.open(self.spec.prompts, self.spec.model, self.spec.seed)
        self.scorer = build(self.spec.rewards, EventLog(self.spec.events_path).emit)

    def run(self) -> str:
        """Score until the run drains. Returns the reason."""
        from rollout.queue_client import Drained, QueueClient

        with QueueClient(self.spec.queue_endpoint, self.spec.name) as queue:
            try:
                while not self._closing.is_set():
                    groups = queue.lease_scoring(self.spec.groups_per_lease, wait_s=2.0)
                    if groups:
                        queue.score({g.ordinal: self._verdicts(g) for g in groups})
            except Drained as end:
                return str(end)
        return "closed"

    def _verdicts(self, group) -> tuple[Verdict, ...]:
        prompt = self.prompts.prompt_for(group.ordinal)
        texts = [self.prompts.decode(t.token_ids) for t in group.trajectories]
        verdicts = tuple(self.scorer.score(prompt, texts, group.trajectories))
        self._groups += 1
        return verdicts

    def judge(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        """One verdict per (held-out prompt, answer)."""
        return [self.scorer.score(p, [t])[0] for p, t in zip(prompts, texts, strict=True)]

    def gauges(self) -> dict[str, float]:
        return {"groups_scored": self._groups}

    def close(self) -> None:
        self._closing.set()
        self.scorer.close()
