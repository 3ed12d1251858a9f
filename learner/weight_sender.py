"""The sending end on the learner's rank 0: announces a version, streams it in two buckets, seals it with digests.

    announce(version)  -> manifest without digests (names, types, shapes: known without the bytes)
    send(manifest)     -> manifest with digests; every tensor of the source is seen exactly once

The source is a callable that yields `(name, tensor)`; a tensor has to live only until the next one is asked for, so
under ZeRO-3 the gather of one tensor is alive while its bytes are copied, and at most two buckets are ours. Ranks
other than 0 call `gather_along` so that the collective gathers match.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from rollout.engine import Rendezvous
from rollout.errors import WeightError
from rollout.meeting import MeetingPoint
from rollout.versions import WeightManifest
from rollout.weight_group import GlooGroup
from rollout.weight_stream import (
    NamedTensor,
    as_bytes,
    digest,
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
    """What one sending was: `Sent(manifest, root="9f2c...", nbytes=269060352, seconds=0.21, digest_s=0.017)`."""

    manifest: WeightManifest
    root: str
    nbytes: int
    seconds: float
    digest_s: float


class _Pipe:
    """Two buckets: one is filled while the other is on its way. A bucket is refilled only after it was sent."""

    def __init__(self, group: GlooGroup, bucket_bytes: int) -> None:
        self._group = group
        self._buffers = [torch.empty(bucket_bytes, dtype=torch.uint8) for _ in range(2)]
        self._tickets: list[int | None] = [None, None]
        self._turn = self._filled = 0
        self.pushed = 0

    def push(self, data: torch.Tensor) -> None:
        at, n = 0, data.numel()
        size = self._buffers[0].numel()
        while at < n:
            take = min(size - self._filled, n - at)
            self._await(self._turn)
            self._buffers[self._turn][self._filled : self._filled + take].copy_(data[at : at + take])
            self._filled += take
            at += take
            self.pushed += take
            if self._filled == size:
                self.flush()

    def pad(self, nbytes: int) -> None:
        """Fill up to `nbytes` with zeros (the source failed; receivers still expect that many)."""
        self.push(torch.zeros(1, dtype=torch.uint8).expand(max(nbytes - self.pushed, 0)))

    def flush(self) -> None:
        if self._filled:
            self._tickets[self._turn] = self._group.broadcast(self._buffers[self._turn][: self._filled])
            self._turn, self._filled = 1 - self._turn, 0

    def finish(self, tail: torch.Tensor) -> None:
        """Send what is left, then the trailer; both buckets are ours again."""
        self.flush()
        self._await(0)
        self._await(1)
        self._group.wait(self._group.broadcast(tail))

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
        pipe = _Pipe(group, self.bucket_bytes)
        try:
            group.wait(group.broadcast(prologue(group.rendezvous.epoch, manifest, self.bucket_bytes)))
            digests, digest_s = self._stream(pipe, manifest)
            pipe.finish(trailer(digests))
        except BaseException:
            if not group.broken:
                pipe.pad(manifest.nbytes)
                pipe.finish(given_up(len(manifest.tensors)))
            raise
        finally:
            if group.broken:
                self.close_group()
        proven = sealed(manifest, digests)
        return Sent(proven, root_digest(proven), manifest.nbytes, time.monotonic() - started, digest_s)

    def _stream(self, pipe: _Pipe, manifest: WeightManifest) -> tuple[list[str], float]:
        digests: list[str] = []
        digest_s = 0.0
        for i, (name, tensor) in enumerate(self._source()):
            self._check(manifest, i, name, tensor)
            data = as_bytes(tensor)
            at = time.perf_counter()
            digests.append(digest(data).hex())
            digest_s += time.perf_counter() - at
            pipe.push(data)
        if len(digests) != len(manifest.tensors):
            missing = manifest.tensors[len(digests)].name
            raise WeightError(f"the learner yielded {len(digests)} tensors; {missing} was announced and is missing")
        return digests, digest_s

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
