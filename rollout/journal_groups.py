"""A journal read as a dataset: the groups of a run with their verdicts, without a server. DPO and replay read this.

for group in read_groups(run_dir / "journal", versions=range(4, 9), fate="trained"): ...
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from rollout.errors import QueueError
from rollout.journal_history import read_history
from rollout.journal_records import generated, header_in
from rollout.journal_segments import Ref, Tail, read_record, scan, segment_numbers, segment_path
from rollout.types import Failed, Group, Scored, Status, TimedOut, Verdict
from rollout.wire import decode_group, unpack
from rollout.wire_verdicts import read_verdicts

Fate = Literal["any", "trained", "dropped", "open"]
Kind = Literal["scored", "failed", "timed_out", "none"]
KINDS: dict[type, Kind] = {Scored: "scored", Failed: "failed", TimedOut: "timed_out", type(None): "none"}


class Fates:
    """Pass one: what became of each ordinal, and its verdicts."""

    def __init__(self, folder: Path) -> None:
        self.verdicts: dict[int, Sequence[Verdict]] = {}
        self.dropped: dict[int, str] = {}
        self.steps: dict[int, list[int]] = {}
        self.trained_steps = 0
        present = segment_numbers(folder)
        for number, facts in read_history(folder):
            for row in facts if number not in present else ():
                self._fact(row)
        for value, _ in records(folder):
            if value[0] == "snapshot":
                self._snapshot(value[1]["ledger"])
            for row in value[1] if value[0] == "facts" else ():
                self._fact(row)
        self.trained = {o for s, ordinals in self.steps.items() if s < self.trained_steps for o in ordinals}

    def _snapshot(self, ledger: dict[str, Any]) -> None:
        """It repeats what segments said that may be gone; of the groups in it, also the verdicts."""
        self.steps.update(ledger["plan"])
        self.trained_steps = ledger["version"]
        for ordinal, *_, rows, _step in ledger["entries"]:
            if verdicts := read_verdicts(rows, "snapshot.verdicts"):
                self.verdicts[ordinal] = verdicts

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
    verdict: Kind | None = None,
    status: Status | None = None,
    keep: Callable[[Group], bool] | None = None,
) -> Iterator[Group]:
    """Every group in the journal, in the order of submission, with the verdicts it got.

    versions: those its oldest token may have. fate: what became of it. verdict, status: those of every answer.
    A run may go on meanwhile: what it has settled and deleted since is passed over. A damaged record, and an open
    group whose arrays are gone, raise QueueError; what follows a torn record is not read.
    """
    folder = Path(folder)
    fates = Fates(folder)
    for made, place in (told for value, ref in records(folder) for told in generated(value, ref)):
        if fate != "any" and fates.of(made.ordinal) != fate:
            continue
        group = _read(folder, made.ordinal, place)
        if group is None:
            continue
        verdicts = fates.verdicts.get(group.ordinal)
        if verdicts is not None:
            group = group.with_verdicts(verdicts)
        if versions is not None and group.oldest_version not in versions:
            continue
        if status is not None and any(t.status is not status for t in group.trajectories):
            continue
        if verdict is not None and any(KINDS[type(t.verdict)] != verdict for t in group.trajectories):
            continue
        if keep is None or keep(group):
            yield group


def records(folder: Path) -> Iterator[tuple[Any, Ref]]:
    """(meta, ref) of every good record of every segment that is there, in order."""
    for number in segment_numbers(folder):
        try:
            for meta, ref in scan(folder, number, Tail(), verify=False):
                yield unpack(meta, "journal"), ref
        except FileNotFoundError:
            continue  # deleted since they were listed: a run goes on


def _read(folder: Path, ordinal: int, place: Ref) -> Group | None:
    """The group at a place, None if it has been settled and forgotten."""
    try:
        meta, body = read_record(folder, place)
    except FileNotFoundError:
        if Fates(folder).of(ordinal) == "open":
            raise QueueError(
                f"ordinal {ordinal} is open, but its arrays are gone: {segment_path(folder, place.segment)}"
            ) from None
        return None
    return decode_group(header_in(meta), (body,))
