"""The sending end of the gloo plane on the learner's rank 0: streams a version in two buckets, seals it with digests.

    announce(version)  -> manifest without digests (names, types, shapes: known without the bytes)
    send(manifest)     -> manifest with digests; every tensor of the source is seen exactly once

The source is a callable that yields `(name, tensor)`; a tensor has to live only until the next one is asked for: by
then its bytes were copied into one of our two buckets (`weight_pipe`). So under ZeRO-3 one gathered tensor is alive at
a time. Ranks other than 0 call `gather_along` so that the collective gathers match.
"""

from __future__ import annotations

import time

from learner.weight_epochs import EpochSender, Sent, Source
from learner.weight_pipe import WeightPipe
from rollout.engine import Rendezvous
from rollout.meeting import MeetingPoint
from rollout.versions import AdapterSpec, WeightManifest
from rollout.weight_group import GlooGroup
from rollout.weight_stream import as_bytes, given_up, prologue, trailer


class WeightSender(EpochSender[GlooGroup]):
    """Hosts the meeting point, forms epochs, sends versions."""

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
        super().__init__(source, adapter, bucket_bytes, timeout_s)
        self._meeting = MeetingPoint(host, timeout_s)

    def _meet(self) -> dict[str, Rendezvous]:
        return self._meeting.invite(self.epoch, self._members)

    def enter(self) -> None:
        rdv = self._meeting.own(self.epoch, len(self._members))
        self._group = GlooGroup.enter(rdv, dict(enumerate(self._members, start=1)))

    def send(self, manifest: WeightManifest) -> Sent:
        """As the base says. When the group broke, the epoch is over; when the source did, the stream is finished with a
        trailer that no receiver accepts, and the group stays of use."""
        group = self._entered(manifest)
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
        return Sent.proven(manifest, digests, time.monotonic() - started)

    def close_group(self) -> None:
        self._meeting.call_off(self.epoch)
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def close(self) -> None:
        super().close()
        self._meeting.close()


def gather_along(source: Source) -> None:
    """What ranks other than 0 do while rank 0 sends: walk the source so that collective gathers match."""
    for _ in source():
        pass
