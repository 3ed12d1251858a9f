"""What the records of a journal say, as msgpack values:

    ["snapshot", {...}]                             opens a segment
    ["facts", [fact, ...]]                          what the ledger stated
    ["group", fact, header]  + the group's arrays   a group that was sent, with the fact that it was generated
    ["group", [], header]    + the group's arrays   the same in a payload file: nobody has vouched for it yet
    ["placed", [fact, ...], [place, ...]]           groups in payload files that have become part of the journal

A group's header stands in its record as it came, as bytes: whoever recovers a journal need not read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.errors import WireError
from rollout.journal_segments import Ref
from rollout.ledger_facts import Generated
from rollout.wire_facts import fact_row, read_fact
from rollout.wire_fields import Buffer
from rollout.wire_msgpack import pack, unpack

_GROUP = b"\x93" + pack("group")  # msgpack for "a list of three", and the first of them
_NOBODY = _GROUP + pack([])


def group_record(header: Buffer, fact: Generated | None = None) -> bytes:
    return (_NOBODY if fact is None else _GROUP + pack(fact_row(fact))) + pack(bytes(header))


def placed_record(facts: Sequence[Generated], places: Sequence[Ref]) -> bytes:
    return pack(["placed", [fact_row(f) for f in facts], places])


def header_in(meta: Buffer) -> bytes:
    """The header in the record of a group, unopened. Raises WireError."""
    value = unpack(meta, "journal")
    if type(value) is not list or len(value) != 3 or value[0] != "group" or type(value[2]) is not bytes:
        raise WireError("journal", f"not the record of a group: {str(value)[:40]}")
    return value[2]


def generated(value: list[Any], ref: Ref) -> list[tuple[Generated, Ref]]:
    """The groups of a record that lies at `ref`, and where their arrays are. Raises WireError."""
    if value[0] == "group":
        return [(_generated(value[1]), ref)]
    if value[0] != "placed":
        return []
    _, rows, places = value
    if len(rows) != len(places):
        raise WireError("journal", f"{len(places)} places for {len(rows)} groups")
    return [(_generated(row), Ref(*place)) for row, place in zip(rows, places, strict=True)]


def _generated(row: Any) -> Generated:
    made = read_fact(row)
    if not isinstance(made, Generated):
        raise WireError("journal", f"a group record holds a {type(made).__name__}")
    return made
