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

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from rollout.errors import WireError
from rollout.types import Group, Status, Trajectory, Verdict
from rollout.versions import VersionSpan
from rollout.wire_body import Body
from rollout.wire_fields import Buffer, Fields, frame_bytes
from rollout.wire_verdicts import verdicts_or_none, verdicts_row

__all__ = ["Buffer", "GroupHeader", "decode_group", "encode_group", "frame_bytes", "pack", "read_header", "unpack"]

SCHEMA = 1
MAX_HEADER = 64 << 20  # bytes of one header
MAX_BODY = 8 << 30  # bytes of one group's arrays
MAX_TRAJECTORIES = 65_536
MAX_VERSION = 1 << 62
ONE_FRAME = 256 << 10  # smaller bodies travel in one frame
STATUSES = tuple(Status)  # a status travels as its position here
POSITIONS = {status: i for i, status in enumerate(STATUSES)}
USUAL = {name: np.dtype(name) for name in ("<i4", "<f4", "|b1")}
DTYPES = frozenset({"<i4", "<f4", "<f2", "<f8", "<i2", "<i8", "<u2", "<u4", "|b1", "|u1", "|i1"})


@dataclass(frozen=True, slots=True)
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
    verdicts: tuple[Verdict | None, ...]
    body: int
    n_tokens: int
    oldest_version: int

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


def encode_group(group: Group) -> tuple[bytes, list[Buffer]]:
    """(header, frames). Large frames are views of the group's arrays: do not change these until they are sent."""
    items = group.trajectories
    prompt = _array(group.prompt_ids, "<i4", "prompt_ids")
    tokens = [_array(t.token_ids, "<i4", "token_ids", i) for i, t in enumerate(items)]
    logprobs = [_array(t.behaviour_logprobs, "<f4", "behaviour_logprobs", i) for i, t in enumerate(items)]
    masks = [_array(t.loss_mask, "|b1", "loss_mask", i) for i, t in enumerate(items)]
    extras, extra_rows = _extras(items)
    for i, t in enumerate(items):
        _check(t, i)
    columns = [prompt, *tokens, *logprobs, *masks, *extras]
    nbytes = sum(c.nbytes for c in columns)
    if nbytes <= ONE_FRAME:
        logprobs = [np.concatenate(logprobs)]
        frames: list[Buffer] = [b"".join(map(memoryview, (prompt, *tokens, *logprobs, *masks, *extras)))]  # type: ignore[arg-type]
    else:
        frames = [c.reshape(-1).view(np.uint8).data for c in columns if c.nbytes]
    for i, values in enumerate(logprobs):
        if not np.isfinite(values).all():
            raise WireError(f"trajectories[{i}].behaviour_logprobs", "holds a value that is not finite")
    verdicts = [t.verdict for t in items]
    header = {
        "schema": SCHEMA,
        "ordinal": group.ordinal,
        "attempt": group.attempt,
        "prompt": len(prompt),
        "lengths": [len(a) for a in tokens],
        "statuses": [POSITIONS[t.status] for t in items],
        "versions": _runs(items),
        "extras": extra_rows,
        "notes": {str(i): dict(t.notes) for i, t in enumerate(items) if t.notes},
        "verdicts": verdicts_row(verdicts) if any(verdicts) else None,
        "body": nbytes,
    }
    return pack(header), frames


def _runs(items: Sequence[Trajectory]) -> int | list[list[int]]:
    """The version spans: one number where a single version made every token, else the runs of each trajectory."""
    versions = {s.version for t in items for s in t.versions}
    if len(versions) == 1:
        return versions.pop()
    return [[n for s in t.versions for n in (s.version, s.end)] for t in items]


def _array(array: np.ndarray, dtype: str, name: str, i: int | None = None) -> np.ndarray:
    if array.dtype is USUAL.get(dtype) and array.ndim and array.flags.c_contiguous:
        return array
    if array.dtype.str != dtype or dtype not in DTYPES or array.ndim == 0:
        field = name if i is None else f"trajectories[{i}].{name}"
        raise WireError(field, f"dtype is {array.dtype.str}, must be {dtype if dtype in DTYPES else sorted(DTYPES)}")
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _extras(items: Sequence[Trajectory]) -> tuple[list[np.ndarray], list[list[Any]]]:
    """The optional arrays, little-endian, and their rows in the header."""
    arrays, rows = [], []
    for i, t in enumerate(items):
        for name, array in t.extras.items():
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            arrays.append(_array(little, little.dtype.str, f"extras[{name!r}]", i))
            rows.append([i, name, little.dtype.str, list(little.shape[1:])])
    return arrays, rows


def _check(t: Trajectory, i: int) -> None:
    n, spans = t.token_ids.size, t.versions
    if n and t.loss_mask.size == n == t.behaviour_logprobs.size and len(spans) == 1 and not t.extras:
        only = spans[0]
        if only.start == 0 and only.end == n and only.version >= 0 and t.token_ids.ndim == 1:
            return
    try:
        t.check()
    except ValueError as error:
        raise WireError(f"trajectories[{i}]", str(error)) from error


def read_header(data: Buffer) -> GroupHeader:
    """Check a group's header against itself. The arrays are not needed for it."""
    f = Fields(unpack(data, "group"), "group")
    f.schema(SCHEMA)
    lengths = f.ints("lengths", 0, 1 << 31, most=MAX_TRAJECTORIES)
    n, n_tokens = len(lengths), sum(lengths)
    if n == 0:
        raise WireError("group.lengths", "a group has at least one trajectory")
    statuses = f.ints("statuses", 0, len(STATUSES) - 1, exactly=n)
    for i, (length, status) in enumerate(zip(lengths, statuses, strict=True)):
        if length == 0 and STATUSES[status] is not Status.FAILED:
            raise WireError(f"group.lengths[{i}]", f"an empty trajectory, but its status is {STATUSES[status]}")
    extras = tuple(_extra(f"group.extras[{i}]", row, n) for i, row in enumerate(f.list("extras", most=64 * n)))
    header = GroupHeader(
        ordinal=f.int("ordinal", 0, 1 << 62),
        attempt=f.int("attempt", 0, 1 << 31),
        prompt=f.int("prompt", 0, 1 << 31),
        lengths=lengths,
        statuses=statuses,
        versions=f.get("versions"),
        extras=extras,
        notes=f.map("notes"),
        verdicts=verdicts_or_none(f, n),
        body=f.int("body", 0, MAX_BODY),
        n_tokens=n_tokens,
        oldest_version=_oldest(f, lengths),
    )
    expected = header.tokens_end + 5 * n_tokens
    expected += sum(lengths[i] * math.prod(shape) * dtype.itemsize for i, _, dtype, shape in extras)
    if header.body != expected:
        raise WireError("group.body", f"{header.body} bytes, but the lengths and dtypes make {expected}")
    return header


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


def decode_group(data: Buffer, frames: Sequence[Buffer], verdicts: Sequence[Verdict] | None = None) -> Group:
    """The group, with `verdicts` if they are given; its arrays are read-only views wherever alignment allows.

    Frames that hold only the token ids (what a scorer gets) make a group with zero log-probs and an all-true mask.
    """
    header = read_header(data)
    body = Body(frames)
    whole, lengths = body.nbytes == header.body, header.lengths
    if not whole and body.nbytes != header.tokens_end:
        raise WireError("group.frames", f"{body.nbytes} bytes, the header says {header.body}")
    prompt = body.take("<i4", header.prompt)
    tokens = body.column("<i4", lengths)
    if whole:
        logprobs, masks = body.column("<f4", lengths, _finite_array), body.column("|b1", lengths, _boolean_array)
    else:
        nothing, everything = np.zeros(max(lengths), np.float32), np.ones(max(lengths), np.bool_)
        logprobs, masks = [nothing[:n] for n in lengths], [everything[:n] for n in lengths]
    spans = _spans(header)
    extras: list[dict[str, np.ndarray]] = [{} for _ in lengths]
    for i, name, dtype, shape in header.extras if whole else ():
        extras[i][name] = body.take(dtype.str, lengths[i] * math.prod(shape)).reshape(lengths[i], *shape)
    judged = header.verdicts if verdicts is None else verdicts
    if len(judged) != len(lengths):
        raise WireError("group.verdicts", f"{len(judged)} verdicts for {len(lengths)} trajectories")
    trajectories = [
        Trajectory(
            tokens[i],
            masks[i],
            logprobs[i],
            spans[i],
            STATUSES[header.statuses[i]],
            judged[i],
            extras[i],
            header.notes.get(str(i), {}),
        )
        for i in range(len(lengths))
    ]
    return Group(header.ordinal, prompt, tuple(trajectories), header.attempt)


def _spans(header: GroupHeader) -> list[tuple[VersionSpan, ...]]:
    """[4, 7, 5, 12] is version 4 for tokens [0, 7) and version 5 for [7, 12)."""
    versions = header.versions
    if isinstance(versions, int):
        by_length = {n: (VersionSpan(versions, 0, n),) if n else () for n in set(header.lengths)}
        return [by_length[n] for n in header.lengths]
    spans = []
    for runs in versions:
        starts = (0, *runs[1:-2:2])
        spans.append(tuple(map(VersionSpan, runs[::2], starts, runs[1::2])))
    return spans


def _finite_array(values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise WireError("group.behaviour_logprobs", "holds a value that is not finite")


def _boolean_array(values: np.ndarray) -> None:
    if values.size and values.view(np.uint8).max() > 1:
        raise WireError("group.loss_mask", "holds a byte that is neither 0 nor 1")
