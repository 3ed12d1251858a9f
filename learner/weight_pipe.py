"""How the sender's bytes flow: copied and digested in one go into two buckets of memory, which travel in pieces.

    tensor  --sip by sip: digest, then copy-->  ring of two buckets  --piece by piece-->  group

A sip is digested while it is in the processor's cache for the copy anyway, so the proof costs no pass of its own over
memory. A piece is on its way while the next ones are filled; a stretch of the ring is filled again only after it was
sent. `push` copies, so a tensor may die as soon as it returns: under ZeRO-3 one gathered tensor is alive at a time.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import xxhash

from rollout.versions import WeightManifest
from rollout.weight_group import GlooGroup
from rollout.weight_stream import pieces

_SIP = 1 << 20  # bytes; half of what a core keeps to itself, and few calls


class _Ring:
    """Memory that is handed out stretch by stretch; a stretch is handed out again once what lay there was sent."""

    def __init__(self, group: GlooGroup, nbytes: int) -> None:
        self._group, self._memory = group, torch.empty(nbytes, dtype=torch.uint8)
        self._flying: deque[tuple[int, int, int]] = deque()  # start, end, ticket
        self._head = 0

    def stretch(self, n: int) -> torch.Tensor:
        """uint8[n], free to be written."""
        start = self._head if self._head + n <= self._memory.numel() else 0
        end = self._head = start + n
        while any(s < end and start < e for s, e, _ in self._flying):
            self._group.wait(self._flying.popleft()[2])
        return self._memory[start:end]

    def send(self, stretch: torch.Tensor) -> None:
        start = int(stretch.storage_offset())
        self._flying.append((start, start + stretch.numel(), self._group.broadcast(stretch)))

    def drain(self) -> None:
        while self._flying:
            self._group.wait(self._flying.popleft()[2])


class WeightPipe:
    """One version on its way to a group."""

    def __init__(self, group: GlooGroup, manifest: WeightManifest, bucket_bytes: int) -> None:
        self._group = group
        self._plan = deque(pieces(manifest.nbytes, bucket_bytes))
        self._ring = _Ring(group, 2 * bucket_bytes)
        self._stretch: torch.Tensor | None = None
        self._filled = 0  # bytes of the stretch

    def push(self, data: torch.Tensor) -> str:
        """Hand over one tensor's bytes uint8[n]; returns their digest."""
        proof, at = xxhash.xxh3_128(), 0
        source: Any = data.numpy()
        while at < len(source):
            stretch = self._open()
            sip = source[at : at + min(_SIP, stretch.numel() - self._filled)]
            proof.update(sip.data)
            stretch.numpy()[self._filled : self._filled + len(sip)] = sip
            self._fill(len(sip))
            at += len(sip)
        return proof.hexdigest()

    def pad(self) -> None:
        """Send whatever bytes for what is missing (the source failed; receivers still expect that many)."""
        while self._plan:
            self._fill(self._open().numel() - self._filled)

    def finish(self, tail: torch.Tensor) -> None:
        """Everything is sent; the trailer ends the stream."""
        self._ring.drain()
        self._group.wait(self._group.broadcast(tail))

    def _open(self) -> torch.Tensor:
        """The stretch that is being filled."""
        if self._stretch is None:
            piece = self._plan[0]
            self._stretch, self._filled = self._ring.stretch(piece.end - piece.start), 0
        return self._stretch

    def _fill(self, n: int) -> None:
        self._filled += n
        if self._stretch is not None and self._filled == self._stretch.numel():
            self._ring.send(self._stretch)
            self._stretch = None
            self._plan.popleft()
