"""Ledger facts and snapshots as msgpack rows: Dropped((17,), "stale") travels as ["Dropped", [17], "stale"]."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

from rollout.errors import WireError
from rollout.ledger_facts import Fact, Generated, Judged
from rollout.wire_verdicts import trusted_verdicts, verdicts_row

_NAMES = {kind: tuple(f.name for f in fields(kind)) for kind in get_args(Fact)}
_KINDS = {kind.__name__: (kind, 1 + len(names)) for kind, names in _NAMES.items()}
_UNKNOWN = (None, 0)


def fact_row(fact: Fact) -> list[Any]:
    if isinstance(fact, Judged):
        return ["Judged", fact.ordinal, verdicts_row(fact.verdicts)]
    return [type(fact).__name__, *(getattr(fact, name) for name in _NAMES[type(fact)])]


def read_fact(row: Any) -> Fact:
    """The fact of a row. The journal's checksums vouch for the values; the shape is checked all the same."""
    kind, length = _KINDS.get(row[0], _UNKNOWN) if isinstance(row, list) and row and type(row[0]) is str else _UNKNOWN
    if kind is None or len(row) != length:
        raise WireError("fact", f"not a fact: {str(row)[:80]}")
    if kind is Judged:
        return Judged(row[1], trusted_verdicts(row[2], "fact.verdicts"))
    if kind is Generated:
        return Generated(row[1], row[2], row[3], row[4])
    return kind(*[tuple(v) if type(v) is list else v for v in row[1:]])
