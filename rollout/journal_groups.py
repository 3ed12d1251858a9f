"""A journal read as a dataset: the groups of a run with their verdicts, without a server. DPO and replay read this.

for group in read_groups(run_dir / "journal", versions=range(4, 9), fate="trained"): ...
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any, Literal

from rollout.journal_segments import Ref, Tail, read_record, scan, segment_numbers, segment_path
from rollout.selection import n_scored
from rollout.types import Group, Verdict
from rollout.wire import decode_group, unpack
from rollout.wire_verdicts import read_verdicts

Fate = Literal["any", "trained", "dropped", "open"]


class Fates:
    """Pass one: what became of each ordinal, and its verdicts."""

    def __init__(self, folder: Path) -> None:
        self.verdicts: dict[int, tuple[Verdict, ...]] = {}
        self.dropped: dict[int, str] = {}
        self.steps: dict[int, list[int]] = {}
        self.trained_steps = 0
        for number in segment_numbers(folder):
            for meta, _ in scan(folder, number, Tail(), verify=False):
                value = unpack(meta, "journal")
                for row in value[1] if value[0] == "facts" else ():
                    self._fact(row)
        self.trained = {o for s, ordinals in self.steps.items() if s < self.trained_steps for o in ordinals}

    def _fact(self, row: list[Any]) -> None:
        match row:
            case ["Judged", ordinal, rows]:
                self.verdicts[ordinal] = read_verdicts(rows, "fact.verdicts")
            case ["Dropped", ordinals, reason]:
                self.dropped.update(dict.fromkeys(ordinals, reason))
            case ["Taken", step, ordinals]:
                self.steps[step] = ordinals
            case ["Trained", step]:
                self.trained_steps = step + 1
            case ["Rewound", version, _]:
                self.trained_steps = version

    def of(self, ordinal: int) -> str:
        return "trained" if ordinal in self.trained else "dropped" if ordinal in self.dropped else "open"


def read_groups(
    folder: Path,
    versions: Container[int] | None = None,
    fate: Fate = "any",
    scored_only: bool = False,
    keep: Callable[[Group], bool] | None = None,
) -> Iterator[Group]:
    """Every group in the journal, in the order of submission, with the verdicts it got.

    versions: those its oldest token may have. fate: what became of it. scored_only: every answer has a reward.
    A damaged record raises QueueError; what follows a torn one is not read.
    """
    folder = Path(folder)
    fates = Fates(folder)
    for number in segment_numbers(folder):
        for meta, ref in scan(folder, number, Tail(), verify=False):
            value = unpack(meta, "journal")
            if value[0] not in ("group", "placed") or (fate != "any" and fates.of(value[1][1]) != fate):
                continue
            place = Ref(*value[2]) if value[0] == "placed" else ref
            if (
                place is not ref
                and fates.of(value[1][1]) != "open"
                and not segment_path(folder, place.segment).exists()
            ):
                continue  # settled, and forgotten since
            record, body = read_record(folder, place)
            group = decode_group(unpack(record, "journal")[2], (body,))
            verdicts = fates.verdicts.get(group.ordinal)
            if verdicts is not None:
                group = group.with_verdicts(verdicts)
            if versions is not None and group.oldest_version not in versions:
                continue
            judged = [t.verdict for t in group.trajectories if t.verdict is not None]
            if scored_only and n_scored(judged) < len(group.trajectories):
                continue
            if keep is None or keep(group):
                yield group
