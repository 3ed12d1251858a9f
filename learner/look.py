"""What has to be known of the policy before the step, on the flat axis of T answer tokens; nothing if nothing asks.

    old         KL in the reward, M2PO's choice of tokens,    one pass of the policy without gradient
                several updates in the step
    reference   any KL to a reference                          one pass of the reference
    values      a critic, with `bootstrap` for truncated answers

Also here: what the walk of a step needs of an engine (`Updater`), so that tests can hand it a fake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from learner.choices import Choices
from learner.config import AlgorithmConfig, LearnerConfig
from learner.packing import Layout, MicroBatch
from learner.policy import Inputs, PolicyOutput
from learner.reference import Reference
from learner.share import Share
from learner.world import World


@dataclass(frozen=True, slots=True)
class Stepped:
    """What the optimizer did: Stepped(grad_norm=0.41, rate=2e-05, applied=True).

    Not applied but `rescaled`: fp16's loss scale was too large and has been lowered; the gradient may be sound.
    """

    grad_norm: float
    rate: float
    applied: bool
    rescaled: bool = False


class Trainable(Protocol):
    """A module with its optimizer (learner.zero.Zero)."""

    def forward(self, *args: Any) -> Any: ...
    def backward(self, loss: Tensor, last: bool) -> None: ...


class Updater(Protocol):
    """What the walk needs of an engine."""

    choices: Choices
    algorithm: AlgorithmConfig
    config: LearnerConfig
    layout: Layout
    world: World
    version: int
    temperature: float
    kl_coef: float
    max_tokens: int | None
    component_names: tuple[str, ...]

    @property
    def component_weights(self) -> Tensor | None: ...
    @property
    def reference(self) -> Reference | None: ...
    @property
    def critic(self) -> Trainable | None: ...
    def forward(self, inputs: Inputs) -> PolicyOutput: ...
    def look(self, inputs: Inputs) -> PolicyOutput: ...
    def look_values(self, inputs: Inputs) -> tuple[Tensor, Tensor]: ...
    def backward(self, loss: Tensor, last: bool) -> None: ...
    def step(self) -> Stepped: ...


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """Columns [T] (bootstrap [N]), float32; NaN-free: 0 where the model was not asked. None: nobody needs it."""

    old: Tensor | None = None
    reference: Tensor | None = None
    values: Tensor | None = None
    bootstrap: Tensor | None = None


def look(updater: Updater, share: Share, batches: Sequence[MicroBatch]) -> Known:
    """Collective: every rank runs the same passes over as many micro-batches."""
    c = updater.choices
    wants_old = c.needs_old_logprobs(updater.algorithm.updates)
    wants_values = c.needs_critic
    if not (wants_old or wants_values or updater.reference is not None):
        return Known()
    old, reference, values = (torch.zeros(len(share.mask)) for _ in range(3))
    bootstrap = torch.zeros(len(share.rewards))
    for batch in batches:
        inputs = Inputs.of(batch, updater.world.device)
        origin = torch.from_numpy(batch.origin)
        if wants_old:
            old[origin] = updater.look(inputs).logprobs.float().cpu()
        if updater.reference is not None:
            reference[origin] = updater.reference.look(inputs, updater.temperature).float().cpu()
        if wants_values:
            here, after = updater.look_values(inputs)
            values[origin] = here.float().cpu()
            bootstrap[torch.from_numpy(batch.sequences)] = after.float().cpu()
    return Known(
        old if wants_old else None,
        reference if updater.reference is not None else None,
        values if wants_values else None,
        torch.where(share.truncated, bootstrap, torch.zeros_like(bootstrap)) if wants_values else None,
    )
