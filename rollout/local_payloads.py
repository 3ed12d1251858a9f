"""Reading payload where it lies: a client on the server's host maps the journal's files instead of having them sent.

local = LocalPayloads(folder, epoch)          # epoch: what the server said; the file of that name must agree
local.body([3, 4711, 2_359_360])              # segment 3, from byte 4711: a view, nothing is copied
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from rollout.errors import WireError
from rollout.journal_segments import segment_path


class Place(list[int]):
    """[segment, offset, bytes] of one body."""


KEPT = 8  # mapped segments; an array keeps its segment mapped for as long as it lives


class LocalPayloads:
    """Views into the segments of one journal folder. A deleted segment stays readable where it is mapped already."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mapped: OrderedDict[int, memoryview] = OrderedDict()

    @classmethod
    def find(cls, folder: str, epoch: str) -> LocalPayloads | None:
        """None unless this host sees the folder of that very server."""
        try:
            here = (Path(folder) / "epoch").read_text() == epoch
        except OSError:
            return None
        return cls(Path(folder)) if here else None

    def body(self, place: Sequence[int]) -> memoryview:
        """The bytes at a place. Raises WireError if they are not there (any more)."""
        number, offset, nbytes = place
        view = self._mapped.get(number)
        if view is None or len(view) < offset + nbytes:
            view = self._map(number)
        if len(view) < offset + nbytes:
            raise WireError("reply.places", f"segment {number} ends before byte {offset + nbytes}")
        return view[offset : offset + nbytes]

    def _map(self, number: int) -> memoryview:
        try:
            with open(segment_path(self.folder, number), "rb") as file:
                view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise WireError("reply.places", f"segment {number} cannot be read: {error}") from error
        self._mapped[number] = view
        while len(self._mapped) > KEPT:
            self._mapped.popitem(last=False)
        return view
