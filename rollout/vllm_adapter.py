"""One adapter inside vLLM, replaced in place: what it is added to, where it lies, how it is computed.

    engine starts   vllm_loader.py digests the base while vLLM loads it; then an adapter of zeros is put in
    every request   carries `vllm_requests.the_adapter()`, the one there is
    a commit        AdapterSlot.load: out with the old one, in with the proven one, same id, same place

Three things that vLLM 0.32 does in silence, and that are errors or absent here: an adapter whose layers it does not
have is served as the base alone; a matrix of another shape is copied in part; the scale is multiplied into the caller's
tensor (which would change the bytes that were proven, and that the next delta builds on).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.utils import parse_fine_tuned_lora_name

from rollout.errors import WeightError
from rollout.vllm_requests import ADAPTER_ID
from rollout.weight_adapter import AdapterRoom
from rollout.weight_spool import Staged
from rollout.weight_stream import views


class OneAdapter(PunicaWrapperCPU):
    """vLLM's adapter arithmetic on CPU for the case that every token has the same adapter: two plain products.

    Its general form copies both matrices once per token (seen: 7 times slower generation). Embedding and output head
    have no adapter here, so nothing is added to them.
    """

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: Any = None,
        **kwargs: Any,
    ) -> None:
        """y [..., out] += x [..., in] @ A^T @ B^T, slice by slice where vLLM has fused several layers into one."""
        if self.no_lora:
            return
        rows, out, at = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1]), 0
        for down, up, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            out[:, at : at + width].addmm_(rows @ down[0, 0].T, up[0, 0].T, alpha=scale)
            at += width

    def add_lora_embedding(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: AdapterSlot refuses adapters of the embedding."""

    def add_lora_logits(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: AdapterSlot refuses adapters of the output head."""


class AdapterSlot:
    """The place of the one adapter in a worker's model. `put_zeros` before the first request."""

    def __init__(self, model: Any, max_rank: int, dtype: torch.dtype) -> None:
        self._model, self._manager = model, model.lora_manager
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._mapper = mapper.get_rename_mapper() if mapper is not None else None
        self._dtype = dtype
        self._max_rank = max_rank
        self.room = AdapterRoom(
            max_rank, model.headrace_base, str(dtype).removeprefix("torch."), _layers(self._manager), self._own_name
        )

    def put_zeros(self) -> None:
        """From here on the engine has exactly one adapter. On CPU it is computed by `OneAdapter`."""
        manager = self._manager
        for name, wrapper in manager.punica_wrapper_mapping.items():
            if type(wrapper) is PunicaWrapperCPU:
                ours = OneAdapter(manager.max_num_batched_tokens, manager.max_num_seqs, manager.device)
                manager.punica_wrapper_mapping[name] = ours
                for module in manager.modules.values():
                    if module.punica_wrapper is wrapper:
                        module.set_mapping(ours)
        self._put(manager.create_dummy_lora(ADAPTER_ID, self._max_rank, self._model.embedding_modules))

    def load(self, staged: Staged) -> None:
        """Replace the adapter by a proven one. Fails with no adapter in place: the caller must not serve then."""
        spec = staged.manifest.adapter
        assert spec is not None  # the room was checked when it was staged
        mine = {name: tensor.clone() for name, tensor in views(staged.manifest, staged.bytes())}  # vLLM scales in place
        peft = PEFTHelper(r=spec.rank, lora_alpha=spec.alpha, target_modules=[])  # type: ignore[arg-type]
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID, mine, peft, device="cpu", dtype=self._dtype, weights_mapper=self._mapper
        )
        self._put(adapter)

    def _put(self, adapter: LoRAModel) -> None:
        self._manager.remove_adapter(ADAPTER_ID)
        self._manager.add_adapter(adapter)
        self._manager.activate_adapter(ADAPTER_ID)
        lost = adapter.loras.keys() - self._manager.modules.keys()
        if lost or self.held() != [ADAPTER_ID]:
            raise WeightError(f"vLLM left out the adapter of {sorted(lost)} and holds the adapters {self.held()}")

    def held(self) -> list[int]:
        """Numbers of the adapters in the engine: always [1]."""
        return sorted(self._manager.list_adapters())

    def _own_name(self, layer: str) -> str:
        return parse_fine_tuned_lora_name(f"base_model.model.{layer}.lora_A.weight", self._mapper)[0]


def _layers(manager: Any) -> dict[str, tuple[int, int]]:
    """Linear layers that can be adapted, by the names they have before vLLM fuses some: (in, out), or (0, 0)."""
    found: dict[str, tuple[int, int]] = {}
    for name, module in manager.modules.items():
        if isinstance(module, BaseLinearLayerWithLoRA):
            parts = manager.packed_modules.get(name, [name])
            whole = module.tp_size == 1 and len(parts) == module.n_slices
            for i, part in enumerate(parts):
                wide, out = module.lora_a_stacked, module.lora_b_stacked
                found[part] = (wide[i].shape[-1], out[i].shape[-2]) if whole else (0, 0)
    return found
