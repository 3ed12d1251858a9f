"""The learner's end of the NCCL plane: the same steps as `weight_sender`. NOT RUN on a GPU yet.

NCCL brings no deadlines of its own: what hangs in `enter` or `send` is ended by the choreography, which names the
engine, and by restarting the learner's process, which the supervisor does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from learner.weight_epochs import EpochSender, Sent, Source
from rollout.engine import Rendezvous
from rollout.errors import WeightError
from rollout.meeting import free_port
from rollout.versions import WeightManifest
from rollout.weight_checksum import summed

if TYPE_CHECKING:
    from rollout.vllm_nccl import NcclTrainer


def open_trainer(host: str, port: int, world_size: int, bucket_bytes: int) -> NcclTrainer:
    """vLLM's NCCL group; imported only where there are GPUs."""
    from rollout.vllm_nccl import NcclTrainer

    return NcclTrainer(host, port, world_size, bucket_bytes)


class NcclSender(EpochSender["NcclTrainer"]):
    """Stands where a `WeightSender` stands. `workers` is the number of vLLM workers (GPUs) of one engine.

    `bucket_bytes` must be that of the engines (`VllmSettings.bucket_bytes`): vLLM cuts its stream by it on each side.
    """

    def __init__(
        self,
        source: Source,
        *,
        workers: int = 1,
        bucket_bytes: int = 8 << 20,
        timeout_s: float = 60.0,
        host: str = "127.0.0.1",
        trainer: Callable[[str, int, int, int], NcclTrainer] = open_trainer,
    ) -> None:
        super().__init__(source, None, bucket_bytes, timeout_s)
        self._workers, self._host, self._trainer = workers, host, trainer
        self._own: Rendezvous | None = None

    def _meet(self) -> dict[str, Rendezvous]:
        world, port = 1 + self._workers * len(self._members), free_port(self._host)
        self._own, *others = (
            Rendezvous(self.epoch, self._host, port, rank, world, self.timeout_s)
            for rank in (0, *range(1, world, self._workers))
        )
        return dict(zip(self._members, others, strict=True))

    def enter(self) -> None:
        if self._own is None:
            raise WeightError("nobody was invited to the weight group; invite engines first")
        self._group = self._trainer(self._host, self._own.port, self._own.world_size, self.bucket_bytes)

    def send(self, manifest: WeightManifest) -> Sent:
        group = self._entered(manifest)
        started = time.monotonic()
        sums: dict[str, str] = {}
        group.send(summed(self._layout.tensors(manifest), sums))
        return Sent.proven(manifest, list(sums.values()), time.monotonic() - started)

    def close_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()
