"""A model directory out of a stream of weights: sharded safetensors with an index, the rest copied from the source."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from rollout.errors import ConfigError

SHARD_BYTES = 2 << 30
INDEX = "model.safetensors.index.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


def write(out: Path, source: Path, named: Iterable[tuple[str, Tensor]], dtype: str) -> None:
    """Build beside `out` and rename: `out` is a whole model or it is not there. Refuses to replace anything."""
    if out.exists():
        raise ConfigError(f"{out} exists; choose another directory or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    making = out.parent / f".{out.name}.making-{uuid.uuid4().hex[:8]}"
    making.mkdir()
    try:
        _copy_the_rest(source, making, dtype)
        _write_weights(making, named)
        making.rename(out)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _copy_the_rest(source: Path, out: Path, dtype: str) -> None:
    for path in source.iterdir():
        foreign = path.name.endswith(WEIGHT_SUFFIXES) or path.name in (INDEX, "headrace_model.json")
        if path.is_file() and not foreign and not path.name.startswith("."):
            shutil.copy(path, out / path.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    (out / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2))


def _write_weights(out: Path, named: Iterable[tuple[str, Tensor]]) -> None:
    from safetensors.torch import save_file

    shards: list[Path] = []
    where: dict[str, str] = {}
    pending: dict[str, Tensor] = {}
    held = total = 0

    def flush() -> None:
        nonlocal held
        path = out / f"model-{len(shards) + 1:05d}.safetensors"
        save_file(pending, path, metadata={"format": "pt"})
        with open(path, "rb") as f:
            os.fsync(f.fileno())
        shards.append(path)
        where.update(dict.fromkeys(pending, path.name))
        pending.clear()
        held = 0

    for name, tensor in named:
        pending[name] = tensor.detach().cpu().contiguous().clone()
        held += tensor.nbytes
        total += tensor.nbytes
        if held >= SHARD_BYTES:
            flush()
    if pending:
        flush()
    if len(shards) == 1:
        shards[0].rename(out / "model.safetensors")
    else:
        (out / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1))
