"""What a deleted segment still has to say: the fates of its ordinals, kept for the auditor in `history.log`.

{"segment": 3, "facts": [["Dropped", [17], "stale"], ["Taken", 5, [18, 19]], ...]}      one JSON line per segment
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rollout.journal_segments import Tail, scan
from rollout.wire import unpack

HISTORY = "history.log"
KEPT = frozenset({"Dropped", "Taken", "Trained", "Committed", "Rewound", "Draining"})


def archive(folder: Path, number: int, to_disk: bool) -> None:
    """Copy the fates from a segment to the history. Raises OSError; doing it twice is harmless.

    `to_disk`: it survives a power cut when this returns, as the segment has until now.
    """
    rows: list[Any] = []
    for meta, _ in scan(folder, number, Tail(), verify=False):
        value = unpack(meta, "journal")
        if value[0] == "facts":
            rows += [row for row in value[1] if row[0] in KEPT]
    line = json.dumps({"segment": number, "facts": rows}, separators=(",", ":")).encode() + b"\n"
    fd = os.open(folder / HISTORY, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(fd).st_size
        written = 0
        try:
            while written < len(line):
                written += os.pwrite(fd, line[written:], size + written)
            if to_disk:
                os.fsync(fd)
        except OSError:
            os.ftruncate(fd, size)
            raise
    finally:
        os.close(fd)


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
