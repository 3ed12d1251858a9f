"""`headrace export-rollouts D --out FILE`: what the journal still holds, one row per answer, as JSONL or Parquet.

{"ordinal": 17, "attempt": 0, "answer": 3, "prompt_ids": [...], "token_ids": [...], "logprobs": [...],
 "loss_mask": [...], "versions": [[4, 0, 12]], "status": "finished", "verdict": "scored", "reward": 1.0,
 "components": {"exact": 1.0}, "detail": ""}

The journal forgets what a checkpoint contains (see `checkpoint.every`), unless `topology.queue.retain` says to keep
the latest committed steps, or all. A run may go on meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from launch.run_dir import RunDirectory
from rollout.errors import ConfigError
from rollout.types import Failed, Group, Scored, TimedOut, Trajectory, Verdict

BATCH = 1024  # rows per Parquet row group, and what is in memory at once


@dataclass(frozen=True, slots=True)
class Filters:
    """Which answers to keep; None keeps all. Versions are those of an answer's tokens."""

    min_version: int = 0
    max_version: int | None = None
    status: str | None = None
    verdict: str | None = None

    def keeps(self, trajectory: Trajectory) -> bool:
        versions = [span.version for span in trajectory.versions] or [0]
        return (
            min(versions) >= self.min_version
            and (self.max_version is None or max(versions) <= self.max_version)
            and self.status in (None, str(trajectory.status))
            and self.verdict in (None, _judged(trajectory.verdict)[0])
        )


def export_rollouts(run: RunDirectory, out: str, filters: Filters) -> tuple[Path, int, int]:
    """Write the file; returns (path, groups, answers). Raises ConfigError for a name that says no format."""
    path = run.path / f"rollouts.{out}" if out in ("jsonl", "parquet") else Path(out)
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"--out {out}: must be jsonl, parquet, or a file that ends in .jsonl or .parquet")
    if not path.parent.is_dir():
        raise ConfigError(f"--out {out}: {path.parent} is no directory; make it first")
    from rollout.journal_groups import read_groups

    seen: set[tuple[int, int]] = set()
    rows = _rows(read_groups(run.journal), filters, seen)
    making = path.with_name(f".{path.name}.making")
    answers = _write_jsonl(making, rows) if path.suffix == ".jsonl" else _write_parquet(making, rows)
    making.replace(path)
    return path, len(seen), answers


def _rows(groups: Iterator[Group], filters: Filters, seen: set[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    for group in groups:
        for n, trajectory in enumerate(group.trajectories):
            if filters.keeps(trajectory):
                seen.add((group.ordinal, group.attempt))
                yield _row(group, n, trajectory)


def _row(group: Group, n: int, t: Trajectory) -> dict[str, Any]:
    kind, reward, components, detail = _judged(t.verdict)
    return {
        "ordinal": group.ordinal,
        "attempt": group.attempt,
        "answer": n,
        "prompt_ids": group.prompt_ids.tolist(),
        "token_ids": t.token_ids.tolist(),
        "logprobs": t.behaviour_logprobs.tolist(),
        "loss_mask": t.loss_mask.tolist(),
        "versions": [[s.version, s.start, s.end] for s in t.versions],
        "status": str(t.status),
        "verdict": kind,
        "reward": reward,
        "components": components,
        "detail": detail,
    }


def _judged(verdict: Verdict | None) -> tuple[str, float | None, dict[str, float], str]:
    """(kind, reward, components, detail): an error is never a zero, so it has no reward."""
    match verdict:
        case Scored(value, components):
            return "scored", value, dict(components), ""
        case Failed(kind, detail):
            return "failed", None, {}, f"{kind}: {detail}" if detail else kind
        case TimedOut(deadline_s):
            return "timed_out", None, {}, f"after {deadline_s:g} s"
    return "none", None, {}, ""


def _write_jsonl(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def _write_parquet(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError("--out: parquet needs pyarrow; pip install pyarrow, or write jsonl") from None
    schema = pa.schema(
        [
            *((name, pa.int64()) for name in ("ordinal", "attempt", "answer")),
            *((name, pa.list_(pa.int32())) for name in ("prompt_ids", "token_ids")),
            ("logprobs", pa.list_(pa.float32())),
            ("loss_mask", pa.list_(pa.bool_())),
            ("versions", pa.list_(pa.list_(pa.int64()))),
            ("status", pa.string()),
            ("verdict", pa.string()),
            ("reward", pa.float64()),
            ("components", pa.map_(pa.string(), pa.float64())),
            ("detail", pa.string()),
        ]
    )
    count = 0
    with pq.ParquetWriter(path, schema) as writer:
        while batch := list(islice(rows, BATCH)):
            writer.write_table(
                pa.Table.from_pylist([r | {"components": list(r["components"].items())} for r in batch], schema)
            )
            count += len(batch)
    return count
