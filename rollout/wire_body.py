"""The arrays of one group, read off its frames without copying."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np

from rollout.wire_fields import Buffer

KINDS = {name: np.dtype(name) for name in ("<i4", "<f4", "|b1")}


class Body:
    """Reads arrays off a sequence of frames, in order, without copying where an array lies in one frame, aligned."""

    def __init__(self, frames: Sequence[Buffer]) -> None:
        self._frames = [memoryview(f).cast("B") for f in frames if len(f)]
        self.nbytes = sum(len(f) for f in self._frames)
        self._frame = self._at = 0

    def column(
        self, dtype: str, lengths: Sequence[int], check: Callable[[np.ndarray], None] | None = None
    ) -> list[np.ndarray]:
        """One array per trajectory; read and checked in one go where they lie together."""
        total = sum(lengths)
        nbytes = total * KINDS[dtype].itemsize
        together = self._frame < len(self._frames) and self._at + nbytes <= len(self._frames[self._frame])
        if together:
            whole, edges = self.take(dtype, total), [0, *accumulate(lengths)]
            if check:
                check(whole)
            return [whole[a:b] for a, b in pairwise(edges)]
        arrays = [self.take(dtype, n) for n in lengths]
        for array in arrays if check else ():
            check(array)  # type: ignore[misc]
        return arrays

    def take(self, dtype: str, count: int) -> np.ndarray:
        kind = np.dtype(dtype)
        piece = self._bytes(count * kind.itemsize)
        array = np.frombuffer(piece, kind)
        if not array.flags.aligned:
            array = array.copy()
        array.flags.writeable = False
        return array

    def _bytes(self, n: int) -> Buffer:
        if n == 0:
            return b""
        frame = self._frames[self._frame]
        if self._at == len(frame):
            self._frame, self._at = self._frame + 1, 0
            return self._bytes(n)
        if self._at + n <= len(frame):
            self._at += n
            return frame[self._at - n : self._at]
        head = frame[self._at :]
        self._frame, self._at = self._frame + 1, 0
        return b"".join((head, self._bytes(n - len(head))))
