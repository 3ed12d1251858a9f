"""The one byte format of Headrace: a small msgpack header, then raw little-endian arrays.

A group is a header and a body. The body of a group with a prompt of 5 tokens and answers of 3 and 12 tokens is

    prompt_ids int32[5] | token_ids int32[3] int32[12] | behaviour_logprobs float32[3] float32[12]
    | loss_mask bool[3] bool[12] | extras, trajectory by trajectory

cut into frames at array boundaries: one frame if small, else one frame per array, which ZeroMQ sends without copying.
The cut does not matter to the reader. The header holds everything else, under readable names:

    {"schema": 1, "ordinal": 17, "attempt": 0, "prompt": 5, "lengths": [3, 12], "statuses": [0, 1],
     "versions": [[4, 3], [4, 7, 5, 12]],         # runs: version 4 up to token 7, version 5 up to token 12; or just 4
     "extras": [[1, "entropy", "<f4", []]],       # trajectory, name, dtype, shape after the token dimension
     "notes": {"1": {"turns": [0, 9]}}, "verdicts": None, "body": 163}

Servers read headers only (`read_header`); `decode_group` makes arrays that are views of the frames. Nothing is ever
pickled or evaluated, sizes and nesting are bounded, and bytes that are no valid message raise WireError with the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rollout.errors import WireError
from rollout.types import Group, Trajectory
from rollout.wire_body import check_finite
from rollout.wire_brief import Brief
from rollout.wire_decode import decode_group
from rollout.wire_fields import Buffer, frame_bytes
from rollout.wire_header import DTYPES, SCHEMA, STATUSES, GroupHeader, read_header
from rollout.wire_msgpack import pack, unpack
from rollout.wire_verdicts import verdicts_row

__all__ = ["Buffer", "GroupHeader", "decode_group", "encode_group", "frame_bytes", "pack", "read_header", "unpack"]

ONE_FRAME = 256 << 10  # smaller bodies travel in one frame
POSITIONS = {status: i for i, status in enumerate(STATUSES)}
INT32, FLOAT32, BOOL = (np.dtype(name) for name in ("<i4", "<f4", "|b1"))


class Encoded(NamedTuple):
    """A group as bytes. Large frames are views of the group's arrays: do not change these until they are sent."""

    header: bytes
    frames: list[Buffer]


def encode_group(group: Group) -> Encoded:
    """Raises WireError for what must not travel."""
    return encode_briefly(group)[0]


def encode_briefly(group: Group) -> tuple[Encoded, Brief]:
    """The group as bytes, and what a server that does not open it must know."""
    items = tuple(group.trajectories)
    prompt = _array(group.prompt_ids, INT32, "prompt_ids")
    usual = all(map(_is_usual, items))
    for i, t in () if usual else enumerate(items):
        _check(t, i)
    logprobs = [t.behaviour_logprobs for t in items]
    extras, extra_rows = ((), ()) if usual else _extras(items)
    lengths = [t.token_ids.size for t in items]
    n_tokens, tokens_end = sum(lengths), prompt.nbytes + 4 * sum(lengths)
    nbytes = tokens_end + 5 * n_tokens + sum([a.nbytes for a in extras])
    pieces = (prompt, *[t.token_ids for t in items], *logprobs, *[t.loss_mask for t in items], *extras)
    if nbytes <= ONE_FRAME:
        frames: list[Buffer] = [_joined(pieces)]
        logprobs = [np.frombuffer(frames[0], FLOAT32, n_tokens, tokens_end)]
    else:
        frames = [np.ascontiguousarray(c).reshape(-1).view(np.uint8).data for c in pieces if c.nbytes]
    for i, values in enumerate(logprobs):
        check_finite(values, f"trajectories[{i}].behaviour_logprobs")
    verdicts = [t.verdict for t in items]
    versions = _runs(items)
    header = {
        "schema": SCHEMA,
        "ordinal": group.ordinal,
        "attempt": group.attempt,
        "prompt": len(prompt),
        "lengths": lengths,
        "statuses": [POSITIONS[t.status] for t in items],
        "versions": versions,
        "extras": extra_rows,
        "notes": {str(i): dict(t.notes) for i, t in enumerate(items) if t.notes},
        "verdicts": verdicts_row(verdicts) if any(verdicts) else None,
        "body": nbytes,
    }
    oldest = versions if isinstance(versions, int) else group.oldest_version
    brief = Brief(group.ordinal, group.attempt, len(items), n_tokens, oldest, tokens_end)
    return Encoded(pack(header), frames), brief


def _joined(pieces: Sequence[np.ndarray]) -> bytes:
    try:
        return b"".join(pieces)  # type: ignore[arg-type]
    except (TypeError, BufferError):  # one of them does not lie in one piece
        return b"".join(map(np.ascontiguousarray, pieces))  # type: ignore[arg-type]


def _is_usual(t: Trajectory) -> bool:
    """Whether a look is enough: tokens of one version, plain arrays of the right kinds and lengths, no extras."""
    ids, logprobs, mask, spans = t.token_ids, t.behaviour_logprobs, t.loss_mask, t.versions
    n = ids.size
    if not (n and len(spans) == 1 and ids.ndim == logprobs.ndim == mask.ndim == 1 and n == logprobs.size == mask.size):
        return False
    only = spans[0]
    kinds = ids.dtype is INT32 and logprobs.dtype is FLOAT32 and mask.dtype is BOOL
    return kinds and only.start == 0 and only.end == n and only.version >= 0 and not t.extras


def _check(t: Trajectory, i: int) -> None:
    where = f"trajectories[{i}]"
    _array(t.token_ids, INT32, f"{where}.token_ids")
    _array(t.behaviour_logprobs, FLOAT32, f"{where}.behaviour_logprobs")
    _array(t.loss_mask, BOOL, f"{where}.loss_mask")
    try:
        t.check()
    except ValueError as error:
        raise WireError(where, str(error)) from error


def _array(array: np.ndarray, dtype: np.dtype[Any], field: str) -> np.ndarray:
    if array.dtype != dtype or array.ndim != 1:
        raise WireError(field, f"{array.ndim} dimensions of dtype {array.dtype.str}, must be 1 of {dtype.str}")
    return array


def _runs(items: Sequence[Trajectory]) -> int | list[list[int]]:
    """The version spans: one number where a single version made every token, else the runs of each trajectory."""
    versions = {s.version for t in items for s in t.versions}
    if len(versions) == 1:
        return versions.pop()
    return [[n for s in t.versions for n in (s.version, s.end)] for t in items]


def _extras(items: Sequence[Trajectory]) -> tuple[list[np.ndarray], list[list[Any]]]:
    """The optional arrays, little-endian, and their rows in the header."""
    arrays, rows = [], []
    for i, t in enumerate(items):
        for name, array in t.extras.items():
            little = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
            if little.dtype.str not in DTYPES or array.ndim == 0:
                field = f"trajectories[{i}].extras[{name!r}]"
                raise WireError(field, f"dtype is {little.dtype.str}, must be one of {sorted(DTYPES)}")
            arrays.append(little)
            rows.append([i, name, little.dtype.str, list(little.shape[1:])])
    return arrays, rows
