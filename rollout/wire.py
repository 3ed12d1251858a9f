"""The one byte format of Headrace: a small msgpack header, then raw little-endian arrays.

A group is a header and a body. The body of a group with a prompt of 5 tokens and answers of 3 and 12 tokens is

    prompt_ids int32[5] | token_ids int32[3] int32[12] | behaviour_logprobs float32[3] float32[12] | loss_mask bool[3] bool[12] | extras

cut into frames at array boundaries: one frame if small, else one frame per array, which ZeroMQ then sends without copying.
The cut does not matter to the reader. The header holds everything else, under readable names:

    {"schema": 1, "ordinal": 17, "attempt": 0, "prompt": 5, "lengths": [3, 12], "statuses": [0, 1],
     "versions": [[4, 3], [4, 7, 5, 12]],         # runs: version 4 up to token 7, version 5 up to token 12
     "extras": [[1, "entropy", "<f4", []]],       # trajectory, name, dtype, shape after the token dimension
     "notes": {"1": {"turns": [0, 9]}}, "verdicts": None, "body": 163}

Servers read headers only (`read_header`); `decode_group` makes arrays that are views of the frames. Nothing is ever
pickled or evaluated, sizes and nesting are bounded, and bytes that are not a valid message raise WireError with the field.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from rollout.errors import WireError
from rollout.types import Failed, Group, Scored, Status, TimedOut, Trajectory, Verdict
from rollout.versions import VersionSpan
from rollout.wire_fields import Fields

SCHEMA = 1
MAX_HEADER = 64 << 20  # bytes of one header
MAX_BODY = 8 << 30  # bytes of one group's arrays
MAX_TRAJECTORIES = 65_536
MAX_DEPTH = 16  # nesting of any header value
ONE_FRAME = 256 << 10  # smaller bodies travel in one frame
STATUSES = tuple(Status)  # a status travels as its position here
DTYPES = frozenset({"<i4", "<f4", "<f2", "<f8", "<i2", "<i8", "<u2", "<u4", "|b1", "|u1", "|i1"})

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class GroupHeader:
    """What a server knows of a group it never opens: GroupHeader(17, 0, 5, (3, 12), ..., oldest_version=4, ...)."""

    ordinal: int
    attempt: int
    prompt: int
    lengths: tuple[int, ...]
    statuses: tuple[Status, ...]
    versions: tuple[tuple[VersionSpan, ...], ...]
    extras: tuple[tuple[int, str, np.dtype[Any], tuple[int, ...]], ...]
    notes: Mapping[str, Any]
    verdicts: tuple[Verdict | None, ...]
    body: int

    @property
    def n_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def oldest_version(self) -> int:
        return min((spans[0].version for spans in self.versions if spans), default=0)

    @property
    def tokens_end(self) -> int:
        """Bytes of the body up to the end of the token ids: all that a scorer needs."""
        return 4 * (self.prompt + self.n_tokens)

    @property
    def all_judged(self) -> tuple[Verdict, ...] | None:
        """The verdicts, if the group came with one for each trajectory."""
        return tuple(v for v in self.verdicts if v is not None) if None not in self.verdicts else None


def pack(value: Any) -> bytes:
    """A header. Raises WireError for a value that has no msgpack form."""
    try:
        return msgpack.packb(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError("header", f"cannot be encoded: {error}") from error


def unpack(data: Buffer, field: str = "header") -> Any:
    """The value of a header, from bytes that may be anything at all."""
    if len(data) > MAX_HEADER:
        raise WireError(field, f"{len(data)} bytes, over the limit of {MAX_HEADER}")
    try:
        value = msgpack.unpackb(data, raw=False, strict_map_key=True, ext_hook=_no_extensions)
    except (ValueError, msgpack.exceptions.UnpackException, OverflowError) as error:
        raise WireError(field, f"not msgpack: {error or type(error).__name__}") from error
    return value


def _no_extensions(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


# ---- groups


def encode_group(group: Group) -> tuple[bytes, list[memoryview | bytes]]:
    """(header, frames). Large frames are views of the group's arrays: do not change these until they are sent."""
    columns: list[np.ndarray] = [_array(group.prompt_ids, "<i4", "prompt_ids")]
    items = list(enumerate(group.trajectories))
    columns += [_array(t.token_ids, "<i4", f"trajectories[{i}].token_ids") for i, t in items]
    columns += [_array(t.behaviour_logprobs, "<f4", f"trajectories[{i}].behaviour_logprobs") for i, t in items]
    columns += [_array(t.loss_mask, "|b1", f"trajectories[{i}].loss_mask") for i, t in items]
    extras = []
    for i, t in items:
        try:
            t.check()
        except ValueError as error:
            raise WireError(f"trajectories[{i}]", str(error)) from error
        if not np.isfinite(t.behaviour_logprobs).all():
            raise WireError(f"trajectories[{i}].behaviour_logprobs", "holds a value that is not finite")
        for name, array in t.extras.items():
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            columns.append(_array(little, little.dtype.str, f"trajectories[{i}].extras[{name!r}]"))
            extras.append([i, name, little.dtype.str, list(little.shape[1:])])
    header = {
        "schema": SCHEMA,
        "ordinal": group.ordinal,
        "attempt": group.attempt,
        "prompt": len(group.prompt_ids),
        "lengths": [len(t) for _, t in items],
        "statuses": [STATUSES.index(t.status) for _, t in items],
        "versions": [[n for s in t.versions for n in (s.version, s.end)] for _, t in items],
        "extras": extras,
        "notes": {str(i): dict(t.notes) for i, t in items if t.notes},
        "verdicts": [verdict_row(t.verdict) for _, t in items] if any(t.verdict for _, t in items) else None,
        "body": sum(c.nbytes for c in columns),
    }
    return pack(header), _frames(columns)


def _array(array: np.ndarray, dtype: str, field: str) -> np.ndarray:
    if dtype not in DTYPES:
        raise WireError(field, f"dtype {dtype} does not travel; use one of {sorted(DTYPES)}")
    if array.dtype.str != dtype:
        raise WireError(field, f"dtype is {array.dtype.str}, must be {dtype}")
    return np.ascontiguousarray(array)


def _frames(columns: Sequence[np.ndarray]) -> list[memoryview | bytes]:
    views = [memoryview(c.reshape(-1).view(np.uint8)) for c in columns if c.nbytes]
    if sum(len(v) for v in views) <= ONE_FRAME:
        return [b"".join(views)]
    return list(views)


def read_header(data: Buffer) -> GroupHeader:
    """Check a group's header against itself. The arrays are not needed for it."""
    f = Fields(unpack(data, "group"), "group", MAX_DEPTH)
    f.schema(SCHEMA)
    lengths = f.ints("lengths", 0, 1 << 31, most=MAX_TRAJECTORIES)
    n = len(lengths)
    if n == 0:
        raise WireError("group.lengths", "a group has at least one trajectory")
    statuses = tuple(STATUSES[s] for s in f.ints("statuses", 0, len(STATUSES) - 1, exactly=n))
    for i, (length, status) in enumerate(zip(lengths, statuses, strict=True)):
        if length == 0 and status is not Status.FAILED:
            raise WireError(f"group.lengths[{i}]", f"an empty trajectory, but its status is {status}")
    versions = tuple(
        _spans(f"group.versions[{i}]", runs, lengths[i]) for i, runs in enumerate(f.list("versions", exactly=n))
    )
    extras = tuple(_extra(f"group.extras[{i}]", row, n) for i, row in enumerate(f.list("extras", most=64 * n)))
    header = GroupHeader(
        ordinal=f.int("ordinal", 0, 1 << 62),
        attempt=f.int("attempt", 0, 1 << 31),
        prompt=f.int("prompt", 0, 1 << 31),
        lengths=lengths,
        statuses=statuses,
        versions=versions,
        extras=extras,
        notes=f.map("notes"),
        verdicts=_verdicts_or_none(f, n),
        body=f.int("body", 0, MAX_BODY),
    )
    expected = header.tokens_end + 5 * header.n_tokens
    expected += sum(lengths[i] * math.prod(shape) * dtype.itemsize for i, _, dtype, shape in extras)
    if header.body != expected:
        raise WireError("group.body", f"{header.body} bytes, but the lengths and dtypes make {expected}")
    return header


def _spans(field: str, runs: Any, length: int) -> tuple[VersionSpan, ...]:
    if not isinstance(runs, list) or len(runs) % 2 or not all(type(x) is int for x in runs):
        raise WireError(field, "not a list of (version, end) pairs of integers")
    spans, at, newest = [], 0, 0
    for version, end in zip(runs[::2], runs[1::2], strict=True):
        if version < newest or end <= at:
            raise WireError(field, f"version {version} up to token {end} after version {newest} up to token {at}")
        spans.append(VersionSpan(version, at, end))
        at, newest = end, version
    if at != length:
        raise WireError(field, f"covers {at} of {length} tokens")
    return tuple(spans)


def _extra(field: str, row: Any, n: int) -> tuple[int, str, np.dtype[Any], tuple[int, ...]]:
    f = Fields.of_row(row, field, ("trajectory", "name", "dtype", "shape"))
    dtype = f.str("dtype", 8)
    if dtype not in DTYPES:
        raise WireError(f"{field}.dtype", f"{dtype!r} does not travel")
    shape = f.ints("shape", 1, 1 << 20, most=4)
    return f.int("trajectory", 0, n - 1), f.str("name", 128), np.dtype(dtype), shape


def decode_group(data: Buffer, frames: Sequence[Buffer]) -> Group:
    """The group; its arrays are read-only views of `frames` wherever alignment allows.

    Frames that hold only the token ids (what a scorer gets) make a group with zero log-probs and an all-true mask.
    """
    header = read_header(data)
    body = Body(frames)
    whole = body.nbytes == header.body
    if not whole and body.nbytes != header.tokens_end:
        raise WireError("group.frames", f"{body.nbytes} bytes, the header says {header.body}")
    prompt = body.take("<i4", header.prompt)
    tokens = [body.take("<i4", n) for n in header.lengths]
    logprobs = [body.take("<f4", n) if whole else np.zeros(n, np.float32) for n in header.lengths]
    masks = [body.take("|b1", n) if whole else np.ones(n, np.bool_) for n in header.lengths]
    extras: dict[int, dict[str, np.ndarray]] = {}
    for i, name, dtype, shape in header.extras if whole else ():
        flat = body.take(dtype.str, header.lengths[i] * math.prod(shape))
        extras.setdefault(i, {})[name] = flat.reshape(header.lengths[i], *shape)
    for i, values in enumerate(logprobs):
        if not np.isfinite(values).all():
            raise WireError(f"trajectories[{i}].behaviour_logprobs", "holds a value that is not finite")
        if masks[i].size and masks[i].view(np.uint8).max() > 1:
            raise WireError(f"trajectories[{i}].loss_mask", "holds a byte that is neither 0 nor 1")
    trajectories = tuple(
        Trajectory(
            tokens[i],
            masks[i],
            logprobs[i],
            header.versions[i],
            header.statuses[i],
            header.verdicts[i],
            extras.get(i, {}),
            header.notes.get(str(i), {}),
        )
        for i in range(len(tokens))
    )
    return Group(header.ordinal, prompt, trajectories, header.attempt)


class Body:
    """Reads arrays off a sequence of frames, in order, without copying where an array lies in one frame, aligned."""

    def __init__(self, frames: Sequence[Buffer]) -> None:
        self._frames = [memoryview(f).cast("B") if len(f) else memoryview(b"") for f in frames]
        self.nbytes = sum(len(f) for f in self._frames)
        self._frame = self._at = 0

    def take(self, dtype: str, count: int) -> np.ndarray:
        kind = np.dtype(dtype)
        piece = self._bytes(count * kind.itemsize)
        array = np.frombuffer(piece, kind)
        if not array.flags.aligned:
            array = array.copy()
        array.flags.writeable = False
        return array

    def _bytes(self, n: int) -> Buffer:
        if n == 0:
            return b""
        frame = self._frames[self._frame]
        if self._at == len(frame):
            self._frame, self._at = self._frame + 1, 0
            return self._bytes(n)
        if self._at + n <= len(frame):
            self._at += n
            return frame[self._at - n : self._at]
        head = frame[self._at :]
        self._frame, self._at = self._frame + 1, 0
        return b"".join((head, self._bytes(n - len(head))))


# ---- verdicts


def verdict_row(verdict: Verdict | None) -> list[Any] | None:
    """["scored", 1.0, {"exact": 1.0}], ["failed", "raised", "KeyError: 'x'"], ["timed_out", 5.0] or None."""
    match verdict:
        case None:
            return None
        case Scored(value, components):
            return ["scored", float(value), {k: float(v) for k, v in components.items()}]
        case Failed(kind, detail):
            return ["failed", kind, detail]
        case TimedOut(deadline_s):
            return ["timed_out", float(deadline_s)]
    raise WireError("verdict", f"{verdict!r} is not a verdict")


def read_verdict(row: Any, field: str) -> Verdict:
    """The verdict of a row; a number that is not finite is refused."""
    match row:
        case ["scored", float(value), dict(components)] if _finite(value, *components.values()) and all(
            map(_text, components)
        ):
            return Scored(value, components)
        case ["failed", str(kind), str(detail)]:
            return Failed(kind, detail)
        case ["timed_out", float(deadline_s)] if _finite(deadline_s):
            return TimedOut(deadline_s)
    raise WireError(field, f"not a verdict: {str(row)[:80]}")


def read_verdicts(rows: Any, field: str) -> tuple[Verdict, ...]:
    if not isinstance(rows, list) or len(rows) > MAX_TRAJECTORIES:
        raise WireError(field, "not a list of verdicts")
    return tuple(read_verdict(row, f"{field}[{i}]") for i, row in enumerate(rows))


def _verdicts_or_none(f: Fields, n: int) -> tuple[Verdict | None, ...]:
    if f.get("verdicts") is None:
        return (None,) * n
    rows = f.list("verdicts", exactly=n)
    return tuple(None if r is None else read_verdict(r, f"group.verdicts[{i}]") for i, r in enumerate(rows))


def _finite(*values: Any) -> bool:
    return all(type(v) is float and math.isfinite(v) for v in values)


def frame_bytes(frames: Iterable[Buffer]) -> int:
    return sum(len(f) for f in frames)


def _text(value: Any) -> bool:
    return isinstance(value, str)
