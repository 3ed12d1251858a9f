"""A 128-bit checksum of a tensor that is computed where the tensor lies, on any device torch knows.

The NCCL plane never brings weights to the host, so the digests of the other planes (xxh3 over host memory) do not fit
it. Here the bytes are taken as 32-bit words w_i and summed with odd multipliers that depend on the position:

    lane k = sum over i of (w_i + 1) * (a_k * i + b_k) mod 2**64,  a_k even, b_k odd        two lanes: 128 bits

A flipped bit, two words exchanged, a tensor cut short or shifted change it. Integrity against faults, not against an
attacker; exact integer arithmetic, so every device gets the same number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from rollout.weight_stream import NamedTensor

_LANES = ((0x5851F42D4C957F2E, 0x14057B7EF767814F), (0x2545F4914F6CDD1C, 0x9E3779B97F4A7C15 - (1 << 64)))
_CHUNK = 1 << 22  # words at a time: 32 MB of scratch per lane


def checksum(tensor: torch.Tensor) -> str:
    """32 hex digits over the bytes of `tensor`, shape and type not included."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    pad = -raw.numel() % 4
    if pad:
        raw = torch.cat([raw, raw.new_zeros(pad)])
    words = raw.view(torch.int32)
    totals = [0, 0]
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64) + 1
        at = torch.arange(start, start + chunk.numel(), device=chunk.device, dtype=torch.int64)
        for k, (a, b) in enumerate(_LANES):
            totals[k] += int((chunk * (at * a + b)).sum())  # int64 wraps: arithmetic mod 2**64
    return "".join(f"{(t + tensor.numel()) % (1 << 64):016x}" for t in totals)


def summed(tensors: Iterable[NamedTensor], into: dict[str, str]) -> Iterator[NamedTensor]:
    """The same tensors; their checksums are noted on the way."""
    for name, tensor in tensors:
        into[name] = checksum(tensor)
        yield name, tensor
