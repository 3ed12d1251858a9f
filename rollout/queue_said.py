"""What the calls of a client say to the server: groups that travel, groups that lie in its folder, verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from rollout.journal_segments import Ref
from rollout.queue_protocol import pack_blobs
from rollout.types import Group, Verdict
from rollout.wire import Buffer, encode_group
from rollout.wire_brief import Brief, brief_columns
from rollout.wire_verdicts import verdicts_table

Said = tuple[dict[str, Any], Sequence[Buffer]]  # arguments and blobs


def is_much(groups: Iterable[Group], nbytes: int) -> bool:
    """Whether the arrays of these groups come to so many bytes."""
    return any(total >= nbytes for total in accumulate(9 * g.n_tokens for g in groups))


def sent(groups: Iterable[Group]) -> Said:
    """Groups that travel with the message."""
    counts, blobs = pack_blobs([encode_group(g) for g in groups])
    return {"groups": counts}, blobs


def placed(briefs: Sequence[Brief], groups: Iterable[Group], places: Sequence[Ref]) -> Said:
    """Groups that the server finds in the journal's folder: it is told what it would read in their headers."""
    args: dict[str, Any] = {"briefs": brief_columns(briefs), "places": list(zip(*places, strict=True))}
    verdicts = {g.ordinal: [t.verdict for t in g.trajectories if t.verdict is not None] for g in groups}
    judged = {brief.ordinal: v for brief in briefs if len(v := verdicts[brief.ordinal]) == brief.answers}
    if judged:
        args["judged"] = scored(judged)
    return args, ()


def scored(verdicts: Mapping[int, Sequence[Verdict]]) -> dict[str, Any]:
    return {"ordinals": list(verdicts), "verdicts": verdicts_table(list(verdicts.values()))}


def trained(step: int, version: int, skipped: Iterable[int], live: bool) -> dict[str, Any]:
    args = {"step": step, "version": version, "skipped": list(skipped)}
    return {**args, "live": True} if live else args
