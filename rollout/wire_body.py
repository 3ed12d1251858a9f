"""The arrays of one group, read off its frames without copying."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np

from rollout.errors import WireError
from rollout.wire_fields import Buffer

KINDS = {name: np.dtype(name) for name in ("<i4", "<f4", "|b1")}
Column: TypeAlias = np.ndarray | list[np.ndarray]  # one field of all trajectories: end to end, or an array for each


class Body:
    """Reads arrays off a sequence of frames, in order, without copying where an array lies in one frame, aligned."""

    def __init__(self, frames: Sequence[Buffer]) -> None:
        self._frames = [f if type(f) is bytes else memoryview(f).cast("B") for f in frames if len(f)]
        self.nbytes = sum(map(len, self._frames))
        self._frame = self._at = 0

    def column(
        self, dtype: str, lengths: Sequence[int], total: int, check: Callable[[np.ndarray], None] | None = None
    ) -> Column:
        """One field of all trajectories; read and checked in one go where it lies together."""
        nbytes = total * KINDS[dtype].itemsize
        if self._frame < len(self._frames) and self._at + nbytes <= len(self._frames[self._frame]):
            whole = self.take(dtype, total)
            if check:
                check(whole)
            return whole
        arrays = [self.take(dtype, n) for n in lengths]
        for array in arrays if check else ():
            check(array)  # type: ignore[misc]
        return arrays

    def take(self, dtype: str, count: int) -> np.ndarray:
        kind = KINDS.get(dtype) or np.dtype(dtype)
        nbytes = count * kind.itemsize
        if nbytes and self._frame < len(self._frames) and self._at + nbytes <= len(self._frames[self._frame]):
            array = np.frombuffer(self._frames[self._frame], kind, count, self._at)
            self._at += nbytes
        else:
            array = np.frombuffer(self._bytes(nbytes), kind)
        flags = array.flags
        if not flags.aligned:
            array = array.copy()
            flags = array.flags
        if flags.writeable:
            flags.writeable = False
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


def apart(column: Column, lengths: Sequence[int]) -> list[np.ndarray]:
    """An array for each trajectory."""
    if isinstance(column, list):
        return column
    return [column[a:b] for a, b in pairwise((0, *accumulate(lengths)))]


def together(column: Column) -> np.ndarray:
    """All trajectories end to end."""
    return np.concatenate(column) if isinstance(column, list) else column


def check_finite(values: np.ndarray, field: str = "group.behaviour_logprobs") -> None:
    """The extremes tell, for a NaN is both of them; that costs less than np.isfinite(values).all()."""
    if values.size and not (math.isfinite(np.maximum.reduce(values)) and math.isfinite(np.minimum.reduce(values))):
        raise WireError(field, "holds a value that is not finite")


def check_boolean(values: np.ndarray) -> None:
    if values.size and values.view(np.uint8).max() > 1:
        raise WireError("group.loss_mask", "holds a byte that is neither 0 nor 1")
