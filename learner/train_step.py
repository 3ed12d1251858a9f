"""The walk of one optimizer step, free of DeepSpeed: it is handed forward, backward and step.

    groups -> Share            verdicts, masks, versions as flat arrays                             share.py
           -> micro-batches    packed within the token budget, as many on every rank                packing.py
           -> Known            log-probs and values before the step, where something needs them     look.py
           -> advantages       over the whole step                                                  advantages.py
           -> keep             which tokens may give loss                                           objective.py
           -> per micro-batch  forward -> loss with the step's denominators -> backward             objective.py
           -> step             clip, AdamW; not finite: skipped, named, counted

A step is one update, so the policy before the step is the policy of the forward pass itself: its log-probs are
`logprobs.detach()` exactly, and no extra pass is spent on them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner import advantages
from learner.look import Known, Updater, look
from learner.losses import adaptive_kl
from learner.metric_sums import MetricSums
from learner.objective import policy_loss, step_keep, value_loss
from learner.packing import MicroBatch, pack
from learner.policy import Inputs, PolicyOutput
from learner.segments import Denominators
from learner.share import Share
from rollout.types import Group


@dataclass(frozen=True, slots=True)
class Report:
    """Metrics of a step; where it was not applied, the ordinals whose gradient kept it from being."""

    metrics: dict[str, float]
    applied: bool = True
    suspects: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Everything a micro-batch needs besides the model: columns of the step's flat axis and what means divide by."""

    share: Share
    known: Known
    advised: advantages.Advantages
    keep: Tensor  # [T] bool
    denominators: Denominators


def run(updater: Updater, groups: Sequence[Group]) -> Report:
    """One optimizer step on this rank's share. Collective."""
    started = time.perf_counter()
    share = Share.of(groups, updater.choices, updater.max_tokens)
    batches = _micro_batches(updater, share)
    plan = _plan(updater, share, look(updater, share, batches))
    report = _update(updater, plan, batches)
    elapsed = time.perf_counter() - started
    tokens = report.metrics["tokens/trained"]
    return Report(
        report.metrics | {"time/train": elapsed, "throughput/learner_tokens_per_s": tokens / elapsed},
        report.applied,
        report.suspects,
    )


def _micro_batches(updater: Updater, share: Share) -> list[MicroBatch]:
    """Packed, and as many on every rank: collectives inside forward and backward must meet."""
    answers, budget = list(share.answers(updater.choices)), updater.config.token_budget
    batches = pack(answers, token_budget=budget, layout=updater.layout)
    most = updater.world.most(max(len(batches), updater.config.accumulation))
    return batches if len(batches) == most else pack(answers, token_budget=budget, layout=updater.layout, at_least=most)


def _plan(updater: Updater, share: Share, known: Known) -> Plan:
    c, add_up = updater.choices, updater.world.add_up
    token_kl = known.old - known.reference if known.old is not None and known.reference is not None else None
    advised = advantages.compute(
        c,
        rewards=share.rewards,
        group_ids=share.group_ids,
        mask=share.mask,
        sequence_ids=share.sequence_ids,
        components=share.component_table(updater.component_names),
        component_weights=updater.component_weights,
        token_kl=token_kl,
        values=known.values,
        bootstrap=known.bootstrap,
        kl_coef=updater.kl_coef,
        reduce=add_up,
    )
    keep = step_keep(
        c,
        scored=advised.scored,
        mask=share.mask,
        sequence_ids=share.sequence_ids,
        behaviour_logprobs=share.behaviour,
        old_logprobs=known.old,
        truncated=share.truncated,
        reduce=add_up,
    )
    denominators = Denominators.count(share.mask, share.sequence_ids, share.group_ids, add_up)
    return Plan(share, known, advised, keep, denominators)


def _update(updater: Updater, plan: Plan, batches: Sequence[MicroBatch]) -> Report:
    sums = plan.share.metrics(updater.version, updater.component_names) + plan.advised.metrics
    suspects: list[int] = []
    seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        inputs = Inputs.of(batch, updater.world.device)
        t0 = time.perf_counter()
        out = updater.forward(inputs)
        loss, parts = _loss(updater, plan, batch, out)
        finite = math.isfinite(float(loss.detach()))
        t1 = time.perf_counter()
        updater.backward(loss, last)
        if updater.critic is not None and out.values is None:
            parts = parts + _train_critic(updater, plan, batch, inputs, last)
        seconds["forward"] += t1 - t0
        seconds["backward"] += time.perf_counter() - t1
        suspects.extend([] if finite else batch.groups.tolist())
        sums = sums + parts
    t2 = time.perf_counter()
    stepped = updater.step()
    seconds["optimizer"] = time.perf_counter() - t2
    metrics = sums.reduced(updater.world.add_up).finish()
    _adapt_kl(updater, metrics, len(plan.share.rewards))
    metrics = named(metrics) | {f"time/learn_{part}": s for part, s in seconds.items()}
    metrics |= {"lr": stepped.rate, "step/skipped": float(not stepped.applied)}
    metrics["grad_norm"] = stepped.grad_norm if math.isfinite(stepped.grad_norm) else 0.0
    blamed = suspects or list(range(len(plan.share.groups)))
    return Report(metrics, stepped.applied, () if stepped.applied else plan.share.ordinals_of(blamed))


def _loss(updater: Updater, plan: Plan, batch: MicroBatch, out: PolicyOutput) -> tuple[Tensor, MetricSums]:
    device, known = updater.world.device, plan.known
    everything = torch.ones(batch.n_loss, dtype=torch.bool, device=device)
    loss, parts = policy_loss(
        updater.choices,
        logprobs=out.logprobs,
        entropy=out.entropy,
        behaviour_logprobs=_at(plan.share.behaviour, batch, device),
        ref_logprobs=None if known.reference is None else _at(known.reference, batch, device),
        advantages=_at(plan.advised.per_token, batch, device).float(),
        staleness=updater.version - _at(plan.share.versions, batch, device),
        mask=everything,
        keep=_at(plan.keep, batch, device),
        sequence_ids=torch.from_numpy(batch.sequence_ids).to(device),
        group_ids=torch.from_numpy(batch.groups).to(device),
        denominators=plan.denominators,
        kl_coef=updater.kl_coef,
    )
    if out.values is not None:
        errors, more = _value_loss(updater, plan, batch, out.values)
        loss, parts = loss + errors, parts + more
    return loss, parts


def _value_loss(updater: Updater, plan: Plan, batch: MicroBatch, values: Tensor) -> tuple[Tensor, MetricSums]:
    if plan.known.values is None or plan.advised.returns is None:
        raise RuntimeError("a critic is trained, but the values before the step were not looked at")
    device = updater.world.device
    return value_loss(
        updater.choices,
        values=values,
        old_values=_at(plan.known.values, batch, device),
        returns=_at(plan.advised.returns, batch, device).float(),
        mask=_at(plan.keep, batch, device),
        denominators=plan.denominators,
    )


def _train_critic(updater: Updater, plan: Plan, batch: MicroBatch, inputs: Inputs, last: bool) -> MetricSums:
    assert updater.critic is not None
    loss, parts = _value_loss(updater, plan, batch, updater.critic.forward(inputs).values)
    updater.critic.backward(loss, last)
    return parts


def _adapt_kl(updater: Updater, metrics: dict[str, float], answers: int) -> None:
    target = updater.choices.kl_target
    if target is not None and "policy/kl_ref" in metrics:
        observed, horizon = metrics["policy/kl_ref"], updater.choices.kl_horizon
        updater.kl_coef = adaptive_kl(updater.kl_coef, observed, target, answers * updater.world.size, horizon)
        metrics["policy/kl_coef"] = updater.kl_coef


def _at(column: Tensor, batch: MicroBatch, device: torch.device) -> Tensor:
    """The entries of a flat [T] column that a micro-batch's N positions stand for."""
    return column[torch.from_numpy(batch.origin)].to(device)


def named(metrics: dict[str, float]) -> dict[str, float]:
    """Sums that only make sense together become the names of metrics.jsonl."""
    mean, square = metrics.pop("reward/raw"), metrics.pop("reward/square")
    metrics["reward/mean"] = mean
    metrics["reward/std"] = math.sqrt(max(square - mean * mean, 0.0))
    metrics["tokens/trained"] = metrics.get("tokens/kept", 0.0)
    return metrics
