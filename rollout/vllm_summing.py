"""vLLM's own NCCL and IPC engines in its worker process, with what they load summed on the device.

`vllm_weights.register` names them to vLLM's factory as headrace_nccl and headrace_ipc; each is made, and its vLLM
module imported, only in a worker that was told to use it.
"""

from __future__ import annotations

from typing import Any

import torch

from rollout.errors import WeightError
from rollout.ipc_handle import IpcHandle
from rollout.weight_checksum import summed


def summing(base: Any) -> Any:
    """`base`, a WeightTransferEngine of vLLM, whose `load_weights` is watched."""

    class Summing(base):  # type: ignore[misc]
        """`sums` are the checksums of what the update under way has handed to the model."""

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
            if what == "sums":
                return self.sums
            if what == "gpu":
                return {"gpu": gpu_of(self.device.index)}
            raise WeightError(f"unknown weight call {what!r}; on this plane sums and gpu are known")

    return Summing


def gpu_of(index: int | None) -> str:
    """The UUID of a GPU of this process: the same in every process that may use it."""
    return str(torch.cuda.get_device_properties(index).uuid)


def _nccl() -> Any:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    return summing(NCCLWeightTransferEngine)


def _ipc() -> Any:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    class SummingIpc(summing(IPCWeightTransferEngine)):  # type: ignore[misc]
        """Takes the bucket as plain data, where vLLM's HTTP route would have it unpickled."""

        def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
            plain = dict(update_dict)
            bucket = IpcHandle(**plain.pop("bucket"))
            return super().parse_update_info(plain | {"ipc_handles": {bucket.gpu: bucket.arguments()}})

    return SummingIpc


def __getattr__(name: str) -> Any:
    """vLLM's factory asks this module for its engine."""
    makers = {"SummingNccl": _nccl, "SummingIpc": _ipc}
    if name not in makers:
        raise AttributeError(name)
    return makers[name]()
