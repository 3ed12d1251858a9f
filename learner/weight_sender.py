"""The sending end on the learner's rank 0: announces a version, streams it in two buckets, seals it with digests.

    announce(version)  -> manifest without digests (names, types, shapes: known without the bytes)
    send(manifest)     -> manifest with digests; every tensor of the source is seen exactly once

The source is a callable that yields `(name, tensor)`; a tensor has to live only until the next one is asked for: by
then its bytes were copied into one of our two buckets (`weight_pipe`). So under ZeRO-3 one gathered tensor is alive at
a time. Ranks other than 0 call `gather_along` so that the collective gathers match.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from learner.weight_pipe import WeightPipe
from rollout.engine import Rendezvous
from rollout.errors import WeightError
from rollout.meeting import MeetingPoint
from rollout.versions import AdapterSpec, WeightManifest
from rollout.weight_group import GlooGroup
from rollout.weight_stream import (
    NamedTensor,
    as_bytes,
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


class Layout:
    """Names, types and shapes of what a source yields: walked once, then known without the bytes."""

    def __init__(self, source: Source, adapter: AdapterSpec | None = None) -> None:
        self.source, self._adapter = source, adapter
        self._known: WeightManifest | None = None

    def manifest(self, version: int) -> WeightManifest:
        """What `version` will consist of, without digests."""
        if self._known is None:
            self._known = WeightManifest(version, tuple(spec_of(name, t) for name, t in self.source()), self._adapter)
        return replace(self._known, version=version)

    def tensors(self, manifest: WeightManifest) -> Iterator[NamedTensor]:
        """What the source yields now. Raises WeightError at the first tensor that is not what `manifest` announced."""
        announced = 0
        for name, tensor in self.source():
            if announced == len(manifest.tensors):
                raise WeightError(f"the learner yielded {name}, which was not announced; announce again")
            spec, got = manifest.tensors[announced], spec_of(name, tensor)
            if (got.name, got.dtype, got.shape) != (spec.name, spec.dtype, spec.shape):
                raise WeightError(
                    f"the learner yielded {got.name} {got.dtype}{list(got.shape)} where "
                    f"{spec.name} {spec.dtype}{list(spec.shape)} was announced; announce again"
                )
            announced += 1
            yield name, tensor
        if announced < len(manifest.tensors):
            missing = manifest.tensors[announced].name
            raise WeightError(f"the learner yielded {announced} tensors; {missing} was announced and is missing")


class WeightSender:
    """Hosts the meeting point, forms epochs, sends versions. Blocking calls, one at a time, from any thread."""

    def __init__(
        self,
        source: Source,
        *,
        adapter: AdapterSpec | None = None,
        bucket_bytes: int = 8 << 20,
        timeout_s: float = 60.0,
        host: str = "127.0.0.1",
    ) -> None:
        """With `adapter`, the source yields that adapter's tensors and nothing else."""
        self.bucket_bytes, self.timeout_s = bucket_bytes, timeout_s
        self._meeting = MeetingPoint(host, timeout_s)
        self._group: GlooGroup | None = None
        self._members: tuple[str, ...] = ()
        self._layout = Layout(source, adapter)
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
        return self._layout.manifest(version)

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
        pipe = WeightPipe(group, manifest, self.bucket_bytes)
        try:
            group.wait(group.broadcast(prologue(group.rendezvous.epoch, manifest, self.bucket_bytes)))
            digests = [pipe.push(as_bytes(tensor)) for _, tensor in self._layout.tensors(manifest)]
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
