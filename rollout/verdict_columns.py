"""Verdicts of one group that are all scores, in the same components: as columns, which is how they travel and wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import overload

from rollout.types import Scored


class ScoreColumns(Sequence[Scored]):
    """ScoreColumns([1.0, 0.0], {"exact": [1.0, 0.0]}) reads like (Scored(1.0, {"exact": 1.0}), Scored(0.0, ...)).

    The columns are as long as each other, and finite: whoever makes one has checked it. Nobody changes them.
    """

    __slots__ = ("_made", "components", "values")

    def __init__(self, values: Sequence[float], components: Mapping[str, Sequence[float]]) -> None:
        self.values, self.components = values, components
        self._made: tuple[Scored, ...] | None = None

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, i: int) -> Scored: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[Scored, ...]: ...
    def __getitem__(self, i: int | slice) -> Scored | tuple[Scored, ...]:
        return self._all()[i]

    def __iter__(self) -> Iterator[Scored]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (tuple, ScoreColumns)) and self._all() == tuple(other)

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())

    def column(self, name: str | None) -> Sequence[float]:
        """One component of each, or the value where it is not named or not there."""
        return self.components.get(name, self.values) if name else self.values

    def part(self, start: int, stop: int) -> ScoreColumns:
        return ScoreColumns(self.values[start:stop], {name: c[start:stop] for name, c in self.components.items()})

    def _all(self) -> tuple[Scored, ...]:
        if self._made is None:
            names = tuple(self.components)
            rows = zip(*self.components.values(), strict=True) if names else [()] * len(self.values)
            self._made = tuple(
                [Scored(v, dict(zip(names, row, strict=True))) for v, row in zip(self.values, rows, strict=True)]
            )
        return self._made
