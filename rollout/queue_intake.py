"""Reading what requests carry: groups, leases and scores, checked before anybody acts on them."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.errors import LedgerError, WireError
from rollout.queue_protocol import Request, split_blobs
from rollout.types import Verdict
from rollout.wire import GroupHeader, frame_bytes, read_header
from rollout.wire_fields import Buffer
from rollout.wire_verdicts import read_verdicts

Stored = tuple[GroupHeader, Buffer, Sequence[Buffer]]  # header as read, as it came, and the frames


def read_groups(r: Request, group_size: int) -> list[Stored]:
    """The groups of a submit, each checked against its own header; the arrays stay closed."""
    groups: list[Stored] = []
    for i, (raw, frames) in enumerate(split_blobs(r.ints("groups", 0, 1 << 20, most=1 << 16), r.blobs, "request")):
        header = read_header(raw)
        if frame_bytes(frames) != header.body:
            raise WireError(f"groups[{i}].frames", f"{frame_bytes(frames)} bytes, its header says {header.body}")
        if len(header.lengths) != group_size:
            detail = f"{len(header.lengths)} trajectories, group_size is {group_size}"
            raise LedgerError(header.ordinal, "leased", "submit", detail)
        groups.append((header, raw, frames))
    if len({h.ordinal for h, _, _ in groups}) != len(groups):
        raise WireError("request.groups", "the same ordinal twice in one message")
    return groups


def read_leases(r: Request) -> dict[int, int]:
    """[[ordinal, attempt], ...] of a request."""
    leases = {}
    for i, row in enumerate(r.list("leases")):
        if not isinstance(row, list) or [type(x) for x in row] != [int, int]:
            raise WireError(f"request.leases[{i}]", "not [ordinal, attempt]")
        leases[row[0]] = row[1]
    return leases


def read_scores(r: Request) -> list[tuple[int, tuple[Verdict, ...]]]:
    """[[ordinal, verdicts], ...] of a request."""
    scores = []
    for i, row in enumerate(r.list("verdicts")):
        if not isinstance(row, list) or len(row) != 2 or type(row[0]) is not int:
            raise WireError(f"request.verdicts[{i}]", "not [ordinal, verdicts]")
        scores.append((row[0], read_verdicts(row[1], f"request.verdicts[{i}]")))
    return scores
