"""A power cut, as the soak plays it: every process dies at once, and of its files only what was synced is sure to stay.

journal segments   the server's own disk holds writes back until `sync`, so they vanish with the server
payload files      clients write them as they like; `sync` and `sync_folder` note in `durable/` what is safe now,
                   and `cut_power` takes back, page by page and by chance, whatever is not
trained.jsonl      the learner syncs it before each checkpoint; lines after that may be gone

durable/<name>     a payload file as it was when it was last synced        durable/names   files that have a name
durable/log_bytes  how much of trained.jsonl is safe
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from rollout.event_log import replace_file
from rollout.journal_disk import Disk
from rollout.wire import Buffer

PAGE = 4096
NAMES = "names"
SLOW_S = 0.05  # what a sync may take: time for the power to fail in it


class PowerCutDisk(Disk):
    """The server's disk. What it was told to keep is kept; a SIGKILL does to the rest what a power cut does."""

    def __init__(self, durable: Path) -> None:
        self.durable = durable
        self.held: dict[int, list[tuple[float, int, bytes]]] = {}
        durable.mkdir(exist_ok=True)

    def write(self, fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        data = b"".join(pieces)
        self.held.setdefault(fd, []).append((time.monotonic(), offset, data))
        return offset + len(data)

    def sync(self, fd: int) -> None:
        if random.random() < 0.3:
            time.sleep(random.random() * SLOW_S)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.suffix == ".payload":
            self.keep(path)
        for _, offset, data in self.held.pop(fd, []):
            os.pwrite(fd, data, offset)

    def keep(self, path: Path) -> None:
        """A payload file is durable as it is now."""
        draft = self.durable / f".{path.name}"
        shutil.copyfile(path, draft)
        draft.replace(self.durable / path.name)

    def close(self, fd: int) -> None:
        self.held.pop(fd, None)  # closing makes nothing durable
        super().close(fd)

    def sync_folder(self, folder: Path) -> None:
        names = {p.name for pattern in ("*.segment", "*.payload") for p in folder.glob(pattern)}
        replace_file(self.durable / NAMES, "\n".join(sorted(names)))
        for path in self.durable.glob("*.payload"):
            if path.name not in names:
                path.unlink()


class LyingDisk(PowerCutDisk):
    """Says that it has synced, and does so a while later."""

    def sync(self, fd: int) -> None:
        held = self.held.get(fd, [])
        while held and time.monotonic() - held[0][0] > 0.3:
            _, offset, data = held.pop(0)
            os.pwrite(fd, data, offset)


class HastyDisk(PowerCutDisk):
    """Syncs the journal, and not the arrays that its records speak of."""

    def keep(self, path: Path) -> None: ...


def cut_power(journal: Path, durable: Path, rng: random.Random) -> int:
    """Call when every process is dead: each page and each name that nobody synced is there or not. Bytes taken back."""
    try:
        names = set((durable / NAMES).read_text().split())
    except FileNotFoundError:
        names = set()
    undone = 0
    for path in [*journal.glob("*.payload"), *journal.glob("*.segment")]:
        if path.name not in names and rng.random() < 0.5:
            undone += path.stat().st_size
            path.unlink()
        elif path.suffix == ".payload":
            undone += _take_back(path, durable / path.name, rng)
    return undone


def cut_log(log: Path, durable: Path, rng: random.Random) -> int:
    """The learner's log ends somewhere behind what was synced. Bytes taken back."""
    try:
        written, safe = log.stat().st_size, int((durable / "log_bytes").read_text())
    except FileNotFoundError:
        return 0
    end = rng.randint(safe, written)
    os.truncate(log, end)
    return written - end


def _take_back(path: Path, synced: Path, rng: random.Random) -> int:
    old = synced.read_bytes() if synced.exists() else b""
    undone = 0
    with open(path, "r+b") as file:
        new = file.read()
        for at in range(0, len(new), PAGE):
            page = new[at : at + PAGE]
            before = old[at : at + PAGE].ljust(len(page), b"\0")
            if page != before and rng.random() < 0.5:
                file.seek(at)
                file.write(before)
                undone += len(page)
    return undone
