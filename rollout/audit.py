"""The auditor: reads the journal and the learner's own log, and says whether every ordinal was trained once or dropped.

It shares the record format with the journal (journal_segments, wire) and nothing with the ledger: what a fact means is
written here a second time, so that a mistake in the ledger cannot hide itself.

    audit(run_dir / "journal", run_dir / "trained.jsonl")
    -> AuditReport(issued=200, trained=192, dropped={"zero_signal": 8}, in_flight=0, lost=(), duplicated=(), ...)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollout.journal_history import read_history
from rollout.journal_segments import Tail, scan, segment_numbers
from rollout.trained_log import TrainedSteps
from rollout.wire import unpack


@dataclass(frozen=True, slots=True)
class AuditReport:
    """`clean` is the verdict. `in_flight` ordinals are neither trained nor dropped yet: none once a run has ended."""

    issued: int
    trained: int
    dropped: dict[str, int]
    in_flight: int
    lost: tuple[int, ...]  # settled in the journal, but neither trained by the learner nor dropped
    duplicated: tuple[int, ...]  # trained in more than one step, or trained and dropped
    replayed_differently: tuple[int, ...]  # steps that a restarted learner trained with other groups
    max_staleness: int
    torn_bytes: int
    unbalanced: tuple[int, ...] = ()  # segments whose snapshot says that an ordinal vanished or appeared

    @property
    def conserved(self) -> bool:
        settled = self.trained + sum(self.dropped.values()) + len(self.lost) + self.in_flight
        return self.issued == settled - len(self.duplicated) and not self.unbalanced

    @property
    def clean(self) -> bool:
        return self.conserved and not (self.lost or self.duplicated or self.replayed_differently)

    def as_row(self) -> dict[str, Any]:
        return {**asdict(self), "conserved": self.conserved, "clean": self.clean}


class Books:
    """What the journal says about each ordinal."""

    def __init__(self) -> None:
        self.issued = 0
        self.dropped: dict[int, str] = {}
        self.open: set[int] = set()  # leased at some time, and not settled
        self.steps: dict[int, list[int]] = {}
        self.trained_steps = 0
        self.torn = 0
        self.unbalanced: list[int] = []

    def snapshot(self, value: dict[str, Any], segment: int) -> None:
        """A snapshot repeats what earlier segments said, and stands in for those that are gone."""
        ledger = value["ledger"]
        if ledger["issued"] != len(ledger["entries"]) + ledger["committed"] + sum(ledger["dropped"].values()):
            self.unbalanced.append(segment)
        self.issued = max(self.issued, ledger["issued"])
        self.open = {row[0] for row in ledger["entries"]}
        self.steps.update({step: list(ordinals) for step, ordinals in ledger["plan"]})
        self.trained_steps = ledger["version"]

    def fact(self, row: list[Any]) -> None:
        match row:
            case ["Leased", ordinals, *_]:
                self.issued = max(self.issued, max(ordinals) + 1)
                self.open.update(ordinals)
            case ["Dropped", ordinals, reason]:
                self.open.difference_update(ordinals)
                self.dropped.update(dict.fromkeys(ordinals, reason))
            case ["Taken", step, ordinals]:
                self.steps[step] = list(ordinals)
            case ["Trained", step]:
                self.trained_steps = step + 1
            case ["Rewound", version, _]:
                self.trained_steps = version

    def in_flight(self) -> set[int]:
        """Open ordinals that belong to no trained step."""
        done = {o for step, ordinals in self.steps.items() if step < self.trained_steps for o in ordinals}
        return self.open - done


def audit(journal_dir: Path, trained_log: Path) -> AuditReport:
    """Read both sides. Nothing needs to be running, and nothing is changed."""
    books = read_books(Path(journal_dir))
    learner = TrainedSteps.read(Path(trained_log))
    times = Counter(o for ordinals in learner.ordinals.values() for o in ordinals)
    flying = books.in_flight() - times.keys()
    settled = times.keys() | books.dropped.keys() | flying
    twice = {o for o, n in times.items() if n > 1} | (times.keys() & books.dropped.keys())
    return AuditReport(
        issued=max(books.issued, max(times, default=-1) + 1),
        trained=len(times),
        dropped=dict(Counter(books.dropped.values())),
        in_flight=len(flying),
        lost=tuple(o for o in range(books.issued) if o not in settled),
        duplicated=tuple(sorted(twice)),
        replayed_differently=tuple(learner.changed),
        max_staleness=max(learner.ages.values(), default=0),
        torn_bytes=books.torn,
        unbalanced=tuple(books.unbalanced),
    )


def read_books(folder: Path) -> Books:
    """Everything the journal still says, oldest first: the history of deleted segments, then the segments."""
    books = Books()
    present = segment_numbers(folder)
    for number, facts in read_history(folder):
        if number not in present:
            for row in facts:
                books.fact(row)
    for number in present:
        tail = Tail()
        for value in _values(folder, number, tail):
            if value[0] == "snapshot":
                books.snapshot(value[1], number)
            elif value[0] == "facts":
                for row in value[1]:
                    books.fact(row)
        books.torn += tail.dropped
    return books


def _values(folder: Path, number: int, tail: Tail) -> Iterator[list[Any]]:
    for meta, _ in scan(folder, number, tail):
        yield unpack(meta, "journal")
