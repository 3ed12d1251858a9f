"""The header of a group: read and checked against itself. The arrays are not needed for it, and stay closed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout.errors import WireError
from rollout.types import Status, Verdict
from rollout.versions import VersionSpan
from rollout.wire_fields import Buffer, Fields
from rollout.wire_msgpack import unpack
from rollout.wire_verdicts import verdicts_or_none

SCHEMA = 1
MAX_BODY = 8 << 30  # bytes of one group's arrays
MAX_TRAJECTORIES = 65_536
MAX_VERSION = 1 << 62
STATUSES = tuple(Status)  # a status travels as its position here
FAILED = STATUSES.index(Status.FAILED)
FIELDS = (
    *("schema", "ordinal", "attempt", "prompt", "lengths", "statuses"),
    *("versions", "extras", "notes", "verdicts", "body"),
)  # in the order in which they are written
MOST_USUAL = 1024  # trajectories
DTYPES = frozenset({"<i4", "<f4", "<f2", "<f8", "<i2", "<i8", "<u2", "<u4", "|b1", "|u1", "|i1"})


@dataclass(slots=True)
class GroupHeader:
    """What a server knows of a group it never opens: GroupHeader(17, 0, 5, (3, 12), n_tokens=15, ...)."""

    ordinal: int
    attempt: int
    prompt: int
    lengths: tuple[int, ...]
    statuses: tuple[int, ...]
    versions: int | list[list[int]]  # one version for all, or [version, end, version, end, ...] for each
    extras: tuple[tuple[int, str, np.dtype[Any], tuple[int, ...]], ...]
    notes: Mapping[str, Any]
    verdicts: Sequence[Verdict | None]
    body: int
    n_tokens: int
    oldest_version: int

    @property
    def tokens_end(self) -> int:
        """Bytes of the body up to the end of the token ids: all that a scorer needs."""
        return 4 * (self.prompt + self.n_tokens)

    @property
    def all_judged(self) -> Sequence[Verdict] | None:
        """The verdicts, if the group came with one for each trajectory."""
        return self.verdicts if self.verdicts[0] is not None and None not in self.verdicts else None  # type: ignore[return-value]

    def spans(self) -> list[tuple[VersionSpan, ...]]:
        """[4, 7, 5, 12] is version 4 for tokens [0, 7) and version 5 for [7, 12)."""
        if isinstance(self.versions, int):
            by_length = {n: (VersionSpan(self.versions, 0, n),) if n else () for n in set(self.lengths)}
            return [by_length[n] for n in self.lengths]
        spans = []
        for runs in self.versions:
            starts = (0, *runs[1:-2:2])
            spans.append(tuple(map(VersionSpan, runs[::2], starts, runs[1::2])))
        return spans


def read_header(data: Buffer) -> GroupHeader:
    """Raises WireError naming the field."""
    value = unpack(data, "group")
    return usual_header(value) or careful_header(value)


def usual_header(value: Any) -> GroupHeader | None:
    """A plain group's header: one version, no extras, notes or verdicts, all checked at once. None: look carefully."""
    if type(value) is not dict or len(value) != len(FIELDS) or tuple(value) != FIELDS:
        return None
    schema, ordinal, attempt, prompt, lengths, statuses, versions, extras, notes, verdicts, body = value.values()
    if schema != SCHEMA or verdicts is not None or extras or notes or (type(extras), type(notes)) != (list, dict):
        return None
    if type(lengths) is not list or type(statuses) is not list or not 0 < len(lengths) == len(statuses) <= MOST_USUAL:
        return None
    numbers = (schema, ordinal, attempt, prompt, versions, body, *lengths, *statuses)
    if set(map(type, numbers)) != {int} or min(numbers) < 0 or max(numbers) > 1 << 31:
        return None
    n_tokens = sum(lengths)
    if min(lengths) == 0 or max(statuses) >= len(STATUSES) or body != 4 * prompt + 9 * n_tokens:
        return None
    return GroupHeader(
        ordinal, attempt, prompt, tuple(lengths), tuple(statuses), versions, (), notes, (None,) * len(lengths),
        body, n_tokens, versions,
    )  # fmt: skip


def careful_header(value: Any) -> GroupHeader:
    """Any header, field by field. Raises WireError naming the field."""
    f = Fields(value, "group")
    f.schema(SCHEMA)
    lengths = f.ints("lengths", 0, 1 << 31, most=MAX_TRAJECTORIES)
    n, n_tokens = len(lengths), sum(lengths)
    if n == 0:
        raise WireError("group.lengths", "a group has at least one trajectory")
    statuses = f.ints("statuses", 0, len(STATUSES) - 1, exactly=n)
    if 0 in lengths:
        _check_empty(lengths, statuses)
    extras = tuple(_extra(f"group.extras[{i}]", row, n) for i, row in enumerate(f.list("extras", most=64 * n)))
    header = GroupHeader(
        f.int("ordinal", 0, 1 << 62),
        f.int("attempt", 0, 1 << 31),
        f.int("prompt", 0, 1 << 31),
        lengths,
        statuses,
        f.get("versions"),
        extras,
        f.map("notes"),
        verdicts_or_none(f, n),
        f.int("body", 0, MAX_BODY),
        n_tokens,
        _oldest(f, lengths),
    )
    expected = 4 * header.prompt + 9 * n_tokens
    expected += sum(lengths[i] * math.prod(shape) * dtype.itemsize for i, _, dtype, shape in extras)
    if header.body != expected:
        raise WireError("group.body", f"{header.body} bytes, but the lengths and dtypes make {expected}")
    return header


def _check_empty(lengths: Sequence[int], statuses: Sequence[int]) -> None:
    for i, (length, status) in enumerate(zip(lengths, statuses, strict=True)):
        if length == 0 and status != FAILED:
            raise WireError(f"group.lengths[{i}]", f"an empty trajectory, but its status is {STATUSES[status]}")


def _oldest(f: Fields, lengths: Sequence[int]) -> int:
    """Check the versions, and find the oldest; a group without tokens counts as version 0."""
    if type(f.get("versions")) is int:
        return f.int("versions", 0, MAX_VERSION) if any(lengths) else 0
    oldest = MAX_VERSION
    for i, (runs, length) in enumerate(zip(f.list("versions", exactly=len(lengths)), lengths, strict=True)):
        field = f"group.versions[{i}]"
        if not isinstance(runs, list) or len(runs) % 2 or not all(type(x) is int and x <= MAX_VERSION for x in runs):
            raise WireError(field, "not a list of (version, end) pairs of integers")
        at = newest = 0
        for version, end in zip(runs[::2], runs[1::2], strict=True):
            if version < newest or end <= at:
                raise WireError(field, f"version {version} up to token {end} after version {newest} up to token {at}")
            at, newest = end, version
        if at != length:
            raise WireError(field, f"covers {at} of {length} tokens")
        oldest = min([oldest, *runs[:1]])
    return oldest if any(lengths) else 0


def _extra(field: str, row: Any, n: int) -> tuple[int, str, np.dtype[Any], tuple[int, ...]]:
    f = Fields.of_row(row, field, ("trajectory", "name", "dtype", "shape"))
    dtype = f.str("dtype", 8)
    if dtype not in DTYPES:
        raise WireError(f"{field}.dtype", f"{dtype!r} does not travel")
    shape = f.ints("shape", 1, 1 << 20, most=4)
    return f.int("trajectory", 0, n - 1), f.str("name", 128), np.dtype(dtype), shape
