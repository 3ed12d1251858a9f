"""What the records of a journal say, as msgpack values:

    ["snapshot", {...}]                             opens a segment
    ["facts", [fact, ...]]                          what the ledger stated
    ["group", fact, header]  + the group's arrays   a group that was sent, with the fact that it was generated
    ["group", [], header]    + the group's arrays   the same in a payload file: nobody has vouched for it yet
    ["placed", [fact, ...], [place, ...]]           groups in payload files that have become part of the journal

A group's header stands in its record as it came: nothing is packed twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rollout.errors import WireError
from rollout.journal_segments import Ref
from rollout.ledger_facts import Generated
from rollout.wire_facts import fact_row, read_fact
from rollout.wire_fields import Buffer
from rollout.wire_header import GroupHeader, check_header
from rollout.wire_msgpack import pack, unpack

_THREE = b"\x93"  # msgpack for "a list of three"
_GROUP = _THREE + pack("group")
_NOBODY = _GROUP + pack([])


def group_record(header: Buffer, fact: Generated | None = None) -> bytes:
    return (_NOBODY if fact is None else _GROUP + pack(fact_row(fact))) + bytes(header)


def placed_record(facts: Sequence[Generated], places: Sequence[Ref]) -> bytes:
    return pack(["placed", [fact_row(f) for f in facts], places])


def header_of(meta: Buffer) -> GroupHeader:
    """The header in the record of a group. Raises WireError."""
    return check_header(_header(unpack(meta, "journal")))


def header_bytes(meta: Buffer) -> bytes:
    """The same, unopened."""
    return pack(_header(unpack(meta, "journal")))


def _header(value: Any) -> Any:
    if type(value) is not list or len(value) != 3 or value[0] != "group":
        raise WireError("journal", f"not the record of a group: {str(value)[:40]}")
    return value[2]


def generated(value: Any, ref: Ref) -> Iterator[tuple[Generated, Ref]]:
    """The groups of a record that lies at `ref`, and where their arrays are. Raises WireError."""
    match value:
        case ["group", row, _]:
            yield _generated(row), ref
        case ["placed", list(rows), list(places)] if len(rows) == len(places):
            yield from ((_generated(row), Ref(*place)) for row, place in zip(rows, places, strict=True))
        case ["placed", *_]:
            raise WireError("journal", "as many places as groups are wanted")


def _generated(row: Any) -> Generated:
    made = read_fact(row)
    if not isinstance(made, Generated):
        raise WireError("journal", f"a group record holds a {type(made).__name__}")
    return made
