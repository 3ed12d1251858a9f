"""The engines as the learner knows them: their actors, what they do, and answers from whoever is alive.

    RemoteEngine   one rollout actor, as the port that weights travel through
    Fleet          all of them: rates for the metrics line, shares of an evaluation

Engines die and come back under their names while the learner goes on; nobody here fails because one did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.evaluation import Answer
from rollout.canary import CanaryText
from rollout.engine import CommitReport, Rendezvous
from rollout.errors import EngineError
from rollout.types import Float32, Int32, Prompt
from rollout.versions import WeightManifest


class RemoteEngine:
    """A rollout actor as the `EnginePort` of weight_sync: each call is one call of the actor's handle."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def join(self, rendezvous: Rendezvous) -> None:
        await self._actor.join.remote(rendezvous)

    async def stage_weights(self, manifest: WeightManifest) -> float:
        return await self._actor.stage.remote(manifest)

    async def commit_weights(self, version: int, digest: str = "") -> CommitReport:
        return await self._actor.commit.remote(version, digest)

    async def confirm_weights(self, version: int) -> None:
        await self._actor.confirm.remote(version)

    async def condemn(self, reason: str) -> None:
        await self._actor.condemn.remote(reason)

    async def discard_weights(self) -> None:
        await self._actor.discard.remote()

    async def score(self, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float) -> Float32:
        return await self._actor.score.remote(prompt_ids, token_ids, temperature)


def canary_texts(prompts: Sequence[Int32]) -> tuple[CanaryText, ...]:
    """Fixed tokens to compare log-probs on: the second half of each prompt, scored after its first."""
    halves = [(ids[: (len(ids) + 1) // 2].tolist(), ids[(len(ids) + 1) // 2 :].tolist()) for ids in prompts]
    return tuple(CanaryText(tuple(a), tuple(b)) for a, b in halves if b)


Ask = Callable[[Mapping[str, Any], float], Mapping[str, Any]]
"""{engine: a call's reference}, seconds -> {engine: what it answered, or the error that says why it did not}"""
LOOK_S = 5.0
ANSWER_S = 300.0  # for one round of held-out answers; then the engines that gave none are passed over


@dataclass
class Fleet:
    """`actors` are the engines that take part now. Called from several threads; each call looks once."""

    ask: Ask
    actors: dict[str, Any] = field(default_factory=dict)
    _seen: dict[str, tuple[float, float]] = field(default_factory=dict)  # tokens, seconds waited, at the last look
    _looked: float = field(default_factory=time.monotonic)

    def join(self, name: str, actor: Any) -> None:
        """A new engine, or a new actor under an old name: it counts from zero."""
        self._seen.pop(name, None)
        self.actors = self.actors | {name: actor}

    def leave(self, name: str) -> None:
        self.actors = {n: a for n, a in self.actors.items() if n != name}

    def rates(self) -> dict[str, float]:
        """Tokens per second and idleness of all engines since this was last asked."""
        said = self.ask({name: actor.gauges.remote() for name, actor in self.actors.items()}, LOOK_S)
        found = {name: gauges for name, gauges in said.items() if not isinstance(gauges, Exception)}
        now = time.monotonic()
        span, self._looked = max(now - self._looked, 1e-9), now
        tokens = waited = 0.0
        for name, gauges in found.items():
            before = self._seen.get(name, (0.0, 0.0))
            self._seen[name] = gauges["tokens_generated"], gauges["waiting_s"]
            tokens += self._seen[name][0] - before[0]
            waited += self._seen[name][1] - before[1]
        return {
            "throughput/rollout_tokens_per_s": tokens / span,
            "idle/rollout": min(1.0, waited / span / len(found)) if found else 1.0,
        }

    def answer(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Greedy answers, shared out; what an engine leaves unanswered the others get. EngineError if none is left."""
        answers: dict[int, Answer] = {}
        able, why = self.actors, ""
        while left := [i for i in range(len(prompts)) if i not in answers]:
            if not able:
                raise EngineError(f"no engine is left to answer {len(left)} of {len(prompts)} prompts{why}")
            shares = {name: left[k :: len(able)] for k, name in enumerate(able)}
            asked = {n: able[n].answer.remote([prompts[i] for i in share]) for n, share in shares.items() if share}
            for name, part in self.ask(asked, ANSWER_S).items():
                if isinstance(part, Exception):
                    able = {n: actor for n, actor in able.items() if n != name}
                    why = f"; {name}: {part}"
                else:
                    answers |= dict(zip(shares[name], part, strict=True))
        return [answers[i] for i in range(len(prompts))]
