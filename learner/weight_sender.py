"""The sending end on the learner's rank 0: announces a version, streams it in two buckets, seals it with digests.

    announce(version)  -> manifest without digests (names, types, shapes: known without the bytes)
    send(manifest)     -> manifest with digests; every tensor of the source is seen exactly once

The source is a callable that yields `(name, tensor)`; a tensor has to live only until the next one is asked for: by
then its bytes were sent, or copied into one of our two buffers. So under ZeRO-3 one gathered tensor is alive at a
time. Ranks other than 0 call `gather_along` so that the collective gathers match.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import xxhash

from rollout.engine import Rendezvous
from rollout.errors import WeightError
from rollout.meeting import MeetingPoint
from rollout.versions import WeightManifest
from rollout.weight_group import GlooGroup
from rollout.weight_stream import (
    NamedTensor,
    as_bytes,
    buckets,
    given_up,
    prologue,
    root_digest,
    sealed,
    spec_of,
    trailer,
)

Source = Callable[[], Iterable[NamedTensor]]


@dataclass(frozen=True, slots=True)
class Sent:
    """What one sending was: `Sent(manifest, root="9f2c...", nbytes=269060352, seconds=0.21)`."""

    manifest: WeightManifest
    root: str
    nbytes: int
    seconds: float


class _Pipe:
    """Follows the plan of buckets: large pieces go from where they lie, small ones are gathered in one of two buffers.

    `push` returns when the tensor may die: its large pieces were sent, its small ones copied. A buffer is filled again
    only after it was sent.
    """

    def __init__(self, group: GlooGroup, manifest: WeightManifest, bucket_bytes: int) -> None:
        self._group = group
        self._plan = buckets([t.nbytes for t in manifest.tensors], bucket_bytes)
        self._buffers = [torch.empty(bucket_bytes, dtype=torch.uint8) for _ in range(2)]
        self._tickets: list[int | None] = [None, None]
        self._turn = self._next = 0
        self._at = 0  # bytes pushed

    def push(self, data: torch.Tensor) -> str:
        """Send or copy one tensor's bytes; returns its digest. Each piece is digested just before it goes, while it
        is in the processor's cache anyway."""
        start, end = self._at, self._at + data.numel()
        direct: list[int] = []
        proof = xxhash.xxh3_128()
        while self._next < len(self._plan) and self._at < end:
            bucket = self._plan[self._next]
            upto = min(bucket.end, end)
            piece = data[self._at - start : upto - start]
            proof.update(piece.numpy().data)
            if bucket.start >= start and bucket.end <= end:
                direct.append(self._group.broadcast(piece))
            else:
                self._gather(piece, self._at - bucket.start)
                if upto == bucket.end:
                    self._send_gathered(bucket.end - bucket.start)
            self._at = upto
            self._next += upto == bucket.end
            while len(direct) > 1:  # one on its way while the next is handed over
                self._group.wait(direct.pop(0))
        for ticket in direct:
            self._group.wait(ticket)
        return proof.hexdigest()

    def pad(self) -> None:
        """Send zeros for what is missing (the source failed; receivers still expect that many bytes)."""
        left = (self._plan[-1].end if self._plan else 0) - self._at
        while left > 0:
            piece = torch.zeros(min(left, self._buffers[0].numel()), dtype=torch.uint8)
            self.push(piece)
            left -= piece.numel()

    def finish(self, tail: torch.Tensor) -> None:
        """Both buffers are sent; the trailer ends the stream."""
        self._await(0)
        self._await(1)
        self._group.wait(self._group.broadcast(tail))

    def _gather(self, piece: torch.Tensor, at: int) -> None:
        self._await(self._turn)
        self._buffers[self._turn][at : at + piece.numel()].copy_(piece)

    def _send_gathered(self, n: int) -> None:
        self._tickets[self._turn] = self._group.broadcast(self._buffers[self._turn][:n])
        self._turn = 1 - self._turn

    def _await(self, which: int) -> None:
        ticket, self._tickets[which] = self._tickets[which], None
        if ticket is not None:
            self._group.wait(ticket)


class WeightSender:
    """Hosts the meeting point, forms epochs, sends versions. Blocking calls, one at a time, from any thread."""

    def __init__(
        self, source: Source, *, bucket_bytes: int = 8 << 20, timeout_s: float = 60.0, host: str = "127.0.0.1"
    ) -> None:
        self._source = source
        self.bucket_bytes, self.timeout_s = bucket_bytes, timeout_s
        self._meeting = MeetingPoint(host, timeout_s)
        self._group: GlooGroup | None = None
        self._members: tuple[str, ...] = ()
        self._layout: WeightManifest | None = None
        self.epoch = 0

    def invite(self, members: Sequence[str]) -> dict[str, Rendezvous]:
        """Begin a new epoch with these engines (the one before is torn down); hand each its rendezvous."""
        if not members:
            raise WeightError("no engine is left to send weights to; start one, it joins by itself")
        self.close_group()
        self.epoch += 1
        self._members = tuple(members)
        return self._meeting.invite(self.epoch, members)

    def enter(self) -> None:
        """Wait for every invited engine; DeadlineError names those that did not come."""
        rdv = self._meeting.own(self.epoch, len(self._members))
        names = dict(enumerate(self._members, start=1))
        self._group = GlooGroup.enter(rdv, names)

    def announce(self, version: int) -> WeightManifest:
        """What `version` will consist of. The layout is read from the source once and then held against it."""
        if self._layout is None:
            self._layout = WeightManifest(version, tuple(spec_of(name, t) for name, t in self._source()))
        return WeightManifest(version, self._layout.tensors)

    def send(self, manifest: WeightManifest) -> Sent:
        """Stream one announced version to the group.

        Raises WeightError, DeadlineError when the group broke (the epoch is over), and whatever the source raises
        (the stream is finished with a trailer that no receiver accepts; the group stays of use).
        """
        group = self._group
        if group is None:
            raise WeightError(f"no weight group to send version {manifest.version} to; invite engines first")
        started = time.monotonic()
        group.start_clock()
        pipe = _Pipe(group, manifest, self.bucket_bytes)
        try:
            group.wait(group.broadcast(prologue(group.rendezvous.epoch, manifest, self.bucket_bytes)))
            digests = self._stream(pipe, manifest)
            pipe.finish(trailer(digests))
        except BaseException:
            if not group.broken:
                pipe.pad()
                pipe.finish(given_up(len(manifest.tensors)))
            raise
        finally:
            if group.broken:
                self.close_group()
        proven = sealed(manifest, digests)
        return Sent(proven, root_digest(proven), manifest.nbytes, time.monotonic() - started)

    def _stream(self, pipe: _Pipe, manifest: WeightManifest) -> list[str]:
        digests: list[str] = []
        for i, (name, tensor) in enumerate(self._source()):
            self._check(manifest, i, name, tensor)
            digests.append(pipe.push(as_bytes(tensor)))
        if len(digests) != len(manifest.tensors):
            missing = manifest.tensors[len(digests)].name
            raise WeightError(f"the learner yielded {len(digests)} tensors; {missing} was announced and is missing")
        return digests

    @staticmethod
    def _check(manifest: WeightManifest, i: int, name: str, tensor: torch.Tensor) -> None:
        if i >= len(manifest.tensors):
            raise WeightError(f"the learner yielded {name}, which was not announced; announce again")
        spec, got = manifest.tensors[i], spec_of(name, tensor)
        if (got.name, got.dtype, got.shape) != (spec.name, spec.dtype, spec.shape):
            raise WeightError(
                f"the learner yielded {got.name} {got.dtype}{list(got.shape)} where "
                f"{spec.name} {spec.dtype}{list(spec.shape)} was announced; announce again"
            )

    def forget_layout(self) -> None:
        """Names or types of the source changed on purpose; read them again at the next announce."""
        self._layout = None

    def close_group(self) -> None:
        """End the epoch; engines that wait for us, or for each other, see it at once. Idempotent."""
        self._meeting.call_off(self.epoch)
        group, self._group = self._group, None
        if group is not None:
            group.close()

    @property
    def in_group(self) -> bool:
        return self._group is not None

    @property
    def members(self) -> tuple[str, ...]:
        return self._members if self._group is not None else ()

    def close(self) -> None:
        self.close_group()
        self._meeting.close()


def gather_along(source: Source) -> None:
    """What ranks other than 0 do while rank 0 sends: walk the source so that collective gathers match."""
    for _ in source():
        pass
