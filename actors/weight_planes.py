"""The planes on which weights may travel, and the learner's end of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rollout.config import WeightsConfig
from rollout.versions import AdapterSpec


@dataclass(frozen=True, slots=True)
class Plane:
    """How weights travel in this run, everything decided: Plane("store", store_url="runs/sort3-001/weights")."""

    kind: Literal["gloo", "nccl", "ipc", "store"]
    store_url: str = ""
    workers: int = 1  # GPUs of one engine
    adapters: bool = False  # versions are adapters alone


def open_sender(
    plane: Plane, source: Callable[[], Iterator[tuple[str, Any]]], config: WeightsConfig, adapter: AdapterSpec | None
) -> Any:
    """The learner's end of a plane. A new plane is one more case here, and a receiver in `rollout/`."""
    bounds: Any = {"bucket_bytes": config.bucket_mb << 20, "timeout_s": config.timeout_s}
    match plane.kind:
        case "gloo":
            from learner.weight_sender import WeightSender

            return WeightSender(source, adapter=adapter, **bounds)
        case "nccl":
            from learner.nccl_sender import NcclSender

            return NcclSender(source, workers=plane.workers, **bounds)
        case "ipc":
            from learner.ipc_sender import IpcSender

            return IpcSender(source, **bounds)
        case "store":
            from learner.weight_publisher import WeightPublisher
            from rollout.weight_store import WeightStore

            return WeightPublisher(source, WeightStore(plane.store_url), adapter)
