"""PPO's value function: what the return of an answer is expected to be, before each of its tokens.

    own      a second trunk with a linear head, its own AdamW (choices.critic_learning_rate): learner.zero.Zero
    shared   a linear head on the policy's trunk; its error is added to the policy's loss

For a micro-batch it gives values [N] at the positions that predict the targets (the state before each token) and
after [B] at each answer's last token: what a TRUNCATED answer could still have earned, the bootstrap of GAE.
The head starts at 0, so that the first advantages are the plain returns.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from learner.config import LearnerConfig
from learner.policy import Inputs, load_policy


class Values(NamedTuple):
    """values [N] float32, after [B] float32."""

    values: Tensor
    after: Tensor


class ValueHead(nn.Linear):
    """[.., D] -> [..], starting at 0."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.to(self.weight.dtype)).squeeze(-1).float()


class CriticModule(nn.Module):
    """A trunk of its own and a value head."""

    def __init__(self, model_dir: str | Path, config: LearnerConfig, device: torch.device) -> None:
        super().__init__()
        policy = load_policy(model_dir, config.model_copy(update={"lora_rank": 0}), device)
        self.trunk = policy.base.get_decoder()
        self.head = ValueHead(policy.width).to(device)

    def forward(self, inputs: Inputs) -> Values:
        hidden = inputs.through(self.trunk)
        return Values(self.head(hidden[inputs.predict_at]), self.head(hidden[inputs.last_at]))
