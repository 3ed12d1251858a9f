"""The frozen policy that a KL term compares with: a second copy of the model, or the policy without its adapters.

    Copy         loaded from the model directory; with `reference_offload` it lives in host memory between steps;
                 every `reference_refresh` steps it takes over the policy's weights
    AdapterOff   with LoRA the base weights are the reference already: nothing is copied

Under ZeRO-3 a Copy is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from learner.config import LearnerConfig
from learner.policy import Inputs, PolicyModule, load_policy
from rollout.errors import ConfigError


class Reference(Protocol):
    """Log-probs [N] that the reference gives to a micro-batch's targets."""

    def look(self, inputs: Inputs, temperature: float) -> Tensor: ...


class Copy:
    """A second model. `state()` and `restore()` are what a checkpoint keeps of it, once it was refreshed."""

    def __init__(self, model_dir: str | Path, config: LearnerConfig, device: torch.device) -> None:
        frozen = config.model_copy(update={"lora_rank": 0, "gradient_checkpointing": False})
        self._home = torch.device("cpu") if config.reference_offload else device
        self._device = device
        self.every = config.reference_refresh
        self._policy = load_policy(model_dir, frozen, self._home).requires_grad_(False).eval()

    def look(self, inputs: Inputs, temperature: float) -> Tensor:
        self._policy.to(self._device)  # a no-op unless it was offloaded
        with torch.no_grad():
            found = self._policy(inputs, temperature).logprobs
        self._policy.to(self._home)
        return found

    def take_over(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Become what the policy is now."""
        own = dict(self._policy.base.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                own[name].copy_(tensor)

    def is_due(self, version: int) -> bool:
        """Whether the policy of this version is to be taken over."""
        return self.every > 0 and version % self.every == 0

    def state(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._policy.base.named_parameters()) if self.every else iter(())


class AdapterOff:
    """The policy's own base weights."""

    def __init__(self, policy: PolicyModule) -> None:
        self._policy = policy

    def look(self, inputs: Inputs, temperature: float) -> Tensor:
        with torch.no_grad(), self._policy.model.disable_adapter():
            return self._policy(inputs, temperature).logprobs


def build(
    policy: PolicyModule, model_dir: str | Path, config: LearnerConfig, device: torch.device
) -> Copy | AdapterOff:
    """The cheapest reference the configuration allows."""
    if not config.lora_rank:
        return Copy(model_dir, config, device)
    if config.reference_refresh:
        raise ConfigError(
            f"topology.learner.reference_refresh is {config.reference_refresh} with lora_rank {config.lora_rank}: the "
            "reference is the base model under the adapters and cannot be refreshed; set one of the two to 0"
        )
    return AdapterOff(policy)
