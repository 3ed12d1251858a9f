"""How a vLLM engine is set up: its settings, the environment of its process, the arguments vLLM is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rollout.errors import ConfigError


def vllm_environment(threads: int = 1) -> dict[str, str]:
    """Environment variables of a process that hosts a `VllmEngine`, all in one place.

    TORCHDYNAMO_DISABLE saves seconds of start-up where nothing is compiled; the OMP settings keep vLLM's threads
    on the cores its process may use; usage statistics and hub look-ups are off (the model is a directory).
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # on CPU: the worker lives in the engine process, not in one more
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }


_GPU_MEMORY = 0.85  # of an engine's share of a GPU, what vLLM may take
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM makes room for; smaller ranks are padded with zeros


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """How the engine runs. VllmSettings("models/smollm2-135m", "bfloat16", max_model_len=256, cores=(0,))."""

    model_dir: str
    dtype: str = "bfloat16"
    max_model_len: int = 2048
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 1
    cores: tuple[int, ...] | None = None  # pin the host and engine processes to these; None: as inherited
    max_num_seqs: int = 64
    kv_cache_bytes: int | None = 256 << 20  # None: vLLM's own choice (a share of the device's memory)
    gpu_share: float = 1.0  # of its GPU, where it shares one
    tensor_parallel: int = 1
    block_size: int | None = 32  # short, so that the answers of one group share their prompt's KV
    kv_policy: Literal["keep", "recompute", "salt"] = "salt"
    plane: Literal["gloo", "nccl", "ipc", "store"] = "gloo"
    bucket_bytes: int = 8 << 20
    spool_dir: str | None = None
    store_url: str = ""  # where plane "store" pulls from
    timeout_s: float = 60.0
    seed: int = 0
    truncates: bool = False  # requests may ask for top_p or top_k
    initial_version: int = 0
    adapter_rank: int = 0  # above 0: the base stays as loaded, versions are adapters of up to this rank
    mend: bool = True  # repair what vLLM's reload leaves stale; False only to show that the canary sees it


def refuse_what_no_plane_carries(settings: VllmSettings) -> None:
    """Raises ConfigError where weights could not travel to this engine."""
    plane, workers = settings.plane, settings.tensor_parallel
    if workers > 1 and plane in ("gloo", "ipc"):
        remedy = "choose store (each worker pulls for itself) or nccl"
        raise ConfigError(f"weights.plane: {plane} has one receiver per engine, here are {workers} workers; {remedy}")
    if settings.adapter_rank and plane in ("nccl", "ipc"):
        raise ConfigError(f"weights.lora: adapters do not travel by {plane}, which writes into layers; choose merged")


def engine_arguments(settings: VllmSettings) -> dict[str, Any]:
    """Keyword arguments for vLLM's `AsyncEngineArgs`."""
    from rollout.vllm_loader import LOAD_FORMAT
    from rollout.vllm_weights import BACKENDS, WORKER_EXTENSION

    arguments: dict[str, Any] = {
        "model": settings.model_dir,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "enforce_eager": True,
        "seed": settings.seed,
        "tensor_parallel_size": settings.tensor_parallel,
        "gpu_memory_utilization": _GPU_MEMORY * settings.gpu_share,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": BACKENDS[settings.plane]},
        "additional_config": {
            "headrace": {
                "bucket_bytes": settings.bucket_bytes,
                "spool_dir": settings.spool_dir,
                "adapter_rank": settings.adapter_rank,
            }
        },
        "worker_extension_cls": WORKER_EXTENSION,
        "generation_config": "vllm",  # the directory's generation_config.json must not change how tokens are drawn
    }
    if settings.adapter_rank:
        arguments |= {
            "load_format": LOAD_FORMAT,
            "enable_lora": True,
            "max_lora_rank": next(r for r in ADAPTER_RANKS if r >= settings.adapter_rank),
            "max_loras": 1,
            "max_cpu_loras": 1,
        }
    if settings.truncates:
        from rollout.vllm_sampling import PROCESSORS

        arguments["logits_processors"] = PROCESSORS
    if settings.block_size is not None:
        arguments["block_size"] = settings.block_size
    if settings.kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = settings.kv_cache_bytes
    return arguments
