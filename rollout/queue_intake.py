"""Reading what requests carry: groups, leases and scores, checked before anybody acts on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rollout.errors import LedgerError, WireError
from rollout.journal_segments import PLACED, Ref
from rollout.queue_protocol import Request, split_blobs
from rollout.types import Verdict
from rollout.wire import frame_bytes, read_header
from rollout.wire_brief import Brief, read_briefs
from rollout.wire_fields import Buffer, Fields
from rollout.wire_verdicts import read_verdicts_table


class Sent(NamedTuple):
    """A group that came with its arrays."""

    brief: Brief
    header: Buffer
    frames: Sequence[Buffer]
    nbytes: int
    verdicts: Sequence[Verdict] | None  # if it came judged


class Placed(NamedTuple):
    """A group whose header and arrays its client has written into the journal's folder."""

    brief: Brief
    place: Ref
    verdicts: Sequence[Verdict] | None

    @property
    def nbytes(self) -> int:
        return self.place.body


def read_groups(r: Request, group_size: int) -> Sequence[Sent] | Sequence[Placed]:
    """The groups of a submit, each checked against what is said of it; the arrays stay closed."""
    groups = _read_placed(r) if "places" in r.value else _read_sent(r)
    _check_groups(groups, group_size)
    return groups


def _read_sent(r: Request) -> list[Sent]:
    groups = []
    blobs = split_blobs(r.ints("groups", 0, 1 << 20, most=1 << 16), r.blobs, "request")
    for i, (raw, frames) in enumerate(blobs):
        header, nbytes = read_header(raw), frame_bytes(frames)
        if nbytes != header.body:
            raise WireError(f"groups[{i}].frames", f"{nbytes} bytes, its header says {header.body}")
        groups.append(Sent(Brief.of(header), raw, frames, nbytes, header.all_judged))
    return groups


def _read_placed(r: Request) -> list[Placed]:
    briefs = read_briefs(Fields(r.get("briefs"), "request.briefs"))
    f, n = Fields.of_row(r.get("places"), "request.places", Ref._fields), len(briefs)
    places = list(map(Ref, *[f.ints(name, 0, 1 << 62, exactly=n) for name in Ref._fields]))
    for brief, place in zip(briefs, places, strict=True):
        if place.segment < PLACED or place.body < brief.tokens_end + 5 * brief.n_tokens:
            raise WireError("request.places", f"{place} is no place of a group with {brief.n_tokens} tokens")
    judged = dict(read_scores(Fields(r.get("judged"), "request.judged"))) if "judged" in r.value else {}
    return [Placed(brief, place, judged.get(brief.ordinal)) for brief, place in zip(briefs, places, strict=True)]


def _check_groups(groups: Sequence[Sent] | Sequence[Placed], group_size: int) -> None:
    seen = set()
    for brief, verdicts in [(g.brief, g.verdicts) for g in groups]:
        if brief.answers != group_size:
            detail = f"{brief.answers} trajectories, group_size is {group_size}"
            raise LedgerError(brief.ordinal, "leased", "submit", detail)
        if verdicts is not None and len(verdicts) != brief.answers:
            raise WireError("request.verdicts", f"{len(verdicts)} verdicts for {brief.answers} trajectories")
        if brief.ordinal in seen:
            raise WireError("request.groups", f"ordinal {brief.ordinal} twice in one message")
        seen.add(brief.ordinal)


def read_leases(r: Fields) -> dict[int, int]:
    """[[ordinal, attempt], ...] of a request."""
    leases = {}
    for i, row in enumerate(r.list("leases")):
        if not isinstance(row, list) or [type(x) for x in row] != [int, int]:
            raise WireError(f"request.leases[{i}]", "not [ordinal, attempt]")
        leases[row[0]] = row[1]
    return leases


def read_scores(f: Fields) -> list[tuple[int, Sequence[Verdict]]]:
    """Ordinals and the table of their verdicts."""
    ordinals = f.ints("ordinals", 0, 1 << 62)
    table = read_verdicts_table(f.get("verdicts"), len(ordinals), f"{f.path}.verdicts")
    return list(zip(ordinals, table, strict=True))
