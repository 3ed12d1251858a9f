"""Values that are fine alone and cannot work together. Each row gives the field, its value, the reason and the remedy.

Pure: a config in, problems out, in the order in which a user would mend them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from rollout.vllm_settings import ADAPTER_RANKS

if TYPE_CHECKING:
    from launch.config import RunConfig

BYTES_PER_TOKEN = 9  # id int32, log-prob float32, mask bool: what one answer token weighs in the queue


class Problem(NamedTuple):
    """Problem("topology.queue.min_viable", 9, "a group has only sampling.group_size = 8 answers; lower it")."""

    path: str
    value: object
    text: str

    def __str__(self) -> str:
        value = f"{self.value:g}" if isinstance(self.value, float) else self.value
        return f"{self.path}: {value}: {self.text}"


def contradictions(config: RunConfig) -> Iterator[Problem]:
    """Every pair of values that contradict each other; empty when the run can be planned."""
    yield from _devices(config)
    yield from _groups(config)
    yield from _lengths(config)
    yield from _learning(config)
    yield from _adapters(config)
    yield from _rewards(config)


def _devices(c: RunConfig) -> Iterator[Problem]:
    rollout, learner = c.topology.rollout, c.topology.learner
    for path, gpus in (("topology.rollout.gpus", rollout.gpus), ("topology.learner.gpus", learner.gpus)):
        if gpus > 0 and c.device == "cpu":
            yield Problem(path, gpus, f"device is cpu, which has none; set {path} to 0, or device to auto")
        if gpus > 1 and gpus != int(gpus):
            yield Problem(path, gpus, "above 1 only whole GPUs can be given to a process; round it")
    for path, cpus in (("topology.rollout.cpus", rollout.cpus), ("topology.learner.cpus", learner.cpus)):
        if cpus > 1 and cpus != int(cpus):
            yield Problem(path, cpus, "above 1 only whole cores can be given to a process; round it")
    if learner.gpus > 1:
        ranks = "set it to 1 and topology.learner.ranks to the number of GPUs"
        yield Problem("topology.learner.gpus", learner.gpus, f"a learner rank drives one GPU; {ranks}")
    if c.device == "cuda" and not c.uses_gpus:
        remedy = "set topology.rollout.gpus and topology.learner.gpus, or device to auto"
        yield Problem("device", "cuda", f"no role asks for a GPU; {remedy}")
    if c.weights.plane == "nccl" and not (rollout.gpus > 0 and learner.gpus > 0):
        sides = f"rollout has {rollout.gpus:g}, the learner {learner.gpus:g}"
        yield Problem("weights.plane", c.weights.plane, f"needs GPUs on both sides ({sides}); use auto")
    if c.plane == "ipc" and (reason := why_not_ipc(c)):
        yield Problem("weights.plane", "ipc", f"{reason}; use auto")
    if c.plane == "gloo" and rollout.gpus > 1:
        remedy = f"here are {rollout.gpus:g} workers per engine; use store or nccl"
        yield Problem("weights.plane", "gloo", f"has one receiver per engine, and {remedy}")
    if learner.gpus == 0 and learner.attention == "flash":
        yield Problem("topology.learner.attention", "flash", "needs a GPU, and topology.learner.gpus is 0; use auto")
    if learner.gpus == 0 and learner.compute_dtype == "float16":
        yield Problem("topology.learner.compute_dtype", "float16", "works on GPUs only; use bfloat16 or float32")


def why_not_ipc(c: RunConfig) -> str:
    """What keeps weights from travelling inside one GPU; "" if nothing does."""
    rollout, learner = c.topology.rollout, c.topology.learner
    if not (rollout.gpus > 0 and learner.gpus > 0):
        return f"needs a GPU under both sides (rollout has {rollout.gpus:g}, the learner {learner.gpus:g})"
    if learner.ranks > 1 or rollout.replicas > 1:
        sides = f"here are {learner.ranks} and {rollout.replicas}"
        return f"takes one learner rank and one engine, for torch counts one reader per bucket ({sides})"
    if rollout.gpus + learner.gpus > 1 + 1e-6:
        shares = f"topology.rollout.gpus {rollout.gpus:g} and topology.learner.gpus {learner.gpus:g} are more than one"
        return f"needs learner and engine on one GPU, and {shares}"
    return ""


def _groups(c: RunConfig) -> Iterator[Problem]:
    queue, p, g = c.topology.queue, c.algorithm.groups_per_step, c.sampling.group_size
    if queue.min_viable > g:
        reason = f"a group has only sampling.group_size = {g} answers; lower it"
        yield Problem("topology.queue.min_viable", queue.min_viable, reason)
    if c.topology.learner.ranks > p:
        reason = f"a step has algorithm.groups_per_step = {p} groups, fewer than ranks; lower it or raise that"
        yield Problem("topology.learner.ranks", c.topology.learner.ranks, reason)
    if queue.group_deadline_s < queue.lease_s:
        reason = f"groups would be dropped before their lease ends (lease_s = {queue.lease_s:g}); raise it"
        yield Problem("topology.queue.group_deadline_s", queue.group_deadline_s, reason)
    if c.topology.rollout.replicas > c.slots:
        reason = (
            f"there are {c.slots} slots, (staleness.bound + 1) * algorithm.groups_per_step; lower it or raise those"
        )
        yield Problem("topology.rollout.replicas", c.topology.rollout.replicas, reason)
    payload = c.slots * g * c.sampling.max_tokens * BYTES_PER_TOKEN
    if payload > queue.max_bytes:
        reason = f"the answers in {c.slots} slots can take {payload} bytes, so the run could stall; raise it to that"
        yield Problem("topology.queue.max_bytes", queue.max_bytes, reason)
    if queue.retain and queue.durability == "memory":
        reason = "topology.queue.durability memory keeps nothing; use os or fsync"
        yield Problem("topology.queue.retain", queue.retain, reason)


def _lengths(c: RunConfig) -> Iterator[Problem]:
    longest, budget, context = c.sampling.max_tokens, c.topology.learner.token_budget, c.model.max_context
    if longest >= budget:
        reason = f"one answer does not fit into topology.learner.token_budget = {budget}; lower it or raise that"
        yield Problem("sampling.max_tokens", longest, reason)
    if context is not None and longest >= context:
        reason = f"leaves no room for a prompt in model.max_context = {context}; lower it or raise that"
        yield Problem("sampling.max_tokens", longest, reason)


def _learning(c: RunConfig) -> Iterator[Problem]:
    learner, warmup = c.topology.learner, c.algorithm.warmup_steps
    if c.evaluate.every and not c.prompts.held_out and not c.prompts.held_out_path:
        reason = "there is nothing to evaluate on; set prompts.held_out, or evaluate.every to 0"
        yield Problem("evaluate.every", c.evaluate.every, reason)
    if warmup >= c.run.steps:
        reason = f"the run would end while warming up (run.steps = {c.run.steps}); lower it"
        yield Problem("algorithm.warmup_steps", warmup, reason)
    if learner.offload_optimizer and learner.zero_stage == 0:
        yield Problem(
            "topology.learner.offload_optimizer", "true", "needs topology.learner.zero_stage 1, 2 or 3; it is 0"
        )
    if learner.offload_params and learner.zero_stage != 3:
        reason = f"needs topology.learner.zero_stage 3; it is {learner.zero_stage}"
        yield Problem("topology.learner.offload_params", "true", reason)


def _adapters(c: RunConfig) -> Iterator[Problem]:
    learner, lora = c.topology.learner, c.weights.lora
    if lora != "auto" and not learner.lora_rank:
        reason = "there are no adapters, topology.learner.lora_rank is 0; set that, or weights.lora to auto"
        yield Problem("weights.lora", lora, reason)
    elif lora == "adapter" and (reason := why_not_adapters(c)):
        yield Problem("weights.lora", lora, f"{reason}; use merged")
    for target in {t.rpartition(".")[2] for t in learner.lora_targets} & {"lm_head", "embed_tokens"}:
        reason = "the learner would not train an adapter there; leave it out"
        yield Problem("topology.learner.lora_targets", target, reason)


def why_not_adapters(c: RunConfig) -> str:
    """What keeps adapters from travelling alone; "" if nothing does."""
    learner, served = c.topology.learner, c.model.dtype
    if c.plane in ("nccl", "ipc"):
        return f"vLLM's {c.plane} transfer writes into the layers of the model and knows no adapters"
    if learner.lora_rank > ADAPTER_RANKS[-1]:
        return f"engines have room for rank {ADAPTER_RANKS[-1]}, topology.learner.lora_rank is {learner.lora_rank}"
    if learner.compute_dtype not in (served, "float32"):
        return f"the learner's base in {learner.compute_dtype} would not be the engines' in {served} (model.dtype)"
    return ""


def _rewards(c: RunConfig) -> Iterator[Problem]:
    if all(r.weight == 0 for r in c.rewards):
        yield Problem("rewards", f"{len(c.rewards)} of weight 0", "there is nothing to learn; give one a weight")
    seen: dict[str, int] = {}
    for n, reward in enumerate(c.rewards):
        name, path = reward.component, f"rewards.{n}.{'label' if reward.label else 'name'}"
        if name in ("mean", "std"):
            yield Problem(path, name, f"would collide with the metric reward/{name}; give it another label")
        if name in seen:
            yield Problem(path, name, f"is also the name of rewards.{seen[name]}; tell them apart with label")
        seen.setdefault(name, n)
        if reward.kind == "overlong" and reward.args["max"] != c.sampling.max_tokens:
            reason = f"is not sampling.max_tokens = {c.sampling.max_tokens}; make them equal"
            yield Problem(f"rewards.{n}.args.max", reward.args["max"], reason)
