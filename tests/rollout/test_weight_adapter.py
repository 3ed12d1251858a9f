"""Proves, without vLLM's engine: a base has the same root in any order and another one after any change; only a whole
adapter for this base fits an engine; the root of a version and its layout change with what the adapter belongs to; the
arithmetic for one adapter is vLLM's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rollout.errors import WeightError
from rollout.versions import AdapterSpec, WeightManifest
from rollout.weight_adapter import AdapterRoom, adapter_pairs, base_root
from rollout.weight_inbox import manifest_from_plain, manifest_to_plain
from rollout.weight_store import WeightStore
from rollout.weight_stream import layout_hash, root_digest, spec_of

BASE = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(4)}
DOWN, UP = "base_model.model.a.lora_A.weight", "base_model.model.a.lora_B.weight"


def adapter(rank: int = 2, **names: torch.Tensor) -> WeightManifest:
    tensors = names or {DOWN: torch.ones(rank, 3), UP: torch.ones(2, rank)}
    specs = tuple(spec_of(n, t) for n, t in tensors.items())
    return WeightManifest(7, specs, AdapterSpec(rank, 4.0, base_root(BASE.items())))


def room(**change) -> AdapterRoom:
    return replace(AdapterRoom(2, base_root(BASE.items()), "float32", {"a": (3, 2)}), **change)


def test_the_root_of_a_base_is_its_content() -> None:
    root = base_root(BASE.items())
    assert root == base_root(reversed(BASE.items()))
    others = [
        {**BASE, "b.weight": torch.ones(4).index_fill(0, torch.tensor([2]), 1.0000001)},
        {**BASE, "b.weight": torch.ones(2, 2)},
        {**BASE, "b.weight": torch.ones(4).bfloat16()},
        {"a.weight": BASE["a.weight"]},
        {"a.weight": BASE["a.weight"], "c.weight": BASE["b.weight"]},
    ]
    assert len({root, *(base_root(o.items()) for o in others)}) == 6


def test_a_whole_adapter_for_this_base_fits() -> None:
    room().check(adapter())
    room(rank=8).check(adapter())  # there may be more room than is needed
    room(layers={"a": (0, 0)}).check(adapter())  # a worker that has a part of the layer only
    room(layers={"x": (3, 2)}, own_name=lambda name: "x").check(adapter())
    assert adapter_pairs(adapter().tensors) == {"a": ((2, 3), (2, 2))}


@pytest.mark.parametrize(
    ("reason", "room", "manifest"),
    [
        ("whole model", room(), replace(adapter(), adapter=None)),
        ("the engine's is 00", room(base="00"), adapter()),
        ("room for 2", room(), adapter(3)),
        ("room for 2", room(), adapter(0)),
        ("without a layer", room(), replace(adapter(), tensors=())),
        ("no matrix", room(), adapter(2, **{DOWN: torch.ones(2, 3), UP: torch.ones(2)})),
        ("no matrix", room(), adapter(2, **{"a.weight": torch.ones(2, 3)})),
        ("only one of the two", room(), adapter(2, **{UP: torch.ones(2, 2)})),
        ("cannot adapt", room(layers={}), adapter()),
        ("computes in bfloat16", room(dtype="bfloat16"), adapter()),
        (r"wanted \[2, 2\] x \[2, 3\]", room(), adapter(2, **{DOWN: torch.ones(2, 4), UP: torch.ones(2, 2)})),
        (r"wanted \[2, 2\] x \[2, 3\]", room(), adapter(2, **{DOWN: torch.ones(1, 3), UP: torch.ones(2, 1)})),
    ],
)
def test_anything_else_is_refused(reason: str, room: AdapterRoom, manifest: WeightManifest) -> None:
    with pytest.raises(WeightError, match=reason):
        room.check(manifest)


def test_what_an_adapter_belongs_to_is_part_of_what_is_proven() -> None:
    one = adapter()
    assert one.adapter is not None
    others = [
        replace(one, adapter=None),
        replace(one, adapter=replace(one.adapter, alpha=8.0)),
        replace(one, adapter=replace(one.adapter, base="00")),
    ]
    assert len({root_digest(m) for m in [one, *others]}) == len({layout_hash(m) for m in [one, *others]}) == 4
    assert all(manifest_from_plain(manifest_to_plain(m)) == m for m in [one, *others])


def test_it_survives_a_store(tmp_path) -> None:
    published = WeightStore(str(tmp_path)).publish(
        7, {DOWN: torch.ones(2, 3), UP: torch.ones(2, 2)}.items(), adapter().adapter
    )
    found = WeightStore(str(tmp_path)).manifest(7)
    assert found.manifest == published.manifest and found.manifest.adapter == adapter().adapter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_arithmetic_of_one_adapter_is_vllms(dtype: torch.dtype) -> None:
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from rollout.vllm_adapter import OneAdapter

    tokens, wide, slices, rank = 13, 24, (16, 8), 8
    g = torch.Generator().manual_seed(0)
    x, base = (torch.randn(tokens, n, generator=g).to(dtype) for n in (wide, sum(slices)))
    down = tuple(torch.randn(1, 1, rank, wide, generator=g).to(dtype) for _ in slices)
    up = tuple(torch.randn(1, 1, n, rank, generator=g).to(dtype) for n in slices)
    added = [x.double() @ a[0, 0].double().T @ b[0, 0].double().T for a, b in zip(down, up, strict=True)]
    exact = base.double() + torch.cat(added, -1)
    seen = {}
    for adapters in ((1,) * tokens, (0,) * tokens):
        for kind in (PunicaWrapperCPU, OneAdapter):
            wrapper = kind(64, 64, "cpu")
            wrapper.update_metadata(LoRAMapping(adapters, (adapters[0],), is_prefill=True), [1], 2, 100)
            y = base.clone()
            wrapper.add_lora_linear(y, x, down, up, 1.0, slices)
            seen[adapters[0], kind] = y
    for kind in (PunicaWrapperCPU, OneAdapter):
        error = (seen[1, kind].double() - exact).norm() / exact.norm()
        assert error < (1e-6 if dtype is torch.float32 else 1e-2), kind
        assert torch.equal(seen[0, kind], base)  # tokens without an adapter get nothing
