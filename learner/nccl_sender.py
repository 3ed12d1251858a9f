"""The learner's end of the NCCL plane: the same steps as `weight_sender`. NOT RUN on a GPU yet.

NCCL brings no deadlines of its own: what hangs in `enter` or `send` is ended by the choreography, which names the
engine, and by restarting the learner's process, which the supervisor does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from learner.weight_sender import Layout, Sent, Source
from rollout.engine import Rendezvous
from rollout.errors import WeightError
from rollout.meeting import free_port
from rollout.versions import WeightManifest
from rollout.weight_checksum import summed
from rollout.weight_stream import root_digest, sealed


def open_trainer(host: str, port: int, world_size: int, bucket_bytes: int) -> Any:
    """vLLM's NCCL group; imported only where there are GPUs."""
    from rollout.vllm_nccl import NcclTrainer

    return NcclTrainer(host, port, world_size, bucket_bytes)


class NcclSender:
    """Stands where a `WeightSender` stands. `workers` is the number of vLLM workers (GPUs) of one engine."""

    def __init__(
        self,
        source: Source,
        *,
        workers: int = 1,
        bucket_bytes: int = 1 << 30,
        timeout_s: float = 60.0,
        host: str = "127.0.0.1",
        trainer: Callable[[str, int, int, int], Any] = open_trainer,
    ) -> None:
        self._source, self._workers, self._bucket_bytes = source, workers, bucket_bytes
        self._timeout_s, self._host, self._trainer = timeout_s, host, trainer
        self._group: Any = None
        self._layout = Layout(source)
        self._own: Rendezvous | None = None
        self.epoch = 0

    def invite(self, members: Sequence[str]) -> dict[str, Rendezvous]:
        if not members:
            raise WeightError("no engine is left to send weights to; start one, it joins by itself")
        self.close_group()
        self.epoch += 1
        world, port = 1 + self._workers * len(members), free_port(self._host)
        self._own = Rendezvous(self.epoch, self._host, port, 0, world, self._timeout_s)
        return {
            name: Rendezvous(self.epoch, self._host, port, 1 + i * self._workers, world, self._timeout_s)
            for i, name in enumerate(members)
        }

    def enter(self) -> None:
        if self._own is None:
            raise WeightError("nobody was invited to the weight group; invite engines first")
        self._group = self._trainer(self._host, self._own.port, self._own.world_size, self._bucket_bytes)

    def announce(self, version: int) -> WeightManifest:
        return self._layout.manifest(version)

    def send(self, manifest: WeightManifest) -> Sent:
        if self._group is None:
            raise WeightError(f"no weight group to send version {manifest.version} to; invite engines first")
        started = time.monotonic()
        sums: dict[str, str] = {}
        self._group.send(summed(self._source(), sums))
        if list(sums) != [t.name for t in manifest.tensors]:
            raise WeightError(
                f"the learner sent other tensors than version {manifest.version} announced; announce again"
            )
        proven = sealed(manifest, list(sums.values()))
        return Sent(proven, root_digest(proven), manifest.nbytes, time.monotonic() - started)

    def close_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def close(self) -> None:
        self.close_group()
