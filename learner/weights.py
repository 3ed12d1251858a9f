"""The policy's weights under the names that Hugging Face and vLLM know them by; adapters are merged on the way out.

    NamedWeight(name="model.layers.0.self_attn.q_proj.weight", params=[base, A, B], whole=lambda: base + scale * B @ A)

`whole()` may be called only while `params` are gathered (ZeRO-3). A weight shared by two modules is named once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from learner.policy import PolicyModule


@dataclass(frozen=True, slots=True)
class NamedWeight:
    """See the head of this file."""

    name: str
    params: Sequence[nn.Parameter]
    whole: Callable[[], Tensor]


def named_weights(policy: PolicyModule) -> Iterator[NamedWeight]:
    """Every weight of the language model, in the model's own order."""
    adapted = {name: module for name, module in policy.base.named_modules() if hasattr(module, "lora_A")}
    for name, param in policy.base.named_parameters():
        if ".lora_" in name:
            continue
        owner, _, leaf = name.rpartition(".base_layer.")
        if owner in adapted and leaf == "weight":
            yield _merged(f"{owner}.weight", adapted[owner], param)
        else:
            yield NamedWeight(name.replace(".base_layer.", "."), [param], param.detach)


def base_weights(policy: PolicyModule) -> Iterator[NamedWeight]:
    """What adapters are added to, without them, under the names of `named_weights`: it never changes."""
    for name, param in policy.base.named_parameters():
        if ".lora_" not in name:
            yield NamedWeight(name.replace(".base_layer.", "."), [param], param.detach)


def adapter_weights(policy: PolicyModule) -> Iterator[NamedWeight]:
    """The adapters alone, under peft's names: what an engine that serves adapters needs."""
    for name, param in policy.model.named_parameters():
        if ".lora_" in name:
            yield NamedWeight(name.replace(".default", ""), [param], param.detach)


def _merged(name: str, layer: Any, base: nn.Parameter) -> NamedWeight:
    (adapter,) = layer.lora_A.keys()
    down, up = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight

    def whole() -> Tensor:
        delta = (up.detach().float() @ down.detach().float()) * layer.scaling[adapter]
        return (base.detach().float() + delta).to(base.dtype)

    return NamedWeight(name, [base, down, up], whole)
