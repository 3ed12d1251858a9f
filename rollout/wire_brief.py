"""What a server must know of a group it never opens, and many of these as columns: one check for a whole message.

{"ordinal": [17, 18], "attempt": [0, 0], "answers": [8, 8], "n_tokens": [2048, 1990],
 "oldest_version": [4, 4], "tokens_end": [8256, 8024]}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rollout.wire_fields import Fields
from rollout.wire_header import MAX_BODY, MAX_TRAJECTORIES, MAX_VERSION, GroupHeader


class Brief(NamedTuple):
    """Brief(17, attempt=0, answers=8, n_tokens=2048, oldest_version=4, tokens_end=8256)."""

    ordinal: int
    attempt: int
    answers: int
    n_tokens: int
    oldest_version: int
    tokens_end: int  # bytes of the body up to the end of the token ids: all that a scorer needs

    @classmethod
    def of(cls, h: GroupHeader) -> Brief:
        return cls(h.ordinal, h.attempt, len(h.lengths), h.n_tokens, h.oldest_version, h.tokens_end)


LIMITS = dict(zip(Brief._fields, (1 << 62, 1 << 31, MAX_TRAJECTORIES, 1 << 47, MAX_VERSION, MAX_BODY), strict=True))


def brief_columns(briefs: Sequence[Brief]) -> dict[str, Sequence[int]]:
    return dict(zip(Brief._fields, zip(*briefs, strict=True), strict=True))


def read_briefs(f: Fields) -> list[Brief]:
    """Raises WireError naming the column. The columns are as long as each other."""
    n = len(f.list("ordinal"))
    return list(map(Brief, *[f.ints(name, 0, limit, exactly=n) for name, limit in LIMITS.items()]))
