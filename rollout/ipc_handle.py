"""A piece of GPU memory as another process may open it: numbers and hex digits, nothing that has to be unpickled.

torch hands out      (Tensor, size, stride, 0, TypedStorage, uint8, device, handle, ..., event, False): classes and
                     bytes, which others pickle
IpcHandle.of(...)    keeps what differs from one bucket to the next
handle.arguments()   puts the rest back: what `torch.multiprocessing.reductions.rebuild_cuda_tensor` takes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rollout.errors import WeightError

# What rebuild_cuda_tensor takes, in its order (torch 2.13); a test holds it against the installed torch.
ARGUMENTS = (
    "tensor_cls",
    "tensor_size",
    "tensor_stride",
    "tensor_offset",
    "storage_cls",
    "dtype",
    "storage_device",
    "storage_handle",
    "storage_size_bytes",
    "storage_offset_bytes",
    "requires_grad",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)


@dataclass(frozen=True, slots=True)
class IpcHandle:
    """A bucket, uint8[nbytes]: `IpcHandle("GPU-5c1f...", 8388608, "0a1b...", 2097152, "2f74...", 3, "00...", True)`.

    `memory` names the allocation, `offset` is where in it the bucket begins (bytes); `counter` and `counter_at` are
    where the reader says that it let go (torch frees the memory only then), `event` what it has to wait for.
    """

    gpu: str
    nbytes: int
    memory: str
    offset: int
    counter: str
    counter_at: int
    event: str
    waits: bool

    @classmethod
    def of(cls, gpu: str, arguments: tuple[Any, ...]) -> IpcHandle:
        """From what `torch.multiprocessing.reductions.reduce_tensor` says of a bucket on `gpu` (its UUID)."""
        a = dict(zip(ARGUMENTS, arguments, strict=True))
        if a["dtype"] is not torch.uint8 or a["tensor_offset"] or tuple(a["tensor_stride"]) != (1,):
            raise WeightError(f"a bucket is uint8[n] from the start of its storage, this is {a['dtype']}; not shared")
        return cls(
            gpu,
            int(a["tensor_size"][0]),
            bytes(a["storage_handle"]).hex(),
            int(a["storage_offset_bytes"]),
            bytes(a["ref_counter_handle"]).hex(),
            int(a["ref_counter_offset"]),
            bytes(a["event_handle"]).hex(),
            bool(a["event_sync_required"]),
        )

    def arguments(self) -> tuple[Any, ...]:
        """For `rebuild_cuda_tensor`; the device is the reader's to fill in."""
        return (
            torch.Tensor,
            torch.Size((self.nbytes,)),
            (1,),
            0,
            torch.storage.TypedStorage,
            torch.uint8,
            None,
            bytes.fromhex(self.memory),
            self.nbytes,
            self.offset,
            False,
            bytes.fromhex(self.counter),
            self.counter_at,
            bytes.fromhex(self.event),
            self.waits,
        )
