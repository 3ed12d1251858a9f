"""What of a learner goes into a checkpoint, and how it comes back into another one.

    policy/master/<name>      float32 weights, whole          policy/exp_avg/<name>, policy/exp_avg_sq/<name>
    critic/...                the same for a critic
    reference/weight/<name>   only where the reference is refreshed, so that it is not the model directory
    rng/state/<rank>          torch's random state            numbers: version, update counts, controllers

Under ZeRO every read is a gather: all ranks walk the same list, rank 0 writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from learner import checkpoint
from learner.packing import pack
from learner.policy import Inputs
from learner.reference import Copy
from rollout.errors import DivergedError

if TYPE_CHECKING:
    from learner.engine import LearnerEngine
    from learner.zero import Zero


def save(learner: LearnerEngine, path: Path) -> None:
    """Raises DivergedError, on every rank, where the ranks no longer hold the same weights."""
    if not learner.world.agree(fingerprint(learner)):
        raise DivergedError(
            f"version {learner.version}: the ranks of the learner hold different weights, so no checkpoint was made; "
            "resume from the one before"
        )
    numbers = {"bad_steps": float(learner.bad_steps), "kl_coef": learner.kl_coef}
    numbers |= {f"steps/{part}": float(zero.steps) for part, zero in _parts(learner).items()}
    checkpoint.write(path, _state(learner), learner.version, numbers, writes=learner.world.rank == 0)
    learner.world.meet()


def load(learner: LearnerEngine, path: Path) -> None:
    """Raises TornCheckpoint on every rank, before anything is changed."""
    manifest = checkpoint.read_manifest(path)
    parts = _parts(learner)
    params = {part: dict(zero.trained()) for part, zero in parts.items()}
    for part, zero in parts.items():
        zero.make_moments(partial(_nothing, learner, part), int(manifest.numbers[f"steps/{part}"]))
    kept: dict[str, Tensor] = {}
    for key, tensor in checkpoint.tensors(path, manifest):
        part, kind, name = _split(key)
        if part == "rng":
            if int(name) == learner.world.rank:
                torch.set_rng_state(tensor)
        elif part == "reference":
            kept[name] = tensor
        else:
            parts[part].write(params[part][name], kind, tensor.to(learner.world.device))
    if isinstance(learner.reference, Copy) and kept:
        learner.reference.take_over(iter(kept.items()))
    learner.version, learner.bad_steps = manifest.version, int(manifest.numbers["bad_steps"])
    learner.kl_coef = manifest.numbers["kl_coef"]


def fingerprint(learner: LearnerEngine) -> int:
    """A checksum of the bits of the weights that a rank holds whole (under ZeRO-3 there are none)."""
    total = 0
    for number, (_, param) in enumerate(learner.policy.named_parameters() if learner.config.zero_stage < 3 else ()):
        bits = param.detach().contiguous().view(torch.int32 if param.element_size() == 4 else torch.int16)
        total += (number + 1) * int(bits.sum(dtype=torch.int64))
    return total % (1 << 62)


def _parts(learner: LearnerEngine) -> dict[str, Zero]:
    return {"policy": learner.zero} | ({"critic": learner.critic} if learner.critic else {})


def _state(learner: LearnerEngine) -> Iterator[tuple[str, Tensor]]:
    for part, zero in _parts(learner).items():
        for name, param in zero.trained():
            for kind in ("master", *(zero.MOMENTS if zero.steps else ())):
                yield f"{part}/{kind}/{name}", zero.read(param, kind)
    if isinstance(learner.reference, Copy):
        yield from ((f"reference/weight/{name}", tensor) for name, tensor in learner.reference.state())
    for rank, state in enumerate(learner.world.gather(torch.get_rng_state())):
        yield f"rng/state/{rank}", state


def _split(key: str) -> tuple[str, str, str]:
    part, kind, name = key.split("/", 2)
    return part, kind, name


def _nothing(learner: LearnerEngine, part: str) -> Tensor:
    """A zero that hangs on every parameter of the policy, or of the critic."""
    (empty,) = pack([], token_budget=1, layout=learner.layout, at_least=1)
    inputs = Inputs.of(empty, learner.device)
    if part == "policy":
        out = learner.forward(inputs)
        return out.logprobs.sum() + (0.0 if out.values is None else out.values.sum())
    assert learner.critic is not None
    return learner.critic.forward(inputs).values.sum()
