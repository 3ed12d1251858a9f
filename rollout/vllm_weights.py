"""Our weight-transfer back end inside vLLM's worker process, and the mend for what vLLM's reload leaves stale.

vLLM finds `register` through the `vllm.general_plugins` entry point in every engine process. The life of one update,
in the worker (each line one RPC; the first four run beside decoding, the others while generation is paused):

    headrace_weights("open", ...)     once, where only adapters travel: put an adapter of zeros in (vllm_adapter.py)
    headrace_weights("join", ...)     enter the epoch's gloo group               (a thread; poll with "status")
    headrace_weights("fetch", ...)    or: pull from the store into the spool    (a thread; poll with "status")
    headrace_weights("stage", ...)    receive into the spool, recompute digests  (a thread; poll with "status")
    headrace_load(7)                  vLLM's session, in one call:
        headrace_begin()                  start_weight_update, also after one that broke:
                                          layers go back to checkpoint format
        update_weights({"version": 7})    load the proven bytes; refuse any other version
        finish_weight_update()            vLLM repacks; we mend tied heads that kept their old packed weights
                                      or, where only adapters travel: the one adapter is replaced

The worker gains `headrace_weights` through `worker_extension_cls`, because vLLM's own `update_weights` may only run
inside a paused update, and receiving must not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from rollout.engine import Rendezvous
from rollout.errors import HeadraceError, WeightError
from rollout.versions import WeightManifest
from rollout.weight_inbox import WeightInbox, manifest_from_plain
from rollout.weight_spool import Staged
from rollout.weight_stream import NamedTensor, views

if TYPE_CHECKING:
    from rollout.vllm_adapter import AdapterSlot

BACKENDS = {"gloo": "headrace", "store": "headrace", "nccl": "headrace_nccl", "ipc": "headrace_ipc"}  # by plane
_KEEP_BEHIND = 64 << 20
WORKER_EXTENSION = "rollout.vllm_weights.WeightCalls"


def register() -> None:
    """Entry point `vllm.general_plugins`: make the back end known in this process. Idempotent."""
    if BACKENDS["gloo"] not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKENDS["gloo"], HeadraceTransfer)
        WeightTransferEngineFactory.register_engine(BACKENDS["nccl"], "rollout.vllm_summing", "SummingNccl")
        WeightTransferEngineFactory.register_engine(BACKENDS["ipc"], "rollout.vllm_summing", "SummingIpc")
        from vllm.model_executor.model_loader import register_model_loader

        from rollout.vllm_loader import LOAD_FORMAT, WitnessedLoader

        register_model_loader(LOAD_FORMAT)(WitnessedLoader)


# --- the mend ---------------------------------------------------------------------------------------------------------


def packed_state(model: torch.nn.Module) -> dict[str, Callable[..., torch.Tensor]]:
    """Modules that multiply with a private, repacked copy of their weight (vLLM on CPU): name -> its kernel."""
    return {name: m.cpu_linear for name, m in model.named_modules() if _packs(m)}


def mend_packed(model: torch.nn.Module, before: dict[str, Callable[..., torch.Tensor]]) -> list[str]:
    """Renew the kernels of modules that a reload passed over; returns their names.

    vLLM's layerwise reload repacks the module that owns a parameter, so a module that only shares it (a tied output
    head) goes on multiplying with the OLD copy. Any module whose kernel is still the one from before the reload gets
    the fresh kernel of the module it shares its weight with, or else is repacked. One whose unpacked weight is gone
    cannot be mended: WeightError.
    """
    mended, lost = [], []
    fresh = {_key(m): m for n, m in model.named_modules() if _packs(m) and m.cpu_linear is not before.get(n)}
    for name, module in model.named_modules():
        if name not in before or not _packs(module) or module.cpu_linear is not before[name]:
            continue
        twin = fresh.get(_key(module))
        if module.weight.numel() == 0:
            lost.append(name)
        elif twin is not None:  # packing 57 MB again would take a third of the pause
            module.cpu_linear = twin.cpu_linear
            mended.append(name)
        else:
            module.quant_method.process_weights_after_loading(module)
            mended.append(name)
    if lost:
        raise WeightError(f"{lost[0]} and {len(lost) - 1} more got no new weights and keep old packed ones; send all")
    return mended


def _packs(module: torch.nn.Module) -> bool:
    """Whether it multiplies with a copy of its own (plain `linear` reads the live weight)."""
    return getattr(module, "cpu_linear", torch.nn.functional.linear) is not torch.nn.functional.linear


def _key(module: torch.nn.Module) -> tuple[object, ...]:
    """Equal for modules that pack the same bytes in the same way."""
    return type(module.quant_method), module.weight.data_ptr(), tuple(module.weight.shape), module.weight.dtype


# --- the back end -----------------------------------------------------------------------------------------------------


@dataclass
class HeadraceInit(WeightTransferInitInfo):
    """Nothing: groups are entered with `headrace_weights("join")`, beside decoding."""


@dataclass
class HeadraceUpdate(WeightTransferUpdateInfo):
    """Load this version, which must be staged and proven."""

    version: int
    mend: bool = True  # off only in the test that shows what the mend is for


class HeadraceTransfer(WeightTransferEngine[HeadraceInit, HeadraceUpdate]):
    """Loads staged versions with vLLM's layerwise reload."""

    init_info_cls = HeadraceInit
    update_info_cls = HeadraceUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = (self.vllm_config.additional_config or {}).get("headrace", {})
        self.inbox = WeightInbox(settings.get("bucket_bytes", 8 << 20), settings.get("spool_dir"))
        self._before: dict[str, Callable[..., torch.Tensor]] = {}
        self._loaded: Staged | None = None
        self._mend = True
        self._max_rank = settings.get("adapter_rank", 0)
        self._slot: AdapterSlot | None = None  # set by "open" in an engine that takes adapters
        self.load_s = 0.0
        self.mended: list[str] = []

    def init_transfer_engine(self, init_info: HeadraceInit) -> None:
        pass

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._started = time.monotonic()
        self._before = packed_state(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Overrides the base, which synchronizes an accelerator that a CPU worker does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def receive_weights(self, update_info: HeadraceUpdate) -> None:
        staged = self.inbox.take(update_info.version)
        self._mend = update_info.mend
        self.model.load_weights(self._released_behind(staged))
        self._loaded = staged

    def _released_behind(self, staged: Staged) -> Iterator[NamedTensor]:
        """The staged tensors in order; pages of those loaded leave resident memory.

        vLLM keeps the tensors of a layer until the layer is complete, and copies them only then: hence the distance.
        """
        at = released = 0
        for spec, (name, tensor) in zip(staged.manifest.tensors, views(staged.manifest, staged.bytes()), strict=True):
            yield name, tensor
            at += spec.nbytes
            if at - released > _KEEP_BEHIND:
                staged.place.release(released, at - _KEEP_BEHIND // 2)
                released = at - _KEEP_BEHIND // 2
        staged.place.release(released, at)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._loaded is None:
            raise WeightError("finish_weight_update without a loaded version; call update_weights first")
        finalize_layerwise_reload(self.model, self.model_config)
        self.mended = mend_packed(self.model, self._before) if self._mend else []
        self._before = {}
        self.inbox.committed(self._loaded)
        self._loaded = None
        self.load_s = time.monotonic() - self._started

    @property
    def takes_adapters(self) -> bool:
        return self._max_rank > 0

    def load_adapter(self, version: int) -> None:
        """What `headrace_load` does where only adapters travel: no layer is reloaded, one adapter is replaced."""
        if self._slot is None:
            raise WeightError("this engine has no place for an adapter yet; it must be opened first")
        started = time.monotonic()
        staged = self.inbox.take(version)
        self._slot.load(staged)
        self.inbox.committed(staged)
        self.load_s = time.monotonic() - started

    def _open(self) -> None:
        from rollout.vllm_adapter import AdapterSlot

        self._slot = AdapterSlot(self.model, self._max_rank, self.vllm_config.lora_config.lora_dtype)
        self._slot.put_zeros()

    def _checked(self, plain: dict[str, Any]) -> WeightManifest:
        """The manifest, if this engine takes what it announces."""
        manifest = manifest_from_plain(plain)
        if self._slot is not None:
            self._slot.room.check(manifest)
        elif manifest.adapter is not None:
            raise WeightError(f"version {manifest.version} is an adapter, this engine takes whole models; refused")
        return manifest

    def shutdown(self) -> None:
        self.inbox.close()

    def call(self, what: str, args: dict[str, Any]) -> dict[str, Any]:
        """One control call; returns the inbox's status. Never blocks on the network."""
        if what == "join":
            self.inbox.join(Rendezvous(**args))
        elif what == "stage":
            self.inbox.stage(self._checked(args))
        elif what == "fetch":
            self.inbox.fetch(args["url"], self._checked(args["manifest"]), args["timeout_s"])
        elif what == "discard":
            self.inbox.discard()
        elif what == "open":
            self._open()
        elif what != "status":
            raise WeightError(f"unknown weight call {what!r}; known are open, join, stage, fetch, discard, status")
        return self.inbox.status().as_dict()


class WeightCalls:
    """Mixed into vLLM's worker (`worker_extension_cls`): one more RPC."""

    weight_transfer_engine: Any
    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any
    model_runner: Any
    vllm_config: Any
    _weight_update_active: bool

    def headrace_record_before_the_cut(self) -> None:
        from rollout.vllm_sampling import record_before_the_cut

        record_before_the_cut(self.model_runner.sampler)

    def headrace_begin(self) -> None:
        """vLLM's start of an update session, also after one that broke.

        vLLM 0.32 refuses that where the session is still open, and fails in layers that are half full from before
        ("'Parameter' object has no attribute 'weight_loader'"): they are emptied first.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        engine = self.weight_transfer_engine
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(engine.model, engine.model_config)
        self._weight_update_active = False
        self.start_weight_update()

    def headrace_load(self, version: int, mend: bool) -> float:
        """vLLM's whole update session in one call, because generation stands still meanwhile; returns seconds."""
        if self.weight_transfer_engine.takes_adapters:
            self.weight_transfer_engine.load_adapter(version)
            return self.weight_transfer_engine.load_s
        self.headrace_begin()
        self.update_weights({"version": version, "mend": mend})
        self.finish_weight_update()
        return self.weight_transfer_engine.load_s

    def headrace_weights(self, what: str, args: dict[str, Any]) -> dict[str, Any]:
        try:
            return self.weight_transfer_engine.call(what, args)
        except HeadraceError as error:
            return {"state": "failed", "error": type(error).__name__, "message": str(error)}
