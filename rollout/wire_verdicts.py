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


def trusted_verdicts(row: Any, field: str) -> Sequence[Verdict]:
    """`read_verdicts` of a row whose numbers were checked before a checksum was put over them."""
    match row:
        case ["scored", list(values), dict(columns)]:
            return ScoreColumns(values, columns)
    return read_verdicts(row, field)


def read_optional_verdicts(row: Any, field: str) -> Sequence[Verdict | None]:
    """Scores come as columns: each becomes an object when it is touched."""
    match row:
        case ["scored", list(values), dict(columns)]:
            return _scores(values, columns, field)
        case ["mixed", list(rows)]:
            return tuple(None if r is None else read_verdict(r, f"{field}[{i}]") for i, r in enumerate(rows))
    raise WireError(field, f"not verdicts: {str(row)[:80]}")


def verdicts_table(groups: Sequence[Sequence[Verdict]]) -> list[Any]:
    """The verdicts of many groups. All scored, as many in each, in the same components: they travel end to end,

    ["scored", 2, [1.0, 0.0, 0.5, 0.5], {"exact": [1.0, 0.0, 0.0, 1.0]}]      otherwise      ["each", [row, row]]
    """
    rows = list(map(verdicts_row, groups))
    if rows and all(row[0] == "scored" for row in rows):
        shapes = {(len(values), *columns) for _, values, columns in rows}
        if len(shapes) == 1:
            ((n, *names),) = shapes
            columns = {name: [x for row in rows for x in row[2][name]] for name in names}
            return ["scored", n, [x for row in rows for x in row[1]], columns]
    return ["each", rows]


def read_verdicts_table(table: Any, n_groups: int, field: str) -> list[Sequence[Verdict]]:
    """For each group one verdict per trajectory. Raises WireError."""
    match table:
        case ["scored", int(n), list(values), dict(columns)] if n > 0 and len(values) == n * n_groups:
            whole = _scores(values, columns, field)
            return [whole.part(at, at + n) for at in range(0, len(values), n)]
        case ["each", list(rows)] if len(rows) == n_groups:
            return [read_verdicts(row, f"{field}[{i}]") for i, row in enumerate(rows)]
    raise WireError(field, f"not the verdicts of {n_groups} groups: {str(table)[:80]}")


def _scores(values: list[Any], columns: dict[Any, Any], field: str) -> ScoreColumns:
    for name, column in columns.items():
        if not isinstance(name, str) or not isinstance(column, list) or len(column) != len(values):
            raise WireError(field, f"component {str(name)[:40]} is not a list of {len(values)} numbers")
    if not (_finite(*values) and all([_finite(*c) for c in columns.values()])):
        raise WireError(field, "a value is not a finite number")
    return ScoreColumns(values, columns)


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
