"""Verdicts as plain rows, and back: what the score call, the journal and the take call carry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rollout.errors import WireError
from rollout.types import Failed, Scored, TimedOut, Verdict
from rollout.verdict_columns import ScoreColumns
from rollout.wire_fields import Fields


def verdict_row(verdict: Verdict | None) -> list[Any] | None:
    """["scored", 1.0, {"exact": 1.0}], ["failed", "raised", "KeyError: 'x'"], ["timed_out", 5.0] or None."""
    match verdict:
        case None:
            return None
        case Scored(value, components):
            return ["scored", float(value), {k: float(v) for k, v in components.items()}]
        case Failed(kind, detail):
            return ["failed", kind, detail]
        case TimedOut(deadline_s):
            return ["timed_out", float(deadline_s)]
    raise WireError("verdict", f"{verdict!r} is not a verdict")


def read_verdict(row: Any, field: str) -> Verdict:
    """The verdict of a row; a number that is not finite is refused."""
    match row:
        case ["scored", float(value), dict(components)] if _finite(value, *components.values()) and all(
            map(_text, components)
        ):
            return Scored(value, components)
        case ["failed", str(kind), str(detail)]:
            return Failed(kind, detail)
        case ["timed_out", float(deadline_s)] if _finite(deadline_s):
            return TimedOut(deadline_s)
    raise WireError(field, f"not a verdict: {str(row)[:80]}")


def verdicts_row(verdicts: Sequence[Verdict | None]) -> list[Any]:
    """The verdicts of one group. All scored, in the same components, is the usual case and travels as columns:

    ["scored", [1.0, 0.0], {"exact": [1.0, 0.0]}]      otherwise      ["mixed", [row, row, None]]
    """
    if isinstance(verdicts, ScoreColumns):
        return ["scored", verdicts.values, verdicts.components]
    first = verdicts[0] if verdicts else None
    if isinstance(first, Scored):
        names = list(first.components)
        if all(isinstance(v, Scored) and list(v.components) == names for v in verdicts):
            columns = {n: [float(v.components[n]) for v in verdicts] for n in names}  # type: ignore[union-attr]
            return ["scored", [float(v.value) for v in verdicts], columns]  # type: ignore[union-attr]
    return ["mixed", [verdict_row(v) for v in verdicts]]


def read_verdicts(row: Any, field: str) -> Sequence[Verdict]:
    """One verdict for each trajectory."""
    verdicts = read_optional_verdicts(row, field)
    if row[0] == "mixed" and None in verdicts:
        raise WireError(field, "a trajectory has no verdict")
    return verdicts  # type: ignore[return-value]


def read_optional_verdicts(row: Any, field: str) -> Sequence[Verdict | None]:
    """Scores come as columns: each becomes an object when it is touched."""
    match row:
        case ["scored", list(values), dict(columns)] if all(
            isinstance(name, str) and isinstance(c, list) and len(c) == len(values) for name, c in columns.items()
        ):
            if not (_finite(*values) and all(_finite(*c) for c in columns.values())):
                raise WireError(field, "a value is not a finite number")
            return ScoreColumns(values, columns)
        case ["mixed", list(rows)]:
            return tuple(None if r is None else read_verdict(r, f"{field}[{i}]") for i, r in enumerate(rows))
    raise WireError(field, f"not verdicts: {str(row)[:80]}")


def _finite(*values: Any) -> bool:
    return set(map(type, values)) <= {float} and all(map(math.isfinite, values))


def _text(value: Any) -> bool:
    return isinstance(value, str)


def verdicts_or_none(f: Fields, n: int) -> Sequence[Verdict | None]:
    if f.get("verdicts") is None:
        return (None,) * n
    verdicts = read_optional_verdicts(f.get("verdicts"), "group.verdicts")
    if len(verdicts) != n:
        raise WireError("group.verdicts", f"{len(verdicts)} verdicts for {n} trajectories")
    return verdicts
