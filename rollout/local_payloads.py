"""Reading payload where it lies: a client on the server's host maps the journal's files instead of having them sent.

local = LocalPayloads.find(folder, epoch)     # epoch: what the server said; the file of that name must agree
local.body([3, 4711, 2_359_360])              # segment 3, from byte 4711: a view, nothing is copied
local.body([3, 2_364_071, 18_432])            # so little is read: mapping what has just been written costs more
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rollout.errors import WireError
from rollout.journal_segments import segment_path
from rollout.wire_fields import Buffer


class Place(list[int]):
    """[segment, offset, bytes] of one body."""


KEPT = 8  # open files; an array keeps its own file mapped for as long as it lives
READ_BELOW = 128 << 10  # bytes


@dataclass(slots=True)
class OpenFile:
    """One segment or payload file, mapped as far as it was long when that was last needed."""

    file: BinaryIO  # closed when nobody holds it any more
    view: Buffer = b""

    def body(self, offset: int, nbytes: int) -> Buffer:
        if nbytes < READ_BELOW:
            return os.pread(self.file.fileno(), nbytes, offset)
        if len(self.view) < offset + nbytes:
            self.view = memoryview(mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ))
        return self.view[offset : offset + nbytes]


class LocalPayloads:
    """The files of one journal folder. A deleted one stays readable for as long as it is open here."""

    def __init__(self, folder: Path, epoch: str) -> None:
        self.folder, self.epoch = folder, epoch
        self._open: OrderedDict[int, OpenFile] = OrderedDict()

    @classmethod
    def find(cls, folder: str, epoch: str) -> LocalPayloads | None:
        """None unless this host sees the folder of that very server."""
        try:
            here = (Path(folder) / "epoch").read_text() == epoch
        except OSError:
            return None
        return cls(Path(folder), epoch) if here else None

    def of_life(self, epoch: str) -> None:
        """Another life of the server may give its files the same names again."""
        if epoch != self.epoch:
            self._open.clear()
            self.epoch = epoch

    def body(self, place: Sequence[int]) -> Buffer:
        """The bytes at a place. Raises WireError if they are not there (any more)."""
        number, offset, nbytes = place
        try:
            data = (self._open.get(number) or self._open_file(number)).body(offset, nbytes)
        except (OSError, ValueError) as error:
            raise WireError("reply.places", f"segment {number} cannot be read: {error}") from error
        if len(data) < nbytes:
            raise WireError("reply.places", f"segment {number} ends before byte {offset + nbytes}")
        return data

    def _open_file(self, number: int) -> OpenFile:
        file = open(segment_path(self.folder, number), "rb", buffering=0)  # noqa: SIM115 (as long as it is held)
        made = self._open[number] = OpenFile(file)
        while len(self._open) > KEPT:
            self._open.popitem(last=False)
        return made
