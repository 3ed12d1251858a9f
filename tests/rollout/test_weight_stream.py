"""Proves: digests name the tensor that changed, whatever the chunking; layouts that differ are told apart; views give
back exactly the tensors that were laid out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import WeightError
from rollout.versions import WeightManifest
from rollout.weight_stream import (
    DigestTrail,
    as_bytes,
    check_digests,
    check_prologue,
    digest,
    layout_hash,
    pieces,
    prologue,
    read_trailer,
    root_digest,
    sealed,
    spec_of,
    trailer,
    views,
)


def model() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(7, 5, generator=g).bfloat16(),
        "empty": torch.empty(0, 3),
        "odd": torch.randint(0, 9, (3,), generator=g, dtype=torch.uint8),
        "norm": torch.randn(5, generator=g),
        "scalar": torch.tensor(3.5),
    }


def manifest_of(tensors: dict[str, torch.Tensor], version: int = 1) -> WeightManifest:
    return WeightManifest(version, tuple(spec_of(n, t) for n, t in tensors.items()))


def laid_out(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([as_bytes(t) for t in tensors.values()])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_digests_do_not_depend_on_the_chunking(sizes: list[int]) -> None:
    tensors = model()
    data, trail, at = laid_out(tensors), DigestTrail(manifest_of(tensors)), 0
    for size in [*sizes, data.numel()]:
        trail.update(data[at : at + size])
        at += size
    assert trail.digests == [digest(as_bytes(t)).hex() for t in tensors.values()]


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 64))
def test_pieces_tile_the_bytes(nbytes: int, bucket_bytes: int) -> None:
    at = 0
    for p in pieces(nbytes, bucket_bytes):
        assert p.start == at and 0 < p.end - p.start <= max(bucket_bytes // 4, 1)
        at = p.end
    assert at == nbytes


def test_views_give_back_the_tensors() -> None:
    tensors = model()
    for name, tensor in views(manifest_of(tensors), laid_out(tensors)):
        assert torch.equal(tensor, tensors[name]) and tensor.dtype == tensors[name].dtype


def test_one_flipped_bit_names_its_tensor() -> None:
    tensors = model()
    manifest, data = manifest_of(tensors), laid_out(tensors)
    sent = [digest(as_bytes(t)).hex() for t in tensors.values()]
    data[70 + 3 + 4] ^= 16  # in "norm"
    trail = DigestTrail(manifest)
    trail.update(data)
    with pytest.raises(WeightError, match=r"^norm of version 1"):
        check_digests(manifest, read_trailer(trailer(sent)), trail.digests)


def test_an_announced_digest_must_agree_too() -> None:
    tensors = {"a": torch.ones(3)}
    other = digest(as_bytes(torch.zeros(3))).hex()
    mine = digest(as_bytes(torch.ones(3))).hex()
    announced = sealed(manifest_of(tensors), [other])
    with pytest.raises(WeightError, match="announced"):
        check_digests(announced, [mine], [mine])


def test_layout_sees_order_type_shape_and_name() -> None:
    a, b = torch.zeros(2, 3), torch.zeros(6)
    base = layout_hash(manifest_of({"a": a, "b": b}))
    assert base == layout_hash(manifest_of({"a": a.clone(), "b": b}, version=9))
    for other in ({"b": b, "a": a}, {"a": a.bfloat16(), "b": b}, {"a": a.T, "b": b}, {"A": a, "b": b}, {"a": a}):
        assert layout_hash(manifest_of(other)) != base


def test_root_is_content_not_version() -> None:
    tensors = model()
    digests = [digest(as_bytes(t)).hex() for t in tensors.values()]
    one, two = sealed(manifest_of(tensors, 1), digests), sealed(manifest_of(tensors, 2), digests)
    assert root_digest(one) == root_digest(two)
    assert root_digest(one) != root_digest(sealed(manifest_of(tensors), digests[::-1]))


@pytest.mark.parametrize(
    ("epoch", "version", "bucket", "word"), [(2, 1, 8, "epoch"), (1, 2, 8, "version"), (1, 1, 16, "bucket bytes")]
)
def test_prologue_names_the_word_that_differs(epoch: int, version: int, bucket: int, word: str) -> None:
    want = prologue(1, manifest_of(model(), 1), 8)
    got = prologue(epoch, manifest_of(model(), version), bucket)
    with pytest.raises(WeightError, match=f"the stream's {word} is"):
        check_prologue(got, want)
    check_prologue(want.clone(), want)


def test_a_type_that_cannot_travel_is_refused() -> None:
    with pytest.raises(WeightError, match="complex64"):
        spec_of("phase", torch.zeros(2, dtype=torch.complex64))
