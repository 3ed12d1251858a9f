"""Which committed steps stay in the journal for offline use (DPO, replay, `headrace export-rollouts`).

    topology.queue.retain   0      what is committed goes, with the segment that holds it (the default)
                            n      the groups of the latest n committed steps stay, and everything said since
                            "all"  nothing is ever deleted

A step's segments are counted as live for as long as the step stays, and segments go in the order in which they were
written: what a reader needs to know about a group (its verdicts, its fate) was always said after it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Literal

Retain = int | Literal["all"]


class Retention:
    """`live` is the journal's count of reasons to keep a segment; steps committed together stay together."""

    def __init__(self, live: Counter[int], retain: Retain) -> None:
        self.live = live
        self.steps = 0 if retain == "all" else retain
        self._kept: deque[tuple[int, tuple[int, ...]]] = deque()  # (last step, its segments)

    def committed(self, step: int, segments: Iterable[int]) -> None:
        """Steps up to `step` are committed; their groups lie in `segments`."""
        if self.steps:
            self._keep(step, tuple(sorted(set(segments))))
            while self._kept and self._kept[0][0] <= step - self.steps:
                for number in self._kept.popleft()[1]:
                    self.live[number] -= 1

    def _keep(self, step: int, segments: tuple[int, ...]) -> None:
        self._kept.append((step, segments))
        for number in segments:
            self.live[number] += 1

    @property
    def rows(self) -> list[list[object]]:
        """For the snapshot: [[last step, [segment, ...]], ...]."""
        return [[step, list(segments)] for step, segments in self._kept]

    def restore(self, rows: Iterable[tuple[int, list[int]]]) -> None:
        """What a snapshot says; a smaller `retain` than it was written with takes effect at the next commit."""
        for step, segments in rows if self.steps else ():
            self._keep(step, tuple(segments))
