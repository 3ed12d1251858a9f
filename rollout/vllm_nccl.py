"""The NCCL plane: vLLM's own packed, double-buffered broadcast, wrapped in our life cycle and attested on the device.

NOT RUN on a GPU yet; the order of calls and the refusals are tested with fakes.

    our step        what it does here                                                          generation
    join            vLLM's init_weight_transfer_engine: the workers enter NCCL's group         waits for the group
    stage_weights   pause, start_weight_update, update_weights: bytes go straight into layers  stands still
    commit_weights  compare checksums with the learner's; finish, stamp the version, resume    goes on afterwards
    discard         a reload begun cannot be undone: the engine serves nothing until a commit  aborted

NCCL has no place to stage a version, so the stall is the transfer and the load. What is received is summed while it is
loaded, on the device; a version whose sums are not the learner's is never resumed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from rollout.engine import CommitReport, Rendezvous
from rollout.errors import EngineError, WeightError
from rollout.versions import WeightManifest
from rollout.vllm_engine import VllmEngine
from rollout.weight_checksum import summed
from rollout.weight_inbox import Receipt
from rollout.weight_stream import NamedTensor, root_digest, sealed


def transfer_class() -> type:
    """vLLM's NCCL engine, summing what it hands to the model. Imported only where NCCL is."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    class SummedNccl(NCCLWeightTransferEngine):
        """Its `load_weights` is watched; `sums` are those of the update under way."""

        sums: dict[str, str]

        def start_weight_update(self) -> None:
            self.sums = {}
            super().start_weight_update()

        def receive_weights(self, update_info: Any) -> None:
            load = self.model.load_weights
            self.model.load_weights = lambda tensors: load(summed(tensors, self.sums))
            try:
                super().receive_weights(update_info)
            finally:
                self.model.load_weights = load

        def call(self, what: str, args: dict[str, Any]) -> dict[str, Any]:
            if what != "sums":
                raise WeightError(f"the NCCL plane knows no weight call {what!r}, only sums")
            return self.sums

    return SummedNccl


def __getattr__(name: str) -> type:
    """vLLM's factory asks this module for "SummedNccl"; only then is its NCCL engine imported."""
    if name == "SummedNccl":
        return transfer_class()
    raise AttributeError(name)


class NcclEngine(VllmEngine):
    """`VllmEngine` whose weights come by NCCL. Same protocol."""

    _staged: WeightManifest | None = None
    _pause_token: int | None = None

    async def join(self, rendezvous: Rendezvous) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        info = {
            "master_address": rendezvous.host,
            "master_port": rendezvous.port,
            "rank_offset": rendezvous.rank,
            "world_size": rendezvous.world_size,
            "packed": True,
            "packed_buffer_size_bytes": self.settings.bucket_bytes,
        }
        await self._running().init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def stage(self, manifest: WeightManifest) -> Receipt:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        started = time.monotonic()
        self._pause_token = await self._pauses.hold(f"update to version {manifest.version}", self.settings.timeout_s)
        update = {
            "names": [t.name for t in manifest.tensors],
            "dtype_names": [t.dtype for t in manifest.tensors],
            "shapes": [list(t.shape) for t in manifest.tensors],
        }
        self._broken = f"version {manifest.version} is half loaded"  # true until a commit says otherwise
        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=update))
        answers: list[dict[str, str]] = await self._llm.collective_rpc("headrace_weights", args=("sums", {}))
        if any(a != answers[0] for a in answers) or set(answers[0]) != {t.name for t in manifest.tensors}:
            raise WeightError(f"version {manifest.version}: the workers did not receive the same tensors")
        self._staged = sealed(manifest, [answers[0][t.name] for t in manifest.tensors])
        seconds = time.monotonic() - started
        return Receipt("staged", -1, manifest.version, root_digest(self._staged), seconds)

    async def commit_weights(self, version: int, digest: str = "") -> CommitReport:
        staged, token = self._staged, self._pause_token
        if staged is None or token is None or staged.version != version:
            raise WeightError(f"cannot commit version {version}: it is not what was received last")
        root = root_digest(staged)
        if digest and root != digest:
            await self.discard_weights()
            raise WeightError(f"version {version} was received as {root}, the learner sent {digest}; refused")
        started = time.monotonic()
        await self._llm.finish_weight_update(str(version))
        self._version, self._broken, self._staged, self._pause_token = version, "", None, None
        if not await self._pauses.release(token):
            raise EngineError(f"version {version} came so late that the pause had ended; replace the engine")
        self._counts["commits"] += 1
        seconds = time.monotonic() - started
        self._last_commit = CommitReport(version, seconds, seconds)
        return self._last_commit

    async def discard_weights(self) -> None:
        """The old weights are gone already: abort what is in flight, serve nothing, but do not stay paused."""
        self._staged, token, self._pause_token = None, self._pause_token, None
        if token is not None:
            await self._llm.abort(list(self._llm.output_processor.request_states), internal=True)
            await self._pauses.release(token)


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
