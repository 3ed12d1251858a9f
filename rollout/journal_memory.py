"""Where the payload of durability "memory" lies: a folder of this run's own in a file system that is memory."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from pathlib import Path


def memory_folder(journal_dir: Path, room: int) -> Path | None:
    """A folder in memory for this run's payload, or None if there is no such file system with room for it."""
    base = Path("/dev/shm")
    if not os.access(base, os.W_OK):
        return None
    space = os.statvfs(base)
    if space.f_bavail * space.f_frsize < room:
        return None
    name = hashlib.blake2b(str(journal_dir.resolve()).encode(), digest_size=8).hexdigest()
    mine = base / f"headrace-{os.getuid()}"
    for folder in mine.glob("*"):
        _remove_if_abandoned(folder)
    return mine / name


def _remove_if_abandoned(folder: Path) -> None:
    """A server that was killed could not tidy up; nobody holds its lock any more."""
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(fd)
