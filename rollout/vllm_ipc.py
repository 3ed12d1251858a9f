"""The IPC plane: learner and engine on one GPU, weights through a bucket of its memory, in our life cycle
(`vllm_in_place`).

NOT RUN on a GPU yet. vLLM's packing, its worker's reading and loading, and the way of the handles are tested with the
real vLLM on CPU, where a file that both processes map stands for the bucket.

    learner   vLLM's packed_ipc_producer fills its one bucket; the handle goes over the meeting point (`weight_turns`)
    engine    hears the turn, hands it to vLLM's worker as plain data
    worker    opens the bucket once per version, clones and loads what lies in it, says that it is done

So two buckets of the GPU are taken: the learner's, and the clone in the worker. One bucket holds whole tensors: it has
`weights.bucket_mb`, or as much as the largest tensor needs. The learner's is free again when the worker has let go of
it, at the commit; torch keeps one for good for a worker that died while it had it open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict

import torch

from rollout.engine import Rendezvous
from rollout.errors import EngineError, WeightError
from rollout.ipc_handle import IpcHandle
from rollout.versions import WeightManifest
from rollout.vllm_in_place import InPlaceEngine
from rollout.vllm_summing import gpu_of
from rollout.weight_stream import NamedTensor
from rollout.weight_turns import Turn, TurnTaker


class IpcEngine(InPlaceEngine):
    """`VllmEngine` whose weights lie in a bucket on its own GPU. Same protocol."""

    _turns: TurnTaker | None = None
    _first: Turn

    async def _enter(self, rendezvous: Rendezvous) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        (worker,) = await self._workers("gpu")
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"packed": True}))
        self._leave()
        self._turns = await asyncio.to_thread(TurnTaker, rendezvous, worker["gpu"])

    async def _awaited(self, manifest: WeightManifest) -> None:
        self._first = await self._turn(manifest, 0)

    async def _receive(self, manifest: WeightManifest) -> None:
        turn = self._first
        while True:
            update = self._update(manifest, turn.start, turn.stop, **_bucket(manifest, turn))
            try:
                await self._ask(f"the loading of version {manifest.version}", self._llm.update_weights(update))
            except EngineError as error:
                await asyncio.to_thread(self._entered.refuse, str(error))
                raise
            await asyncio.to_thread(self._entered.done, turn)
            if turn.stop >= len(manifest.tensors):
                return
            turn = await self._turn(manifest, turn.stop)

    async def _turn(self, manifest: WeightManifest, start: int) -> Turn:
        deadline = time.monotonic() + self.settings.timeout_s
        return await asyncio.to_thread(self._entered.take, manifest.version, start, deadline)

    @property
    def _entered(self) -> TurnTaker:
        if self._turns is None:
            raise WeightError("no weight group to receive from; join one first")
        return self._turns

    def _leave(self) -> None:
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.close()

    async def close(self) -> None:
        self._leave()
        await super().close()


def _bucket(manifest: WeightManifest, turn: Turn) -> dict[str, object]:
    assert turn.bucket is not None  # `take` has seen to it
    sizes = [t.nbytes for t in manifest.tensors[turn.start : turn.stop]]
    return {"bucket": asdict(turn.bucket), "tensor_sizes": sizes}


class IpcTrainer:
    """The learner's end: what `learner.ipc_sender` needs of vLLM. Only on a machine with GPUs."""

    def __init__(self) -> None:
        self.gpu = gpu_of(torch.cuda.current_device())

    def fill(self, tensors: Iterator[NamedTensor], bucket_bytes: int) -> Generator[tuple[int, IpcHandle]]:
        """How many tensors lie in the bucket now, and where it is. Going on fills it again.

        The bucket has `bucket_bytes`; its memory is free again when this has ended and the reader has let go of it.
        """
        from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

        torch.cuda.ipc_collect()  # buckets of versions before
        for chunk in packed_ipc_producer(tensors, self.gpu, lambda item: item[1], bucket_bytes):
            yield len(chunk.names), IpcHandle.of(self.gpu, chunk.ipc_handle[self.gpu])
