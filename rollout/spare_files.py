"""Payload files are used again: writing over pages that exist costs half of what new ones do, and less on disk.

    reader, writer   open_shared: a shared lock for as long as the file is open *or mapped* (a mapping keeps its own
                     descriptor), so whatever arrays are still looked at are safe
    server           Spares.retire: nothing in the file is needed; it becomes a spare if nobody has a lock, else it goes
    writer           Spares.claim: gives a spare its new name; of two who want it one gets it

A process that dies lets go of its locks. Whoever opened a file just before it was retired finds it gone.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

KEEP = 8  # spares at a time
SUFFIX = ".spare"


def open_shared(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor; the file will not be used for anything else while it, or a mapping made from it, exists.

    Raises OSError; FileNotFoundError also where the file was retired in this very moment.
    """
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)  # held against us for as long as a rename takes
        if not os.path.samestat(os.fstat(fd), os.stat(path)):
            raise FileNotFoundError(path)
    except OSError:
        os.close(fd)
        raise
    return fd


class Spares:
    """Files of a journal folder that nobody needs and whose room is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def claim(self, path: Path) -> int | None:
        """A spare under its new name `path`, open to write; None if there is none."""
        for spare in self.folder.glob(f"*{SUFFIX}"):
            with suppress(FileNotFoundError):  # another writer was quicker
                os.utime(spare)  # it is not idle
                spare.rename(path)
                return open_shared(path, os.O_RDWR)
        return None

    def retire(self, path: Path) -> None:
        """The file goes, or becomes a spare."""
        if sum(1 for _ in self.folder.glob(f"*{SUFFIX}")) >= KEEP or not _make_spare(path):
            path.unlink(missing_ok=True)

    def drop(self) -> None:
        """Give the room back."""
        for spare in self.folder.glob(f"*{SUFFIX}"):
            spare.unlink(missing_ok=True)


def _make_spare(path: Path) -> bool:
    """False if somebody has the file open or mapped, or it is not there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.rename(path.with_suffix(SUFFIX))
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
