"""Append-only JSON lines: `metrics.jsonl`, `events.jsonl`, `trained.jsonl`; any process of a run may write them.

One `os.write` to a file opened with O_APPEND puts a whole line or, after a kill, a torn one; readers skip torn lines,
and the next writer starts on a fresh line.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class JsonLines:
    """An append-only file of JSON objects, safe for several processes at once and for kill -9 of any of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # whoever wrote before us was killed inside a line

    def append(self, row: Mapping[str, Any]) -> None:
        """One line, in one write. What JSON cannot say (NaN, infinity) becomes null, numpy scalars become numbers."""
        line = json.dumps(plain(row), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        while line:
            line = line[os.write(self._fd, line) :]

    def sync(self) -> int:
        """What was appended survives a power cut once this returns: the file's size in bytes."""
        os.fsync(self._fd)
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        os.close(self._fd)


class EventLog(JsonLines):
    """`events.append("role_died", role="rollout-0", reason="exit code -9")`: one line, `time` and `event` first.

    The kinds that `status`, `why` and the report understand, with their fields; others are kept and shown as they are:

        run_started(version, resumed_from)   role_started(role, pid)         role_died(role, reason)
        role_restarted(role, after_s)        dropped(ordinals, reason)       evaluation(version, name, score)
        weights_committed(version, engine, stall_s)                          weights_refused(version, engine, reason)
        run_finished(version, outcome)       waiting(role, what, waited_s)   checkpoint(version)   alarm(what, detail)
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        super().__init__(path)
        self._clock = clock

    def append(self, event: str, **fields: Any) -> Row:  # type: ignore[override]
        """Write one event and return it as written (for the live view)."""
        row: Row = {"time": round(self._clock(), 3), "event": event, **fields}
        super().append(row)
        return row


class MetricsLog(JsonLines):
    """`metrics.append({"step": 0, "version": 1, "reward/mean": 0.2, ...})`: one line per optimizer step."""

    def rewind(self, step: int) -> int:
        """Forget the lines of `step` and later ones: a resumed run makes these steps again. Returns how many."""
        rows = list(read_lines(self.path))
        kept = [row for row in rows if row.get("step", -1) < step]
        if len(kept) < len(rows):
            text = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in kept)
            replace_file(self.path, text)
            self.close()
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        return len(rows) - len(kept)


def read_lines(path: Path) -> Iterator[Row]:
    """Every whole line that holds a JSON object; torn lines are skipped; a missing file has none."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    for line in data.split(b"\n"):
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError):
            continue
        if isinstance(row, dict):
            yield row


def replace_file(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, finds the old text or the new text and nothing between."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with open(draft, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def plain(value: Any) -> Any:
    """JSON-ready: non-finite numbers as null, numpy scalars and arrays as numbers and lists, the rest as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):  # numpy and torch, without importing either
        return plain(value.tolist())
    return str(value)
