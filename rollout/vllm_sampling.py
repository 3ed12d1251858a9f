"""Log-probs of the whole distribution where top-p or top-k cut it, so that a learner has something to compare with.

    logits / temperature -> log-softmax (Normalised) -> top-k, top-p: the rest to -inf -> draw
                                         \\-> what is recorded of the token drawn

vLLM would record the log-prob after the cut, renormalised over what is left: too high by minus the log of the mass
kept, which nobody records. Here the logits are normalised before the cut, which changes no draw, and the sampler is
told to record logits: those are then log-probs of the whole distribution at this temperature.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor

from rollout.errors import EngineError

RECORDED = "processed_logits"


class Normalised(LogitsProcessor):
    """After the temperature, in any batch that draws a token at random."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits, dim=-1, dtype=torch.float32)

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        pass


class NormalisedFirst(Normalised):
    """Before the temperature: a batch of greedy requests alone never reaches the other one."""

    def is_argmax_invariant(self) -> bool:
        return False


PROCESSORS = [f"{Normalised.__module__}:{c.__name__}" for c in (NormalisedFirst, Normalised)]


def record_before_the_cut(sampler: Any) -> None:
    """Prompt log-probs keep the engine's mode (they pass no processor). Raises EngineError for an unknown sampler."""
    inner = getattr(sampler, "topk_topp_sampler", None)
    if inner is None or not hasattr(inner, "logprobs_mode") or not hasattr(sampler, "logprobs_mode"):
        raise EngineError(
            f"sampling.top_p / top_k: vLLM's {type(sampler).__name__} cannot be told to record log-probs before the "
            "cut; set top_p: 1.0 and top_k: 0"
        )
    sampler.logprobs_mode = inner.logprobs_mode = RECORDED
