"""What a journal asks of a disk. Tests and the soak stand in for it: a full disk, a power cut, an I/O error."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rollout.wire import Buffer

IOV_MAX = 1024


class Disk:
    """The real one: appends whole batches to one file at a time."""

    def open(self, path: Path) -> int:
        """A descriptor for appending at the end of the file, which is made if it is missing."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        """Write all pieces one after the other from `offset`; returns the end. Raises OSError."""
        left = [p for p in pieces if len(p)]
        at = 0
        while at < len(left):
            wrote = os.pwritev(fd, left[at : at + IOV_MAX], offset)
            offset += wrote
            while at < len(left) and wrote >= len(left[at]):
                wrote -= len(left[at])
                at += 1
            if wrote:
                left[at] = memoryview(left[at])[wrote:]
        return offset

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def sync_folder(self, folder: Path) -> None:
        """A new or a deleted file is durable only when its folder is."""
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
