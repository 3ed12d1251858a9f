"""The walk of one optimizer step, free of DeepSpeed: it is handed forward, backward and step.

    groups -> Share            verdicts, masks, versions as flat arrays                          share.py
           -> micro-batches    packed within the token budget, as many on every rank             packing.py
           -> look             only where something needs the policy before the step: several updates per
                               batch, KL in the reward, a critic, a reference                    policy.py, reference.py
           -> advantages       over the whole step                                               advantages.py
           -> per micro-batch  forward -> loss with the step's denominators -> backward           objective.py
           -> step             clip, AdamW; not finite: skipped, named, counted

With one update per batch the policy before the step is the policy of the forward pass itself, so that its log-probs
are `logprobs.detach()` exactly and no extra pass is spent on them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from learner import advantages
from learner.choices import Choices
from learner.config import LearnerConfig
from learner.metric_sums import MetricSums
from learner.objective import policy_loss
from learner.packing import Layout, MicroBatch, pack
from learner.policy import Inputs, PolicyOutput
from learner.segments import Denominators
from learner.share import Share
from learner.world import World
from rollout.types import Group


@dataclass(frozen=True, slots=True)
class Stepped:
    """What the optimizer did: Stepped(grad_norm=0.41, rate=2e-05, applied=True)."""

    grad_norm: float
    rate: float
    applied: bool


class Updater(Protocol):
    """What the walk needs of an engine."""

    choices: Choices
    config: LearnerConfig
    layout: Layout
    world: World
    version: int
    max_tokens: int | None

    def forward(self, inputs: Inputs) -> PolicyOutput: ...
    def look(self, inputs: Inputs) -> PolicyOutput: ...
    def look_reference(self, inputs: Inputs) -> Tensor | None: ...
    def backward(self, loss: Tensor, last: bool) -> None: ...
    def step(self) -> Stepped: ...


@dataclass
class Report:
    """Metrics of a step, and the ordinals whose gradient kept it from being applied."""

    metrics: dict[str, float]
    applied: bool = True
    suspects: tuple[int, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)


def run(updater: Updater, groups: Sequence[Group]) -> Report:
    """One optimizer step on this rank's share. Collective."""
    started = time.perf_counter()
    share = Share.of(groups, updater.choices, updater.max_tokens)
    batches = _micro_batches(updater, share)
    batch_denominators = Denominators.count(share.mask, share.sequence_ids, share.group_ids, updater.world.add_up)
    advised = _advantages(updater, share)
    sums = share.metrics(updater.version) + advised.metrics
    report = _update(updater, share, batches, advised, batch_denominators, sums)
    elapsed = time.perf_counter() - started
    report.metrics["throughput/learner_tokens_per_s"] = report.metrics.get("tokens/trained", 0.0) / elapsed
    report.metrics["time/train"] = elapsed
    return report


def _micro_batches(updater: Updater, share: Share) -> list[MicroBatch]:
    """Packed, and as many on every rank: collectives inside forward and backward must meet."""
    answers = list(share.answers())
    batches = pack(answers, token_budget=updater.config.token_budget, layout=updater.layout)
    most = updater.world.most(max(len(batches), updater.config.accumulation, 1))
    return batches if len(batches) == most else pack(
        answers, token_budget=updater.config.token_budget, layout=updater.layout, at_least=most
    )  # fmt: skip


def _advantages(updater: Updater, share: Share) -> advantages.Advantages:
    return advantages.compute(
        updater.choices,
        rewards=share.rewards,
        group_ids=share.group_ids,
        mask=share.mask,
        sequence_ids=share.sequence_ids,
        reduce=updater.world.add_up,
    )


def _update(
    updater: Updater,
    share: Share,
    batches: Sequence[MicroBatch],
    advised: advantages.Advantages,
    denominators: Denominators,
    sums: MetricSums,
) -> Report:
    device = updater.world.device
    suspects: list[int] = []
    seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    for number, batch in enumerate(batches):
        t0 = time.perf_counter()
        out = updater.forward(Inputs.of(batch, device))
        loss, parts = policy_loss(
            updater.choices,
            logprobs=out.logprobs,
            entropy=out.entropy,
            mask=torch.ones(batch.n_loss, dtype=torch.bool, device=device),
            group_ids=torch.from_numpy(batch.groups).to(device),
            sequence_ids=torch.from_numpy(batch.sequence_ids).to(device),
            denominators=denominators,
            behaviour_logprobs=_at(share.behaviour, batch, device),
            advantages=_at(advised.per_token, batch, device).float(),
            staleness=updater.version - _at(share.versions, batch, device),
        )
        t1 = time.perf_counter()
        if not math.isfinite(float(loss.detach())):
            suspects.extend(batch.groups.tolist())
        updater.backward(loss, last=number == len(batches) - 1)
        seconds["forward"] += t1 - t0
        seconds["backward"] += time.perf_counter() - t1
        sums = sums + parts
    t2 = time.perf_counter()
    stepped = updater.step()
    seconds["optimizer"] = time.perf_counter() - t2
    metrics = _finish(sums.reduced(updater.world.add_up).finish(), stepped)
    metrics |= {f"time/learn_{k}": v for k, v in seconds.items()}
    named = suspects or range(len(share.groups))
    return Report(metrics, stepped.applied, () if stepped.applied else share.ordinals_of(list(named)))


def _at(column: Tensor, batch: MicroBatch, device: torch.device) -> Tensor:
    """The entries of a flat [T] column that a micro-batch's N positions stand for."""
    return column[torch.from_numpy(batch.origin)].to(device)


def _finish(metrics: dict[str, float], stepped: Stepped) -> dict[str, float]:
    mean, square = metrics.pop("reward/raw", 0.0), metrics.pop("reward/square", 0.0)
    metrics["reward/mean"] = mean
    metrics["reward/std"] = math.sqrt(max(square - mean * mean, 0.0))
    metrics["lr"] = stepped.rate
    metrics["grad_norm"] = stepped.grad_norm if math.isfinite(stepped.grad_norm) else 0.0
    metrics["step/skipped"] = float(not stepped.applied)
    return metrics
