"""What clients and the queue server say to each other. No sockets here: frames in, frames out.

    request  [header, blobs...]   header {"schema": 1, "op": "take", "client": "9f2c", "seq": 7, "holder": "l", ...}
    reply    [header, blobs...]   header {"schema": 1, "seq": 7, "epoch": "a1b2", "ok": {...}}, or "error": [kind, args]

Groups are blobs: for each one its own header, then as many frames as `groups` says for it. Small blobs travel joined,
for a frame costs more than copying it: "cuts" says for each frame where to cut it, null if it is one blob.

Every request is answered exactly once per time it arrives, and every request may arrive twice: (client, seq) names it,
and doing it again has no further effect.

One request may ask for two things: "then": {"op": "lease", "n": 8, "wait": 30.0} is seen to once the request itself
is done, and the answer says both. If only the second fails, "end" holds its error.

    op             arguments                                 answer                     waits for
    lease          n, wait                                   leases                     slots
    submit         groups; or briefs, places, judged         outcomes, or busy          (then ask for `room`)
                                                             or unplaced                (then send what was placed)
    room           bytes, wait                               -                          payload bytes to be consumed
    give_back      leases, reason, failed                    -
    lease_scoring  n, wait, full, local                      groups, or their places    generated groups
    score          ordinals, verdicts                        outcomes
    take           step, rank, world, wait, local            groups or places, verdicts P groups with signal
    where          -                                         folder, placing            (to see if places can be read)
    trained        step, version, skipped, live              -                          (live: and release it)
    release, commit, restarted, drop, drain, stats           -
    beat           leases, scoring, outstanding              unknown: requests to send again
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

from rollout.errors import ConfigError, Drained, HeadraceError, LedgerError, QueueError, WireError
from rollout.wire import Buffer, pack, unpack
from rollout.wire_fields import Fields

SCHEMA = 1
MAX_FRAMES = 1 << 20
JOIN_BELOW = 64 << 10  # bytes of a blob
JOINED = 256  # blobs in one frame at most
FOLLOWS = ("lease", "lease_scoring", "take")
WAIT_SLICE = 30.0  # seconds a request is parked before the server says what it waits for

ERRORS: dict[str, type[HeadraceError]] = {
    e.__name__: e for e in (LedgerError, WireError, QueueError, Drained, ConfigError)
}


class Request(Fields):
    """A request as it arrived: checked field by field, where it is used."""

    def __init__(self, frames: Sequence[Buffer]) -> None:
        if not frames:
            raise WireError("request", "no frames")
        if len(frames) > MAX_FRAMES:
            raise WireError("request", f"{len(frames)} frames, over the limit of {MAX_FRAMES}")
        super().__init__(unpack(frames[0], "request"), "request")
        self.schema(SCHEMA)
        self.op = self.str("op", 32)
        self.client = self.str("client", 64)
        self.seq = self.int("seq", 0, 1 << 62)
        self.holder = self.str("holder", 256)
        self.blobs = cut_apart(self, frames[1:])

    def follow(self) -> Request | None:
        """What is asked for once this is done."""
        if "then" not in self.value:
            return None
        follow = copy(self)
        follow.value, follow.path, follow.blobs = self.map("then"), "request.then", ()
        follow.op = follow.str("op", 32)
        if follow.op not in FOLLOWS:
            raise WireError("request.then.op", f"{follow.op!r} does not follow; these do: {', '.join(FOLLOWS)}")
        follow.number("wait", 0.0, WAIT_SLICE)
        return follow

    @property
    def key(self) -> str:
        return f"{self.client}:{self.seq}"


def request_frames(
    op: str, client: str, seq: int, holder: str, args: dict[str, Any], blobs: Sequence[Buffer]
) -> list[Buffer]:
    header = {"schema": SCHEMA, "op": op, "client": client, "seq": seq, "holder": holder, **args}
    return _with_blobs(header, blobs)


def reply_frames(seq: int, epoch: str, ok: dict[str, Any], blobs: Sequence[Buffer] = ()) -> list[Buffer]:
    return _with_blobs({"schema": SCHEMA, "seq": seq, "epoch": epoch, "ok": ok}, blobs)


def error_frames(seq: int, epoch: str, error: HeadraceError) -> list[Buffer]:
    return [pack({"schema": SCHEMA, "seq": seq, "epoch": epoch, "error": error_row(error)})]


def error_row(error: HeadraceError) -> list[Any]:
    return [type(error).__name__, list(error.args)]


def read_error(row: Any, path: str) -> HeadraceError:
    f = Fields.of_row(row, path, ("kind", "args"))
    kind = ERRORS.get(f.str("kind", 32))
    if kind is None:
        raise WireError(f"{path}.kind", f"{f.value['kind']!r} is unknown")
    return kind(*f.list("args"))


def read_reply(frames: Sequence[Buffer]) -> tuple[int, str, dict[str, Any] | HeadraceError, Sequence[Buffer]]:
    """(seq, epoch, ok or the error, blobs)."""
    if not frames:
        raise WireError("reply", "no frames")
    f = Fields(unpack(frames[0], "reply"), "reply")
    f.schema(SCHEMA)
    seq, epoch = f.int("seq", 0, 1 << 62), f.str("epoch", 64)
    if "error" not in f.value:
        return seq, epoch, f.map("ok"), cut_apart(f, frames[1:])
    return seq, epoch, read_error(f.get("error"), "reply.error"), ()


def _with_blobs(header: dict[str, Any], blobs: Sequence[Buffer]) -> list[Buffer]:
    """The frames of a message, small blobs joined."""
    if len(blobs) < 2:
        return [pack(header), *blobs]
    frames: list[Buffer] = []
    cuts: list[list[int] | None] = []
    for large, neighbours in groupby(blobs, key=lambda blob: len(blob) >= JOIN_BELOW):
        run = list(neighbours)
        if large:
            frames += run
            cuts += [None] * len(run)
            continue
        for at in range(0, len(run), JOINED):
            frames.append(b"".join(run[at : at + JOINED]))
            cuts.append([len(blob) for blob in run[at : at + JOINED]])
    return [pack({**header, "cuts": cuts}), *frames]


def cut_apart(message: Fields, frames: Sequence[Buffer]) -> Sequence[Buffer]:
    """The blobs of a message. Small ones are copied out of the frame they came in, which then need not live on."""
    if "cuts" not in message.value:
        return frames
    blobs: list[Buffer] = []
    for i, (sizes, frame) in enumerate(zip(message.list("cuts", exactly=len(frames)), frames, strict=True)):
        if sizes is None:
            blobs.append(frame)
            continue
        path = f"{message.path}.cuts[{i}]"
        if type(sizes) is not list or not set(map(type, sizes)) <= {int} or min(sizes, default=0) < 0:
            raise WireError(path, "not a list of sizes")
        if len(sizes) > JOINED or sum(sizes) != len(frame):
            raise WireError(path, f"{len(sizes)} pieces of {sum(sizes)} bytes in a frame of {len(frame)}")
        view = memoryview(frame)
        blobs += [bytes(view[end - size : end]) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return blobs


def pack_blobs(groups: Sequence[tuple[Buffer, Sequence[Buffer]]]) -> tuple[list[int], list[Buffer]]:
    """Groups (header, frames) as blobs, and how many frames each has."""
    counts: list[int] = []
    blobs: list[Buffer] = []
    for header, frames in groups:
        counts.append(len(frames))
        blobs += (header, *frames)
    return counts, blobs


def split_blobs(counts: Sequence[int], blobs: Sequence[Buffer], path: str) -> list[tuple[Buffer, Sequence[Buffer]]]:
    """The groups again; raises WireError unless they use up all the blobs."""
    groups, at = [], 0
    for count in counts:
        groups.append((blobs[at] if at < len(blobs) else b"", blobs[at + 1 : at + 1 + count]))
        at += 1 + count
    if at != len(blobs):
        raise WireError(f"{path}.groups", f"announces {at} frames, {len(blobs)} came")
    return groups


# ---- what a client keeps


@dataclass(slots=True)
class Answer:
    """A reply that is not an error."""

    ok: dict[str, Any]
    blobs: Sequence[Buffer]
    epoch: str = ""  # which life of the server answered


@dataclass(slots=True)
class Pending:
    """A request that nobody has answered yet."""

    op: str
    frames: list[Buffer]
    future: Future[Answer]
    seq: int
    sent: float = 0.0
