"""Where a received version lies until it is loaded: a mapped scratch file with two places, one serving, one staging.

A version must be complete and proven before the first byte of it is loaded, so it has to lie somewhere while the
engine decodes. It lies in an unlinked file: buckets are received straight into the mapping and dropped from
resident memory behind the receiver (`release`), so that staging costs the engine's process two buckets and not a
model. The pages stay in the page cache while there is room and go to disk when there is none.

    place A  bytes of the version that is served (the base of the next delta; a rollback)
    place B  bytes of the version being staged
    promote  swaps the two
"""

from __future__ import annotations

import mmap
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from rollout.versions import WeightManifest

_PAGE = mmap.PAGESIZE


class Place:
    """One mapped scratch file that grows to the largest version it has held."""

    def __init__(self, directory: Path | str | None) -> None:
        self._file = tempfile.TemporaryFile(prefix="headrace-weights-", dir=directory)  # noqa: SIM115 - lives as we do
        self._map: mmap.mmap | None = None

    def bytes(self, nbytes: int) -> torch.Tensor:
        """The place as uint8[nbytes]; what it held before is overwritten by whoever writes."""
        if self._map is None or len(self._map) < nbytes:
            self._file.truncate(max(nbytes, _PAGE))
            self._map = mmap.mmap(self._file.fileno(), max(nbytes, _PAGE))
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes)

    def release(self, start: int, end: int) -> None:
        """Drop whole pages of `[start, end)` from resident memory; their content stays readable."""
        first, last = -(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE
        if self._map is not None and last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


@dataclass(frozen=True, slots=True)
class Staged:
    """A complete, proven version: its sealed manifest, its root digest, its bytes."""

    manifest: WeightManifest
    root: str
    place: Place

    def bytes(self) -> torch.Tensor:
        return self.place.bytes(self.manifest.nbytes)


class Spool:
    """The two places of one engine."""

    def __init__(self, directory: Path | str | None = None) -> None:
        self._directory = directory
        self._free, self._other = Place(directory), Place(directory)
        self.serving: Staged | None = None

    def free(self) -> Place:
        """The place that may be written: never the one whose version is served."""
        return self._free

    def abandon_free(self) -> None:
        """Leave the free place to a writer that could not be stopped, and take a fresh one."""
        self._free = Place(self._directory)

    def promote(self, staged: Staged) -> None:
        """`staged` is what the engine now serves; the place before it is free again."""
        if staged.place is not self._free:
            raise ValueError("only a version staged in the free place can be promoted")
        self._free, self._other = self._other, self._free
        self.serving = staged
