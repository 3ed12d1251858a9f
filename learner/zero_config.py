"""What DeepSpeed is told, and what it is not asked for because it cannot keep it. Pure; imports no DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from learner.choices import Choices
from learner.config import AlgorithmConfig, LearnerConfig
from rollout.errors import ConfigError


def deepspeed_config(algorithm: AlgorithmConfig, c: LearnerConfig, device: torch.device) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": c.zero_stage, "overlap_comm": device.type == "cuda"}
    if c.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if c.offload_params:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # micro-batches vary from step to step: the boundary is set by hand
        "gradient_clipping": algorithm.grad_clip,
        "zero_optimization": zero,
        # Each gradient goes into its float32 sum as soon as it is there, while it is in the cache, and is dropped; else
        # DeepSpeed keeps a copy of all of them, adds into it, adds that to the sum and sets it to zero again.
        "bf16": {"enabled": c.compute_dtype == "bfloat16", "check_grad_overflow": True, "immediate_grad_update": True},
        "fp16": {"enabled": c.compute_dtype == "float16", "initial_scale_power": 12, "hysteresis": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


def refuse_what_cannot_be_kept(
    c: LearnerConfig, choices: Choices, component_weights: Mapping[str, float] | None
) -> None:
    """ConfigError for what DeepSpeed cannot keep, and for choices that lack what they stand on."""
    if choices.components == "normalize_then_sum" and not component_weights:
        raise ConfigError(
            "algorithm: components 'normalize_then_sum' needs the names and weights of the rewards; give each entry of "
            "`rewards` a name"
        )
    if c.zero_stage == 0 and c.compute_dtype != "float32":
        raise ConfigError(
            f"topology.learner.zero_stage is 0 with compute_dtype {c.compute_dtype!r}: without ZeRO, DeepSpeed refuses "
            "float32 sums of half-precision gradients ('unsupported mix'), and in half precision the micro-batches of "
            "a step would lose what is small; use zero_stage 1 (on one rank it costs nothing) or compute_dtype float32"
        )
