"""The parts of a topology that concern learning. Importable without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollout.config import Section


class AlgorithmConfig(Section):
    """Everything about the update. `preset` names a full set of choices; any other key here overrides one of them.

    None means "as the preset says"; `learner.presets.resolve` turns this into explicit choices.
    """

    preset: str = "dapo"
    groups_per_step: int = Field(8, ge=1, description="groups consumed by one optimizer step (P)")
    learning_rate: float = Field(1.0e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    overrides: dict[str, float | int | str | bool | None] = Field(
        default_factory=dict,
        description="single choices of the preset to change, e.g. {clip_high: 0.28, kl_coef: 0.001}",
    )


class LearnerConfig(Section):
    """How the learner's processes run (`topology.learner`)."""

    ranks: int = Field(1, ge=1)
    gpus: float = Field(0, ge=0, description="GPUs per rank")
    cpus: float = Field(1, gt=0, description="cores (and threads) per rank")
    zero_stage: Literal[0, 1, 2, 3] = 1
    offload_optimizer: bool = False
    offload_params: bool = False
    token_budget: int = Field(
        4096, ge=16, description="tokens per micro-batch, prompts counted once per group where shared"
    )
    gradient_checkpointing: bool = False
    compile: bool = False
    attention: Literal["auto", "eager", "sdpa", "flex", "flash"] = "auto"
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    share_prompts: bool = Field(True, description="compute a group's prompt once for its G answers")
