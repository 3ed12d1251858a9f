"""Adapter versions: only the adapter travels, so it has to be proven that both ends add it to the same base.

    learner   base_root of the weights it does not train  -> AdapterSpec(rank, alpha, base), part of every manifest
    engine    base_root of the bytes vLLM loaded          -> a manifest with another base is refused before it is staged

Tensors go under peft's names, two for each adapted layer: `[rank, in]` and `[out, rank]`

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from rollout.errors import WeightError
from rollout.versions import TensorSpec, WeightManifest
from rollout.weight_stream import NamedTensor, as_bytes, digest, spec_of

_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


class BaseWitness:
    """Sees the tensors of a base model pass by, in any order, in the serving type; `root` is one string for all."""

    def __init__(self) -> None:
        self._rows: list[str] = []

    def see(self, name: str, tensor: torch.Tensor) -> None:
        spec = spec_of(name, tensor)
        self._rows.append(f"{name} {spec.dtype} {spec.shape} {digest(as_bytes(tensor)).hex()}")

    @property
    def root(self) -> str:
        return hashlib.blake2b("\n".join(sorted(self._rows)).encode(), digest_size=16).hexdigest()


def base_root(tensors: Iterable[NamedTensor]) -> str:
    """The root of a base model whose tensors are at hand."""
    witness = BaseWitness()
    for name, tensor in tensors:
        witness.see(name, tensor)
    return witness.root


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """What an engine has room for.

    AdapterRoom(rank=16, base="9f2c...", dtype="bfloat16", layers={"model.layers.0.mlp.down_proj": (1536, 576)})

    rank is the largest; layers maps what may be adapted to (in, out), (0, 0) where the engine has a part of it only;
    own_name turns the learner's name of a layer into the engine's.
    """

    rank: int
    base: str
    dtype: str
    layers: Mapping[str, tuple[int, int]]
    own_name: Callable[[str], str] = lambda name: name

    def check(self, manifest: WeightManifest) -> None:
        """Raise WeightError unless `manifest` is one whole adapter, made for this base, of layers that are here."""
        version, spec = manifest.version, manifest.adapter
        if spec is None:
            raise WeightError(f"version {version} is announced as a whole model, this engine takes adapters; refused")
        if spec.base != self.base:
            raise WeightError(
                f"version {version} is an adapter for a base of digest {spec.base}, the engine's is {self.base}; both "
                "must load the same model.path; where the learner cannot hold it exactly set weights.lora to merged"
            )
        if not 0 < spec.rank <= self.rank:
            raise WeightError(
                f"version {version} is an adapter of rank {spec.rank}, the engine has room for {self.rank}"
            )
        pairs = adapter_pairs(manifest.tensors)
        if not pairs:
            raise WeightError(f"version {version} is an adapter without a layer; the learner must send all of it")
        for t in manifest.tensors:
            if t.dtype != self.dtype:
                raise WeightError(f"{t.name} of version {version} is {t.dtype}, the engine computes in {self.dtype}")
        for layer, (down, up) in pairs.items():
            if self.own_name(layer) not in self.layers:
                raise WeightError(f"version {version} adapts {layer}, which this engine does not have or cannot adapt")
            wide, out = self.layers[self.own_name(layer)]
            if down[0] != spec.rank or up[1] != spec.rank or (wide and (down[1], up[0]) != (wide, out)):
                raise WeightError(
                    f"version {version} adapts {layer} with {list(up)} x {list(down)}, wanted [{out or up[0]}, "
                    f"{spec.rank}] x [{spec.rank}, {wide or down[1]}]"
                )


def adapter_pairs(tensors: Iterable[TensorSpec]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Layer -> shapes of its two matrices, `[rank, in]` and `[out, rank]`. WeightError for anything that is no pair."""
    down: dict[str, tuple[int, ...]] = {}
    up: dict[str, tuple[int, ...]] = {}
    for t in tensors:
        layer = t.name.removeprefix(_PREFIX)
        side, ending = (down, _DOWN) if layer.endswith(_DOWN) else (up, _UP)
        if not layer.endswith(ending) or len(t.shape) != 2:
            raise WeightError(f"{t.name} {list(t.shape)} is no matrix of an adapter; only the adapter may be sent")
        side[layer.removesuffix(ending)] = t.shape
    for layer in down.keys() ^ up.keys():
        raise WeightError(f"only one of the two matrices that adapt {layer} was announced; send both")
    return {layer: (down[layer], up[layer]) for layer in down}
