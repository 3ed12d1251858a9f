"""What travels when weights travel: a prologue, pieces, a trailer. Pure; knows neither gloo nor vLLM.

The bytes of one version are the tensors of its manifest laid end to end, cut into pieces of a quarter of a bucket:

    prologue   int64[8]              magic, epoch, version, layout, bytes, tensors, bucket bytes, 0
    piece 0    uint8[<= bucket/4]    model.embed_tokens.weight[0 : 2 MiB]
    ...
    piece 27   uint8[<= bucket/4]    model.embed_tokens.weight[54 MiB :], model.layers.0.input_layernorm.weight, ...
    ...
    trailer    uint8[16 * tensors]   the digest of each tensor, taken by the sender from the tensor itself

Both sides know the layout before the first byte (the manifest goes ahead over the control path), so there is no
framing to get wrong; digests come behind because the sender sees every tensor once (under ZeRO-3 a tensor exists
only while it is gathered). The root digest ties names, types, shapes and digests of a version into one string,
which learner and engine compare over the control path: two paths must lie in the same way to fool us.

Digests are xxh3-128: they prove integrity against faults (16 GB/s here), not authorship against an attacker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import xxhash

from rollout.errors import WeightError
from rollout.versions import TensorSpec, WeightManifest

MAGIC = 0x4845414452414345  # "HEADRACE"
DIGEST_BYTES = 16
PROLOGUE_WORDS = 8
PIECES = 4  # of a bucket; several are under way at once, so that nobody waits for the other's turn
DTYPES = ("bfloat16", "float32", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")

NamedTensor = tuple[str, torch.Tensor]


def dtype_name(tensor: torch.Tensor) -> str:
    """`torch.bfloat16` -> "bfloat16"; WeightError for a type that cannot travel."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise WeightError(f"tensors of type {name} cannot travel; send one of {', '.join(DTYPES)}")
    return name


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The raw bytes uint8[nbytes] of a tensor, without a copy where it is contiguous and on the CPU."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def digest(data: torch.Tensor) -> bytes:
    """xxh3-128 of uint8[n]."""
    return xxhash.xxh3_128(data.numpy().data).digest()


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """A spec without digest: what is known before the bytes are seen."""
    nbytes = tensor.numel() * tensor.element_size()
    return TensorSpec(name, dtype_name(tensor), tuple(tensor.shape), nbytes, "")


def sealed(manifest: WeightManifest, digests: Sequence[str]) -> WeightManifest:
    """The same manifest with its digests filled in."""
    pairs = zip(manifest.tensors, digests, strict=True)
    return replace(manifest, tensors=tuple(replace(t, digest=d) for t, d in pairs))


def layout_hash(manifest: WeightManifest) -> int:
    """Names, types and shapes in order, as a positive int64: a reordered or missing tensor changes it, and so does what
    an adapter belongs to."""
    text = "\n".join(f"{t.name} {t.dtype} {t.shape}" for t in manifest.tensors) + f"\n{manifest.adapter}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def root_digest(manifest: WeightManifest) -> str:
    """One string for the whole content of a sealed manifest (not its version: equal content has equal roots)."""
    text = "\n".join(f"{t.name} {t.dtype} {t.shape} {t.digest}" for t in manifest.tensors) + f"\n{manifest.adapter}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def prologue(epoch: int, manifest: WeightManifest, bucket_bytes: int) -> torch.Tensor:
    words = (MAGIC, epoch, manifest.version, layout_hash(manifest), manifest.nbytes, len(manifest.tensors))
    return torch.tensor([*words, bucket_bytes, 0], dtype=torch.int64)


def check_prologue(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise WeightError naming the first word of the sender's prologue that is not the announced one."""
    names = ("magic", "epoch", "version", "layout of names, types and shapes", "bytes", "tensors", "bucket bytes")
    for name, have, want in zip(names, got.tolist(), expected.tolist(), strict=False):
        if have != want:
            raise WeightError(f"the stream's {name} is {have}, announced was {want}; the sender must announce again")


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `[start, end)` of the version."""

    start: int
    end: int


def pieces(nbytes: int, bucket_bytes: int) -> list[Piece]:
    """How the bytes of a version are cut, the same on both sides: 20 bytes in buckets of 32 -> 0:8, 8:16, 16:20."""
    step = max(bucket_bytes // PIECES, 1)
    return [Piece(start, min(start + step, nbytes)) for start in range(0, nbytes, step)]


class DigestTrail:
    """Digests of the tensors of a manifest, computed while their bytes pass by in order, in pieces of any size."""

    def __init__(self, manifest: WeightManifest) -> None:
        self._specs = manifest.tensors
        self._digests: list[str] = []
        self._hash = xxhash.xxh3_128()
        self._left = self._specs[0].nbytes if self._specs else 0
        self._close_full()

    def update(self, data: torch.Tensor) -> None:
        at, n = 0, data.numel()
        view = data.numpy().data
        while at < n:
            take = min(self._left, n - at)
            self._hash.update(view[at : at + take])
            self._left -= take
            at += take
            self._close_full()

    def _close_full(self) -> None:
        while self._left == 0 and len(self._digests) < len(self._specs):
            self._digests.append(self._hash.hexdigest())
            self._hash = xxhash.xxh3_128()
            done = len(self._digests)
            self._left = self._specs[done].nbytes if done < len(self._specs) else 0

    @property
    def digests(self) -> list[str]:
        """One hex digest per tensor whose bytes have all been seen."""
        return list(self._digests)


def given_up(n_tensors: int) -> torch.Tensor:
    """The trailer of a sender that could not finish: it keeps receivers in step and fits no bytes at all."""
    return torch.full((DIGEST_BYTES * n_tensors,), 255, dtype=torch.uint8)


def trailer(digests: Iterable[str]) -> torch.Tensor:
    raw = b"".join(bytes.fromhex(d) for d in digests)
    return torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).copy())


def read_trailer(data: torch.Tensor) -> list[str]:
    raw = data.numpy().tobytes()
    return [raw[i : i + DIGEST_BYTES].hex() for i in range(0, len(raw), DIGEST_BYTES)]


def check_digests(manifest: WeightManifest, sent: Sequence[str], seen: Sequence[str]) -> None:
    """Raise WeightError naming the first tensor whose received bytes are not the ones sent.

    A digest that the manifest already carries (announced over the control path) must agree as well.
    """
    if sent and set(sent) == {"ff" * DIGEST_BYTES}:
        raise WeightError(f"the learner gave up sending version {manifest.version}; it will announce it again")
    for spec, want, have in zip(manifest.tensors, sent, seen, strict=True):
        if want != have or (spec.digest and spec.digest != have):
            raise WeightError(
                f"{spec.name} of version {manifest.version}: received digest {have}, sent {want}"
                f"{f', announced {spec.digest}' if spec.digest else ''}; nothing was loaded, send the version again"
            )


def views(manifest: WeightManifest, data: torch.Tensor) -> Iterator[NamedTensor]:
    """Each tensor of the manifest as a view into the version's bytes uint8[nbytes].

    A tensor whose bytes do not start on a multiple of its element size is copied (views must be aligned).
    """
    at = 0
    for spec in manifest.tensors:
        dtype = getattr(torch, spec.dtype)
        piece = data[at : at + spec.nbytes]
        if (data.storage_offset() + at) % dtype.itemsize:
            piece = piece.clone()
        yield spec.name, piece.view(dtype).reshape(spec.shape)
        at += spec.nbytes
