"""A stand-in for CUDA IPC where there is no GPU: a bucket is a file that both processes map, its handle the path.

`install()` changes what vLLM and torch would ask the GPU for, and nothing else: the packing, the handles' way, the
opening once per version, the unpacking, the cloning and the loading are the real ones. A worker of the real vLLM
installs it by having `CpuCalls` for its `worker_extension_cls`.
"""

from __future__ import annotations

import mmap
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions
from vllm.distributed.weight_transfer import packed_tensor

from rollout.ipc_handle import ARGUMENTS
from rollout.vllm_weights import WeightCalls

GPU = "GPU-stand-in"
opened: list[str] = []  # the buckets that this process has opened, in order


def _mapped(path: str, nbytes: int) -> torch.Tensor:
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), nbytes)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _bucket(nbytes: int, dtype: torch.dtype, device: str) -> Any:
    assert (dtype, device) == (torch.uint8, "cuda")
    file = tempfile.NamedTemporaryFile(prefix="bucket-", dir="/dev/shm")  # noqa: SIM115 - gone with the bucket
    file.truncate(nbytes)
    bucket: Any = _mapped(file.name, nbytes)
    bucket.file = file
    return bucket


def _reduce(bucket: Any) -> tuple[None, tuple[Any, ...]]:
    n, path = bucket.numel(), bucket.file.name.encode()
    storage = torch.storage.TypedStorage
    return None, (torch.Tensor, bucket.size(), (1,), 0, storage, torch.uint8, 0, path, n, 0, False, b"c", 1, b"e", True)


def _rebuild(*arguments: Any) -> torch.Tensor:
    a = dict(zip(ARGUMENTS, arguments, strict=True))
    assert (a["ref_counter_handle"], a["ref_counter_offset"], a["event_handle"]) == (b"c", 1, b"e")
    opened.append(a["storage_handle"].decode())
    return _mapped(opened[-1], a["storage_size_bytes"])


class _Torch(SimpleNamespace):
    """torch, as `packed_tensor` sees it: with memory of the device, and nothing to wait for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def install(put: Any = setattr) -> None:
    """`put`: pytest's `monkeypatch.setattr`, or for good."""
    gpus = SimpleNamespace(
        get_device_properties=lambda index: SimpleNamespace(uuid=GPU),
        current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
    )
    put(packed_tensor, "torch", _Torch(empty=_bucket, cuda=gpus))
    put(packed_tensor, "reduce_tensor", _reduce)
    put(reductions, "rebuild_cuda_tensor", _rebuild)
    put(torch.cuda, "get_device_properties", gpus.get_device_properties)
    put(torch.cuda, "current_device", lambda: 0)
    put(torch.cuda, "ipc_collect", lambda: None)
    put(torch.accelerator, "synchronize", lambda *args: None)


class CpuCalls(WeightCalls):
    """Our RPCs, in a worker whose GPU is the stand-in from the first of them on."""

    def headrace_weights(self, what: str, args: dict[str, Any]) -> dict[str, Any]:
        install()
        return super().headrace_weights(what, args)
