"""What of a learner goes into a checkpoint, and how it comes back into another one.

    policy/master/<name>      float32 weights, whole          policy/exp_avg/<name>, policy/exp_avg_sq/<name>
    critic/...                the same for a critic
    reference/<name>          only where the reference is refreshed, so that it is not the model directory
    rng/<rank>                torch's random state            numbers: version, update counts, controllers

Under ZeRO every read is a gather: all ranks walk the same list, rank 0 writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from learner import checkpoint
from learner.packing import pack
from learner.policy import Inputs

if TYPE_CHECKING:
    from learner.engine import LearnerEngine, Zero


def save(learner: LearnerEngine, path: Path) -> None:
    numbers = {"bad_steps": float(learner.bad_steps)}
    numbers |= {f"steps/{part}": float(zero.steps) for part, zero in _parts(learner).items()}
    checkpoint.write(path, _state(learner), learner.version, numbers, writes=learner.world.rank == 0)
    learner.world.meet()


def load(learner: LearnerEngine, path: Path) -> None:
    """Raises TornCheckpoint on every rank, before anything is changed."""
    manifest = checkpoint.read_manifest(path)
    parts = _parts(learner)
    params = {part: dict(zero.trained()) for part, zero in parts.items()}
    for part, zero in parts.items():
        zero.make_moments(lambda: _nothing(learner), int(manifest.numbers[f"steps/{part}"]))
    for key, tensor in checkpoint.tensors(path, manifest):
        part, kind, name = _split(key)
        if part == "rng":
            if int(name) == learner.world.rank:
                torch.set_rng_state(tensor)
        else:
            parts[part].write(params[part][name], kind, tensor.to(learner.world.device))
    learner.version, learner.bad_steps = manifest.version, int(manifest.numbers["bad_steps"])


def _parts(learner: LearnerEngine) -> dict[str, Zero]:
    return {"policy": learner.zero}


def _state(learner: LearnerEngine) -> Iterator[tuple[str, Tensor]]:
    for part, zero in _parts(learner).items():
        for name, param in zero.trained():
            for kind in ("master", *(zero.MOMENTS if zero.steps else ())):
                yield f"{part}/{kind}/{name}", zero.read(param, kind)
    for rank, state in enumerate(learner.world.gather(torch.get_rng_state())):
        yield f"rng/state/{rank}", state


def _split(key: str) -> tuple[str, str, str]:
    part, kind, name = key.split("/", 2)
    return part, kind, name


def _nothing(learner: LearnerEngine) -> Tensor:
    """A zero that hangs on every parameter of the policy."""
    (empty,) = pack([], token_budget=1, layout=learner.layout, at_least=1)
    return learner.forward(Inputs.of(empty, learner.world.device)).logprobs.sum()
