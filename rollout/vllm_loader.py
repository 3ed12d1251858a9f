"""What vLLM loads at start-up, witnessed: an engine that takes adapters must know which base it adds them to."""

from __future__ import annotations

from collections.abc import Generator
from copy import copy
from typing import Any

from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from rollout.weight_adapter import BaseWitness
from rollout.weight_stream import NamedTensor

LOAD_FORMAT = "headrace"


class WitnessedLoader(DefaultModelLoader):
    """vLLM's own loader; leaves the root digest of what it handed to the model in `model.headrace_base`."""

    def __init__(self, load_config: Any) -> None:
        plain = copy(load_config)
        plain.load_format = "auto"
        super().__init__(plain)

    def get_all_weights(self, model_config: Any, model: Any) -> Generator[NamedTensor, None, None]:
        witness = BaseWitness()
        tied = getattr(model_config.hf_config.get_text_config(), "tie_word_embeddings", False)
        for name, tensor in super().get_all_weights(model_config, model):
            if not (name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")):
                witness.see(name, tensor.to(model_config.dtype))
            yield name, tensor
        model.headrace_base = witness.root
