"""The parts of a topology that concern learning. Importable without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollout.config import Section


class AlgorithmConfig(Section):
    """Everything about the update. `preset` names a full set of choices; any other key here overrides one of them.

    None means "as the preset says"; `learner.presets.resolve` turns this into explicit choices.
    """

    preset: str = Field(
        "dapo", description="the algorithm by name: grpo, dapo, gspo, cispo, rloo, ...; see docs/algorithms.md"
    )
    groups_per_step: int = Field(8, ge=1, description="groups consumed by one optimizer step (P)")
    learning_rate: float = Field(1.0e-6, gt=0, description="of AdamW, after warm-up")
    betas: tuple[float, float] = Field((0.9, 0.99), description="decay of AdamW's two moments")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW, decoupled from the gradient")
    grad_clip: float = Field(1.0, gt=0, description="largest norm of the whole gradient")
    warmup_steps: int = Field(0, ge=0, description="steps over which the learning rate rises from 0")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="the rate after warm-up, to the last step"
    )
    mini_batches: int = Field(1, ge=1, description="optimizer updates that share out the groups of a step (PPO)")
    epochs: int = Field(1, ge=1, description="times that a step goes through its groups, shuffled anew each time")
    overrides: dict[str, float | int | str | bool | None] = Field(
        default_factory=dict,
        description="single choices of the preset to change, e.g. {clip_high: 0.28, kl_coef: 0.001}",
    )

    @property
    def updates(self) -> int:
        """Optimizer updates per step, and so per version."""
        return self.mini_batches * self.epochs


class LearnerConfig(Section):
    """How the learner's processes run (`topology.learner`)."""

    ranks: int = Field(1, ge=1, description="processes that share each step")
    gpus: float = Field(0, ge=0, description="GPUs per rank")
    cpus: float = Field(1, gt=0, description="cores (and threads) per rank; less than 1 shares a core")
    zero_stage: Literal[0, 1, 2, 3] = Field(
        1, description="shared: 1 optimizer state, 2 and gradients, 3 and parameters"
    )
    offload_optimizer: bool = Field(False, description="keep optimizer state in host memory")
    offload_params: bool = Field(False, description="keep parameters in host memory between uses")
    token_budget: int = Field(
        4096, ge=16, description="tokens per micro-batch, prompts counted once per group where shared"
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations: less memory, more time")
    compile: bool = Field(False, description="torch.compile the model")
    attention: Literal["auto", "eager", "sdpa", "flex", "flash"] = Field("auto", description="the attention kernel")
    compute_dtype: Literal["float32", "bfloat16", "float16"] = Field("bfloat16", description="of forward and backward")
    share_prompts: bool = Field(True, description="compute a group's prompt once for its G answers")
    packing: Literal["packed", "padded"] = Field("packed", description="padded: one row per answer, the plain form")
    head_chunk: int = Field(
        0, ge=0, description="positions whose logits are computed together, by parts of the vocabulary; 0: 2048"
    )
    head_float32: bool = Field(False, description="compute the output head in float32")
    lora_rank: int = Field(
        0, ge=0, description="train adapters of this rank instead of all weights; 0 trains all weights"
    )
    lora_alpha: float = Field(32.0, gt=0, description="adapters are scaled by lora_alpha / lora_rank")
    lora_targets: tuple[str, ...] = Field((), description="module names that get adapters; empty: every linear layer")
    max_bad_steps: int = Field(3, ge=1, description="steps in a row with a non-finite gradient before the run stops")
    reference_offload: bool = Field(False, description="keep the reference model in host memory between steps")
    reference_refresh: int = Field(0, ge=0, description="copy the policy into the reference every k steps; 0: never")
    timeout_s: float = Field(600.0, gt=0, description="deadline of every collective between learner ranks")
    accumulation: int = Field(1, ge=1, description="micro-batches per step at least, even where fewer would fit")
    critic: Literal["own", "shared"] = Field("own", description="PPO's value head: its own trunk, or the policy's")
