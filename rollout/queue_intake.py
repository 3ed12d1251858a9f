"""Reading what requests carry: groups, leases and scores, checked before anybody acts on them."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.errors import LedgerError, WireError
from rollout.journal_segments import Ref
from rollout.queue_protocol import Request, split_blobs
from rollout.types import Verdict
from rollout.wire import GroupHeader, frame_bytes, read_header
from rollout.wire_fields import Buffer
from rollout.wire_verdicts import read_verdicts

# header as read, as it came, the frames, and where the client has written them if they did not come
Stored = tuple[GroupHeader, Buffer, Sequence[Buffer], Ref | None]


def read_groups(r: Request, group_size: int) -> list[Stored]:
    """The groups of a submit, each checked against its own header; the arrays stay closed."""
    groups: list[Stored] = []
    blobs = split_blobs(r.ints("groups", 0, 1 << 20, most=1 << 16), r.blobs, "request")
    for i, ((raw, frames), place) in enumerate(zip(blobs, read_places(r, len(blobs)), strict=True)):
        header = read_header(raw)
        nbytes = frame_bytes(frames) if place is None else place.body
        if nbytes != header.body:
            raise WireError(f"groups[{i}].frames", f"{nbytes} bytes, its header says {header.body}")
        if len(header.lengths) != group_size:
            detail = f"{len(header.lengths)} trajectories, group_size is {group_size}"
            raise LedgerError(header.ordinal, "leased", "submit", detail)
        groups.append((header, raw, frames, place))
    if len({h.ordinal for h, *_ in groups}) != len(groups):
        raise WireError("request.groups", "the same ordinal twice in one message")
    return groups


def read_places(r: Request, n: int) -> list[Ref | None]:
    """[[file, offset, meta bytes, body bytes] or None, ...]: one for each group, or the field is missing."""
    if "places" not in r.value:
        return [None] * n
    places: list[Ref | None] = []
    for i, row in enumerate(r.list("places", exactly=n)):
        if row is None:
            places.append(None)
        elif isinstance(row, list) and len(row) == 4 and all(type(x) is int and 0 <= x < 1 << 62 for x in row):
            places.append(Ref(*row))
        else:
            raise WireError(f"request.places[{i}]", "not [file, offset, meta bytes, body bytes]")
    return places


def read_leases(r: Request) -> dict[int, int]:
    """[[ordinal, attempt], ...] of a request."""
    leases = {}
    for i, row in enumerate(r.list("leases")):
        if not isinstance(row, list) or [type(x) for x in row] != [int, int]:
            raise WireError(f"request.leases[{i}]", "not [ordinal, attempt]")
        leases[row[0]] = row[1]
    return leases


def read_scores(r: Request) -> list[tuple[int, Sequence[Verdict]]]:
    """[[ordinal, verdicts], ...] of a request."""
    scores = []
    for i, row in enumerate(r.list("verdicts")):
        if not isinstance(row, list) or len(row) != 2 or type(row[0]) is not int:
            raise WireError(f"request.verdicts[{i}]", "not [ordinal, verdicts]")
        scores.append((row[0], read_verdicts(row[1], f"request.verdicts[{i}]")))
    return scores
