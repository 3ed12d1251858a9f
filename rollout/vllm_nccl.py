"""The NCCL plane: vLLM's own packed, double-buffered broadcast, in our life cycle (`vllm_in_place`).

NOT RUN on a GPU yet; the order of calls and the refusals are tested with fakes.

    join      vLLM's init_weight_transfer_engine: the workers enter NCCL's group
    receive   one update_weights: the workers receive every bucket, and load it

`settings.bucket_bytes` is by what both sides cut the stream: it must be the sender's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rollout.engine import Rendezvous
from rollout.versions import WeightManifest
from rollout.vllm_in_place import InPlaceEngine
from rollout.weight_stream import NamedTensor


class NcclEngine(InPlaceEngine):
    """`VllmEngine` whose weights come by NCCL. Same protocol."""

    async def _enter(self, rendezvous: Rendezvous) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        info = {
            "master_address": rendezvous.host,
            "master_port": rendezvous.port,
            "rank_offset": rendezvous.rank,
            "world_size": rendezvous.world_size,
            "packed": True,
            "packed_buffer_size_bytes": self.settings.bucket_bytes,
        }
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def _receive(self, manifest: WeightManifest) -> None:
        await self._ask(f"the loading of version {manifest.version}", self._llm.update_weights(self._update(manifest)))


class NcclTrainer:
    """The learner's end: what `learner.nccl_sender` needs of vLLM. Only on a machine with GPUs."""

    def __init__(self, host: str, port: int, world_size: int, bucket_bytes: int) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self._bucket_bytes = bucket_bytes
        self._group = trainer_init({"master_address": host, "master_port": port, "world_size": world_size})

    def send(self, tensors: Iterator[NamedTensor]) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iterator=tensors,
            group=self._group,
            src=0,
            post_iter_func=lambda item: item[1],
            buffer_size_bytes=self._bucket_bytes,
        )
        torch.cuda.synchronize()

    def close(self) -> None:
        self._group.destroy()
