"""What a deleted segment still has to say: the fates of its ordinals, kept for the auditor in `history.log`.

{"segment": 3, "facts": [["Dropped", [17], "stale"], ["Taken", 5, [18, 19]], ...]}      one JSON line per segment
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.journal_segments import Tail, scan
from rollout.wire import unpack

HISTORY = "history.log"
KEPT = frozenset({"Dropped", "Taken", "Trained", "Committed", "Rewound", "Draining"})


class History:
    """Copies the fates from a segment to the history before it is deleted. Those of this life it has in memory."""

    def __init__(self, folder: Path, to_disk: bool) -> None:
        """`to_disk`: what is archived survives a power cut, as the segment has until then."""
        self.folder, self.to_disk = folder, to_disk
        self._fates: dict[int, list[Any]] = {}

    def opened(self, number: int) -> None:
        """This life will fill the segment; what it writes is noted."""
        self._fates[number] = []

    def note(self, number: int, facts: Sequence[list[Any]]) -> None:
        self._fates[number] += [row for row in facts if row[0] in KEPT]

    def archive(self, number: int) -> None:
        """Raises OSError; doing it twice is harmless."""
        fates = self._fates.get(number)
        rows = _fates_in(self.folder, number) if fates is None else fates
        line = json.dumps({"segment": number, "facts": rows}, separators=(",", ":")).encode() + b"\n"
        fd = os.open(self.folder / HISTORY, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(fd).st_size
            written = 0
            try:
                while written < len(line):
                    written += os.pwrite(fd, line[written:], size + written)
                if self.to_disk:
                    os.fsync(fd)
            except OSError:
                os.ftruncate(fd, size)
                raise
        finally:
            os.close(fd)
        self._fates.pop(number, None)


def _fates_in(folder: Path, number: int) -> list[Any]:
    rows: list[Any] = []
    for meta, _ in scan(folder, number, Tail(), verify=False):
        value = unpack(meta, "journal")
        if value[0] == "facts":
            rows += [row for row in value[1] if row[0] in KEPT]
    return rows


def read_history(folder: Path) -> list[tuple[int, list[Any]]]:
    """[(segment, facts)] in order; a segment archived twice counts once, a torn line not at all."""
    found: dict[int, list[Any]] = {}
    try:
        text = (folder / HISTORY).read_bytes()
    except FileNotFoundError:
        return []
    for line in text.split(b"\n"):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[row["segment"]] = row["facts"]
    return sorted(found.items())
