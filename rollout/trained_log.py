"""The learner's side of the books: `trained.jsonl`, one line per optimizer step and rank, written by itself.

{"step": 5, "version": 6, "rank": 0, "ordinals": [40, 41], "attempts": [0, 0], "oldest_versions": [3, 4]}
{"resumed_from": 4}                     the learner started again from version 4: its later steps did not happen
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.event_log import JsonLines, read_lines
from rollout.types import Group


class TrainedLog(JsonLines):
    """`log.trained(step, version, groups)` after the optimizer step, before the queue is told."""

    def __init__(self, path: Path, rank: int = 0) -> None:
        super().__init__(path)
        self.rank = rank

    def trained(self, step: int, version: int, groups: Sequence[Group]) -> None:
        self.append(
            {
                "step": step,
                "version": version,
                "rank": self.rank,
                "ordinals": [g.ordinal for g in groups],
                "attempts": [g.attempt for g in groups],
                "oldest_versions": [g.oldest_version for g in groups],
            }
        )

    def resumed(self, version: int) -> None:
        self.append({"resumed_from": version, "rank": self.rank})


@dataclass
class TrainedSteps:
    """What a log says was trained, once restarts are taken into account."""

    ordinals: dict[int, list[int]] = field(default_factory=dict)  # step -> ordinals of all ranks
    ages: dict[int, int] = field(default_factory=dict)  # step -> staleness of its oldest group
    changed: list[int] = field(default_factory=list)  # steps that were other groups the second time

    @classmethod
    def read(cls, path: Path) -> TrainedSteps:
        rows: dict[int, dict[int, dict[str, Any]]] = {}  # step -> rank -> line
        undone: dict[int, list[int]] = {}
        found = cls()
        for row in read_lines(path):
            if row.get("resumed_from") is not None:
                for step in [s for s in rows if s >= row["resumed_from"]]:
                    undone[step] = _all(rows.pop(step))
            if "step" in row:
                rows.setdefault(row["step"], {})[row.get("rank", 0)] = row
        for step, by_rank in sorted(rows.items()):
            found.ordinals[step] = _all(by_rank)
            oldest = [v for row in by_rank.values() for v in row["oldest_versions"]]
            found.ages[step] = step - min(oldest, default=step)
            if not set(undone.get(step, ())) <= set(found.ordinals[step]):  # killed, not every rank wrote its line
                found.changed.append(step)
        return found


def _all(by_rank: dict[int, dict[str, Any]]) -> list[int]:
    return sorted(o for row in by_rank.values() for o in row["ordinals"])
