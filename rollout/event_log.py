"""Append-only JSON lines: `metrics.jsonl`, `events.jsonl`, `trained.jsonl`.

Every line is written by one `write` to a file opened for appending, so several processes may share a file and a
line is never torn by another writer. A crash can only tear the last line, which readers leave out.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path


class JsonLines:
    """One append-only file of JSON objects.

    JsonLines(path).append({"step": 3}) ; list(JsonLines(path).read()) == [{"step": 3}]
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def append(self, row: Mapping[str, object]) -> None:
        """Write one line and leave it with the operating system. Raises OSError, on a full disk say."""
        line = (json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n").encode()
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)

    def read(self, offset: int = 0) -> Iterator[dict[str, object]]:
        """Whole lines from byte `offset` on; a torn last line is left out."""
        return iter(self.read_from(offset)[0])

    def read_from(self, offset: int) -> tuple[list[dict[str, object]], int]:
        """Whole lines from byte `offset`, and the offset behind the last of them (to follow a growing file)."""
        if not self.path.exists():
            return [], offset
        with self.path.open("rb") as f:
            f.seek(offset)
            data = f.read()
        whole = data.rfind(b"\n") + 1
        return [json.loads(line) for line in data[:whole].splitlines() if line.strip()], offset + whole

    def keep(self, rows: list[dict[str, object]]) -> None:
        """Replace the file's contents atomically (a resumed run forgets the steps after its checkpoint)."""
        temporary = self.path.with_name(self.path.name + ".new")
        temporary.unlink(missing_ok=True)
        fresh = JsonLines(temporary)
        temporary.touch()
        for row in rows:
            fresh.append(row)
        os.replace(temporary, self.path)


class EventLog:
    """`events.jsonl`: what happened, when, to whom. `kind` is a short stable word.

    {"time_s": 1764500000.12, "kind": "weights_committed", "engine": "rollout-0", "version": 4, "stall_s": 0.61}
    """

    def __init__(self, path: Path | str) -> None:
        self._lines = JsonLines(path)

    def emit(self, kind: str, **fields: object) -> None:
        self._lines.append({"time_s": round(time.time(), 3), "kind": kind, **fields})
