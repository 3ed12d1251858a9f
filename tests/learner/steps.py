"""What tests of the learner's steps share: an engine in float32, its weights, groups as those weights make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from learner import presets
from learner.config import AlgorithmConfig, LearnerConfig
from learner.engine import LearnerEngine
from rollout.types import Group

MakeGroups = Callable[..., list[Group]]
STAGES = [(0, "float32")] + [(stage, dtype) for stage in (1, 2, 3) for dtype in ("float32", "bfloat16")]


def engine(
    model: Path,
    preset: str = "dapo",
    overrides: dict[str, object] | None = None,
    mini_batches: int = 1,
    epochs: int = 1,
    rate: float = 1e-3,
    **learner: object,
) -> LearnerEngine:
    update = {"learning_rate": rate, "mini_batches": mini_batches, "epochs": epochs}
    algorithm = AlgorithmConfig.model_validate({"preset": preset, "overrides": overrides or {}} | update)
    config = LearnerConfig.model_validate({"compute_dtype": "float32"} | learner)
    choices = presets.resolve(algorithm)
    return LearnerEngine(model, choices, algorithm, config, serving_dtype="float32", component_weights={"exact": 1.0})


def weights(e: LearnerEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in e.state_tensors()}


def with_behaviour_of(e: LearnerEngine, groups: list[Group]) -> list[Group]:
    """The groups as if the learner's own weights had sampled them."""
    return [
        replace(
            g,
            trajectories=tuple(
                replace(t, behaviour_logprobs=e.score(g.prompt_ids.tolist(), t.token_ids.tolist()))
                for t in g.trajectories
            ),
        )
        for g in groups
    ]
