"""The walk of one step, free of DeepSpeed: it is handed forward, backward and step. A step makes one version.

    groups -> Share            verdicts, masks, versions as flat arrays                             share.py
           -> updates          which groups each of them learns from: all, unless asked otherwise   updates.py
           -> micro-batches    packed within the token budget, as many on every rank                packing.py
           -> Known            log-probs and values before the step, where something needs them     look.py
           -> advantages       over the whole step                                                  advantages.py
           -> keep             which tokens may give loss                                           objective.py
    per update, per micro-batch  forward -> loss with the update's denominators -> backward         objective.py
    per update                   clip, AdamW; not finite: skipped, named, counted

Where a step is one update, the policy before the step is the policy of the forward pass itself: its log-probs are
`logprobs.detach()` exactly, and no extra pass is spent on them. With several updates (algorithm.mini_batches, epochs)
they are looked at once, before the first, and stay: the ratio measures how far the step has moved, and the clip bounds
it. Advantages, the reference and the critic's old values are likewise those of the whole step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner import advantages
from learner.look import Known, Stepped, Updater, look
from learner.losses import adaptive_kl
from learner.metric_sums import MetricSums
from learner.objective import policy_loss, step_keep, value_loss
from learner.packing import Answer, MicroBatch, pack
from learner.policy import Inputs, PolicyOutput
from learner.segments import Denominators
from learner.share import Share
from learner.updates import updates_of
from rollout.types import Group


@dataclass(frozen=True, slots=True)
class Report:
    """Metrics of a step; where it was not applied, the ordinals whose gradient kept it from being.

    `bad`: not applied, and not because fp16's loss scale had to be lowered.
    """

    metrics: dict[str, float]
    applied: bool = True
    suspects: tuple[int, ...] = ()
    bad: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Everything a micro-batch needs besides the model and its update: columns of the step's flat axis."""

    share: Share
    known: Known
    advised: advantages.Advantages
    keep: Tensor  # [T] bool


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """One turn of the optimizer: its micro-batches, and what its means divide by."""

    batches: Sequence[MicroBatch]
    denominators: Denominators


def run(updater: Updater, groups: Sequence[Group]) -> Report:
    """One optimizer step on this rank's share. Collective."""
    started = time.perf_counter()
    share = Share.of(groups, updater.choices, updater.max_tokens)
    updates = _updates(updater, share)
    first_epoch = updates[: len(updates) // updater.algorithm.epochs]
    plan = _plan(updater, share, look(updater, share, [batch for update in first_epoch for batch in update.batches]))
    report = _learn(updater, plan, updates)
    elapsed = time.perf_counter() - started
    tokens = report.metrics["tokens/trained"]
    return Report(
        report.metrics | {"time/train": elapsed, "throughput/learner_tokens_per_s": tokens / elapsed},
        report.applied,
        report.suspects,
        report.bad,
    )


def _updates(updater: Updater, share: Share) -> list[Update]:
    """The turns of the optimizer, in order."""
    algorithm, everything = updater.algorithm, list(share.answers(updater.choices))
    ordinals = [g.ordinal for g in share.groups]
    made = []
    for groups in updates_of(updater.world, ordinals, updater.version, algorithm.mini_batches, algorithm.epochs):
        batches = _micro_batches(updater, [a for a in everything if a.group in groups])
        mask = share.mask
        if len(groups) < len(ordinals):
            inside = torch.tensor([g in groups for g in range(len(ordinals))], dtype=torch.bool)
            mask = mask & inside[share.group_ids][share.sequence_ids]
        count = Denominators.count(mask, share.sequence_ids, share.group_ids, updater.world.add_up)
        made.append(Update(batches, count))
    return made


def _micro_batches(updater: Updater, answers: Sequence[Answer]) -> list[MicroBatch]:
    """Packed, and as many on every rank: collectives inside forward and backward must meet."""
    budget = updater.config.token_budget
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
    return Plan(share, known, advised, keep)


def _learn(updater: Updater, plan: Plan, updates: Sequence[Update]) -> Report:
    """All updates of the step, and what is to be said of them together."""
    seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    turns: list[Stepped] = []
    sums, blamed = MetricSums(), set[int]()
    for update in updates:
        parts, suspects = _gradient(updater, plan, update, seconds)
        started = time.perf_counter()
        stepped = updater.step()
        seconds["optimizer"] += time.perf_counter() - started
        turns.append(stepped)
        sums = sums + parts
        if not stepped.applied:
            blamed |= suspects or {g for batch in update.batches for g in batch.groups.tolist()}
    sums = _per_step(sums, len(updates), updater.algorithm.epochs)
    sums = sums + plan.share.metrics(updater.version, updater.component_names) + plan.advised.metrics
    metrics = sums.reduced(updater.world.add_up).finish()
    _adapt_kl(updater, metrics, len(plan.share.rewards))
    metrics = named(metrics) | {f"time/learn_{part}": s for part, s in seconds.items()}
    skipped = sum(not stepped.applied for stepped in turns)
    metrics |= {"lr": turns[-1].rate, "step/skipped": float(skipped)}
    metrics["grad_norm"] = max((t.grad_norm for t in turns if math.isfinite(t.grad_norm)), default=0.0)
    bad = any(not stepped.applied and not stepped.rescaled for stepped in turns)
    return Report(metrics, not skipped, plan.share.ordinals_of(sorted(blamed)), bad)


def _gradient(updater: Updater, plan: Plan, update: Update, seconds: dict[str, float]) -> tuple[MetricSums, set[int]]:
    """Forward and backward of one update; its metrics, and the groups (by index) whose loss was not finite."""
    sums, suspects = MetricSums(), set[int]()
    for number, batch in enumerate(update.batches):
        last = number == len(update.batches) - 1
        inputs = Inputs.of(batch, updater.world.device)
        t0 = time.perf_counter()
        out = updater.forward(inputs)
        loss, parts = _loss(updater, plan, update, batch, out)
        finite = math.isfinite(float(loss.detach()))
        t1 = time.perf_counter()
        updater.backward(loss, last)
        if updater.critic is not None and out.values is None:
            parts = parts + _train_critic(updater, plan, update, batch, inputs, last)
        seconds["forward"] += t1 - t0
        seconds["backward"] += time.perf_counter() - t1
        suspects |= set() if finite else set(batch.groups.tolist())
        sums = sums + parts
    return sums, suspects


def _per_step(sums: MetricSums, updates: int, epochs: int) -> MetricSums:
    """Of totals over several updates: losses become those of the mean update, counters count each token once."""
    if updates == 1:
        return sums
    by = {key: updates if "loss" in key else epochs for key in sums.parts if key.startswith("total:")}
    return MetricSums({key: part / by.get(key, 1) for key, part in sums.parts.items()})


def _loss(
    updater: Updater, plan: Plan, update: Update, batch: MicroBatch, out: PolicyOutput
) -> tuple[Tensor, MetricSums]:
    device, known = updater.world.device, plan.known
    old = known.old if updater.algorithm.updates > 1 else None  # else: what the forward pass gives, exactly
    everything = torch.ones(batch.n_loss, dtype=torch.bool, device=device)
    loss, parts = policy_loss(
        updater.choices,
        logprobs=out.logprobs,
        entropy=out.entropy,
        behaviour_logprobs=_at(plan.share.behaviour, batch, device),
        old_logprobs=None if old is None else _at(old, batch, device),
        ref_logprobs=None if known.reference is None else _at(known.reference, batch, device),
        advantages=_at(plan.advised.per_token, batch, device).float(),
        staleness=updater.version - _at(plan.share.versions, batch, device),
        mask=everything,
        keep=_at(plan.keep, batch, device),
        sequence_ids=torch.from_numpy(batch.sequence_ids).to(device),
        group_ids=torch.from_numpy(batch.groups).to(device),
        denominators=update.denominators,
        kl_coef=updater.kl_coef,
    )
    if out.values is not None:
        errors, more = _value_loss(updater, plan, update, batch, out.values)
        loss, parts = loss + errors, parts + more
    return loss, parts


def _value_loss(
    updater: Updater, plan: Plan, update: Update, batch: MicroBatch, values: Tensor
) -> tuple[Tensor, MetricSums]:
    if plan.known.values is None or plan.advised.returns is None:
        raise RuntimeError("a critic is trained, but the values before the step were not looked at")
    device = updater.world.device
    return value_loss(
        updater.choices,
        values=values,
        old_values=_at(plan.known.values, batch, device),
        returns=_at(plan.advised.returns, batch, device).float(),
        mask=_at(plan.keep, batch, device),
        denominators=update.denominators,
    )


def _train_critic(
    updater: Updater, plan: Plan, update: Update, batch: MicroBatch, inputs: Inputs, last: bool
) -> MetricSums:
    assert updater.critic is not None
    loss, parts = _value_loss(updater, plan, update, batch, updater.critic.forward(inputs).values)
    updater.critic.backward(loss, last)
    return parts


def _adapt_kl(updater: Updater, metrics: dict[str, float], answers: int) -> None:
    target = updater.choices.kl_target
    if target is not None and "policy/kl_ref" in metrics:
        observed, horizon = metrics["policy/kl_ref"], updater.choices.kl_horizon
        everywhere = int(updater.world.add_up(torch.tensor([answers]))[0])  # ranks hold different numbers of groups
        updater.kl_coef = adaptive_kl(updater.kl_coef, observed, target, everywhere, horizon)
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
