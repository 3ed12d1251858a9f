"""Reading payload where it lies: a client on the server's host maps the journal's files instead of having them sent.

local = LocalPayloads.find(folder, epoch)     # epoch: what the server said; the file of that name must agree
local.group([3, 4711, 118, 2_359_360])        # segment 3, a record at byte 4711: its header, and a view of its arrays
local.group([3, 2_364_071, 118, 18_432])      # so little of a file that grows is read: mapping it anew costs more
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
from rollout.journal_records import header_in
from rollout.journal_segments import HEAD, PLACED, segment_path
from rollout.spare_files import open_shared
from rollout.wire_fields import Buffer
from rollout.wire_header import GroupHeader, read_header


class Place(list[int]):
    """[segment, offset, bytes] of one body."""


KEPT = 4  # open files; an array keeps its own file mapped for as long as it lives
READ_BELOW = 128 << 10  # bytes


@dataclass(slots=True)
class OpenFile:
    """One segment or payload file, mapped as far as it was long when that was last needed."""

    file: BinaryIO  # closed when nobody holds it any more
    whole: bool  # it never grows, so it is mapped once
    view: Buffer = b""

    def bytes_at(self, offset: int, nbytes: int) -> Buffer:
        if nbytes < READ_BELOW and not self.whole:
            return os.pread(self.file.fileno(), nbytes, offset)
        if len(self.view) < offset + nbytes:
            self.view = memoryview(mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ))
        return self.view[offset : offset + nbytes]


class LocalPayloads:
    """The files of one journal folder. What is open here stays as it is: deleted perhaps, but never used again."""

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

    def group(self, place: Sequence[int]) -> tuple[GroupHeader, list[Buffer]]:
        """(header, [body]) at [file, offset, meta bytes, body bytes]. Raises WireError, also if they are gone."""
        number, offset, meta, body = place
        try:
            start = offset + HEAD.size
            data = memoryview((self._open.get(number) or self._open_file(number)).bytes_at(start, meta + body))
        except (OSError, ValueError) as error:
            raise WireError("reply.places", f"file {number} cannot be read: {error}") from error
        if len(data) < meta + body:
            raise WireError("reply.places", f"file {number} ends before byte {start + meta + body}")
        return read_header(header_in(data[:meta])), [data[meta:]]

    def _open_file(self, number: int) -> OpenFile:
        file = open(open_shared(segment_path(self.folder, number)), "rb", buffering=0)  # noqa: SIM115 (while held)
        made = self._open[number] = OpenFile(file, whole=number >= PLACED)
        while len(self._open) > KEPT:
            self._open.popitem(last=False)
        return made
