"""The policy as one module: token ids in, log-probs of the wanted targets out. The logits never exist as a whole.

    MicroBatch -> Inputs (tensors on the device) -> PolicyModule -> PolicyOutput(logprobs [N], entropy [N])

The head is applied inside `forward`, so that ZeRO-3 gathers it like any other parameter, and only to the N positions
that have a loss. Any Hugging Face causal language model of the usual make (a trunk and `lm_head`) will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from learner import attention
from learner.config import LearnerConfig
from learner.logprobs import chunked_logprobs
from learner.packing import Layout, MicroBatch
from rollout.errors import ConfigError

HEAD_CHUNK = 2048  # positions per tile of logits: the product with the head likes many, the tile stays small anyway
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """A micro-batch on the device. T flat positions in `shape` = (rows, width); N positions with loss."""

    token_ids: Tensor  # [rows, width]
    position_ids: Tensor  # [rows, width]
    predict_at: Tensor  # [N] into the flat T
    targets: Tensor  # [N]
    last_at: Tensor  # [B] into the flat T
    masks: attention.Masks | None  # None where padded
    attention_mask: Tensor | None  # [rows, width] where padded

    @staticmethod
    def of(batch: MicroBatch, device: torch.device) -> Inputs:
        ids = torch.from_numpy(batch.token_ids).to(device).view(batch.shape)
        padded = bool(batch.lengths)
        rows = None
        if padded:
            lengths = torch.tensor(batch.lengths, device=device)
            rows = (torch.arange(batch.shape[1], device=device) < lengths[:, None]).long()
        return Inputs(
            token_ids=ids,
            position_ids=torch.from_numpy(batch.position_ids).to(device).view(batch.shape),
            predict_at=torch.from_numpy(batch.predict_at).to(device),
            targets=torch.from_numpy(batch.targets).to(device),
            last_at=torch.from_numpy(batch.last_at).to(device),
            masks=None if padded else attention.Masks(batch.blocks, device),
            attention_mask=rows,
        )

    def through(self, trunk: nn.Module) -> Tensor:
        """Hidden states [T, D] of a Hugging Face decoder."""
        layout: dict[str, Any] = {} if self.masks is None else {"layout": self.masks}
        hidden = trunk(
            input_ids=self.token_ids,
            position_ids=self.position_ids,
            attention_mask=self.attention_mask,
            use_cache=False,
            **layout,
        ).last_hidden_state
        return hidden.reshape(-1, hidden.shape[-1])


class PolicyOutput(NamedTuple):
    """logprobs [N] and entropy [N], float32; with a value head also values [N] and after [B] (learner/critic.py)."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None = None
    after: Tensor | None = None


class PolicyModule(nn.Module):
    """A causal language model that answers only what the loss asks for."""

    def __init__(self, model: Any, head_chunk: int = 0, head_float32: bool = False) -> None:
        super().__init__()
        self.model: Any = model  # Hugging Face's model, perhaps wrapped by peft
        self.head_chunk = head_chunk or HEAD_CHUNK
        self.head_float32 = head_float32
        self.value_head: nn.Module | None = None  # set where policy and critic share the trunk

    @property
    def base(self) -> Any:
        """The language model itself, without peft's wrapping."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def width(self) -> int:
        """D, the size of a hidden state."""
        return int(self.base.config.get_text_config().hidden_size)

    def forward(self, inputs: Inputs, temperature: float) -> PolicyOutput:
        base = self.base
        hidden = inputs.through(base.get_decoder())
        states = hidden.index_select(0, inputs.predict_at)
        head = base.get_output_embeddings()
        logprobs, entropy = chunked_logprobs(
            states, head.weight, inputs.targets, temperature, self.head_chunk, head.bias, self.head_float32
        )
        if self.value_head is None:
            return PolicyOutput(logprobs, entropy)
        return PolicyOutput(logprobs, entropy, self.value_head(states), self.value_head(hidden[inputs.last_at]))


def layout_of(config: LearnerConfig) -> Layout:
    """Which of the three layouts the configuration asks for."""
    if config.packing == "padded":
        return "padded"
    return "shared" if config.share_prompts else "packed"


def load_policy(model_dir: str | Path, config: LearnerConfig, device: torch.device) -> PolicyModule:
    """The model of a directory, ready to train: weights in the compute type, attention for the layout, adapters."""
    from transformers import AutoModelForCausalLM

    kernel = _kernel(config, device)
    model: Any
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(model_dir), dtype=DTYPES[config.compute_dtype], attn_implementation=kernel, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path {str(model_dir)!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    if config.compile:
        _compile(model)
    if config.lora_rank:
        model = _with_adapters(model, config)
    return PolicyModule(model, config.head_chunk, config.head_float32).to(device)


def _kernel(config: LearnerConfig, device: torch.device) -> str:
    """The name transformers knows the attention by."""
    attention.register()
    name = config.attention
    if name == "auto":
        name = "eager" if device.type == "cpu" else "sdpa"
    if config.packing == "padded":
        return {"flash": "flash_attention_2", "flex": "flex_attention"}.get(name, name)
    if name == "flex" and device.type == "cpu":
        raise ConfigError("topology.learner.attention: 'flex' cannot learn on a CPU; use 'auto', 'eager' or 'sdpa'")
    if name == "flash":
        raise ConfigError(
            "topology.learner.attention: 'flash' has no packed form here; use 'sdpa' or 'flex', or packing: padded"
        )
    return attention.NAMES[name]


def _compile(model: Any) -> None:
    """Fuse what is many small passes over memory: norms and MLPs. In place, so that no weight changes its name."""
    for module in model.modules():
        if type(module).__name__.endswith(("MLP", "RMSNorm")):
            module.compile(dynamic=True)


def _with_adapters(model: Any, config: LearnerConfig) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = list(config.lora_targets) or "all-linear"
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]
        target_modules=targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, lora, autocast_adapter_dtype=False)
    if config.gradient_checkpointing:
        adapted.enable_input_require_grads()
    return adapted
