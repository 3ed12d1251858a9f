"""Checkpoints that are whole or not there: written beside their place, checked, renamed. Torn ones are ignored by name.

    checkpoints/v00000024/          24 = the version inside
        state-00000.safetensors     weights (float32 master), Adam moments, random states; shards of about 256 MB
        state-00001.safetensors
        manifest.json               version, numbers, and for each shard its size and BLAKE3 digest; written last

    write    shards -> fsync -> manifest -> fsync -> rename the directory -> fsync the parent
    read     manifest must parse and every shard must have the size and digest it lists, else TornCheckpoint

Tensors are whole and named, never partitioned: what 4 ranks wrote under ZeRO-3 loads into 1 rank under ZeRO-0.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3
from torch import Tensor

from rollout.errors import HeadraceError

MANIFEST = "manifest.json"
SCHEMA = 1
SHARD_BYTES = 256 << 20
_PIECE = 8 << 20


class TornCheckpoint(HeadraceError):
    """The directory is not a whole checkpoint; the message says what is missing or different."""


@dataclass(frozen=True)
class Manifest:
    """Manifest(version=24, numbers={"bad_steps": 0.0}, shards={"state-00000.safetensors": {"bytes": 2684, ..}})."""

    version: int
    numbers: dict[str, float] = field(default_factory=dict)
    shards: dict[str, dict[str, Any]] = field(default_factory=dict)


class Writer:
    """Collects named tensors into shards; nothing can be seen at `path` before `commit`."""

    def __init__(self, path: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.path, self._limit = path, shard_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        self._making = path.parent / f".{path.name}.making-{uuid.uuid4().hex[:8]}"
        self._making.mkdir()
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: dict[str, dict[str, Any]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        self._pending[name] = tensor.detach().cpu().contiguous()
        self._pending_bytes += tensor.numel() * tensor.element_size()
        if self._pending_bytes >= self._limit:
            self._flush()

    def commit(self, version: int, numbers: dict[str, float]) -> None:
        """Make it visible under its name, durable when this returns. A checkpoint already there is replaced."""
        self._flush()
        manifest = {"schema": SCHEMA, "version": version, "numbers": numbers, "shards": self._shards}
        with open(self._making / MANIFEST, "w") as f:
            json.dump(manifest, f, indent=1)
            f.flush()
            os.fsync(f.fileno())
        _sync_directory(self._making)
        if self.path.exists():
            old = self.path.parent / f".{self.path.name}.making-{uuid.uuid4().hex[:8]}"
            self.path.rename(old)
            self._making.rename(self.path)
            shutil.rmtree(old)
        else:
            self._making.rename(self.path)
        _sync_directory(self.path.parent)

    def discard(self) -> None:
        shutil.rmtree(self._making, ignore_errors=True)

    def _flush(self) -> None:
        if not self._pending:
            return
        from safetensors.torch import save_file

        name = f"state-{len(self._shards):05d}.safetensors"
        target = self._making / name
        save_file(self._pending, target)
        with open(target, "rb") as f:
            os.fsync(f.fileno())
        self._shards[name] = {"bytes": target.stat().st_size, "blake3": _digest(target)}
        self._pending, self._pending_bytes = {}, 0


def read_manifest(path: Path, *, digests: bool = True) -> Manifest:
    """Raise TornCheckpoint unless every listed shard is there, of its size and (with `digests`) of its bytes."""
    try:
        raw = json.loads((path / MANIFEST).read_text())
        manifest = Manifest(int(raw["version"]), dict(raw["numbers"]), dict(raw["shards"]))
        schema = int(raw["schema"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TornCheckpoint(f"{path}: {MANIFEST} cannot be read ({type(error).__name__}: {error})") from error
    if schema != SCHEMA:
        raise TornCheckpoint(f"{path}: schema {schema}, this version reads {SCHEMA}")
    for name, facts in manifest.shards.items():
        shard = path / name
        size = shard.stat().st_size if shard.exists() else None
        if size != facts["bytes"]:
            raise TornCheckpoint(f"{shard}: {size} bytes, the manifest says {facts['bytes']}")
        if digests and _digest(shard) != facts["blake3"]:
            raise TornCheckpoint(f"{shard}: its bytes are not those that were written")
    return manifest


def tensors(path: Path, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checked checkpoint, one alive at a time."""
    from safetensors import safe_open

    for shard in manifest.shards:
        with safe_open(path / shard, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118 - not a mapping
                yield name, f.get_tensor(name)


def latest(root: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint under `root`, and why newer ones were passed over."""
    passed: list[str] = []
    for path in sorted(root.glob("v*"), reverse=True) if root.is_dir() else []:
        try:
            read_manifest(path)
        except TornCheckpoint as error:
            passed.append(str(error))
            continue
        return path, passed
    return None, passed


def path_of(root: Path, version: int) -> Path:
    return root / f"v{version:08d}"


def prune(root: Path, keep: int) -> list[Path]:
    """Delete all but the `keep` newest whole checkpoints, and what killed writers left; returns what went."""
    whole = [p for p in sorted(root.glob("v*"), reverse=True) if (p / MANIFEST).exists()]
    gone = whole[max(keep, 1) :] + list(root.glob(".v*.making-*"))
    for path in gone:
        shutil.rmtree(path)
    return gone


def write(
    path: Path, named: Iterable[tuple[str, Tensor]], version: int, numbers: dict[str, float], *, writes: bool
) -> None:
    """Every rank walks `named` (its items may be collective gathers); the rank that `writes` keeps them."""
    writer = Writer(path) if writes else None
    try:
        for name, tensor in named:
            if writer:
                writer.add(name, tensor)
        if writer:
            writer.commit(version, numbers)
    except BaseException:
        if writer:
            writer.discard()
        raise


def _digest(path: Path) -> str:
    hasher = blake3()
    with open(path, "rb") as f:
        while piece := f.read(_PIECE):
            hasher.update(piece)
    return hasher.hexdigest()


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
