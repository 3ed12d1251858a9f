"""The store plane: versions as files in a directory or at any fsspec URL; whoever wants one pulls it.

    v00000010.anchor.safetensors   a whole version, readable as a Hugging Face weights file
    v00000010.json                 its manifest: digests, root, which file, which base; written last = published
    v00000011.delta.safetensors    what changed since its base (weight_delta), compressed
    v00000011.json

A joiner takes the newest manifest and walks its bases back to an anchor, or to the version it already has: a fleet
that keeps up reads only deltas. Nothing is trusted: the final bytes are digested and compared with the manifest before
they count as staged, and the manifest's root with what the learner says when it asks for the commit.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import numpy as np
import torch

from rollout import weight_delta
from rollout.errors import DeadlineError, WeightError
from rollout.versions import AdapterSpec, TensorSpec, WeightManifest
from rollout.weight_delta import Delta
from rollout.weight_files import Entry, read_data, read_header, write
from rollout.weight_inbox import manifest_from_plain, manifest_to_plain
from rollout.weight_spool import Place, Spool, Staged
from rollout.weight_stream import DigestTrail, NamedTensor, as_bytes, check_digests, digest, root_digest, spec_of

_POLL_S = 0.05
_COPY = 8 << 20


@dataclass(frozen=True, slots=True)
class Published:
    """One version in the store: `Published(manifest, root="9f2c...", base=10, file="v00000011.delta...", nbytes=4e6)`.

    base is -1 for an anchor.
    """

    manifest: WeightManifest
    root: str
    base: int
    file: str
    nbytes: int


class WeightStore:
    """One run's versions. A learner publishes, engines fetch; any number of either process may hold one of these."""

    def __init__(
        self, url: str, *, anchor_every: int = 10, keep_anchors: int = 2, scratch: Path | str | None = None
    ) -> None:
        self._fs, self._root = fsspec.core.url_to_fs(url)
        self._fs.makedirs(self._root, exist_ok=True)
        self._anchor_every, self._keep_anchors = anchor_every, keep_anchors
        self._scratch = scratch
        self._spool = Spool(scratch)  # the publisher's: the bytes of the version published last, the base of the next
        self._since_anchor = 0

    # --- the learner's side -------------------------------------------------------------------------------------------

    def publish(self, version: int, tensors: Iterable[NamedTensor], adapter: AdapterSpec | None = None) -> Published:
        """Write one version: a delta to the one before; an anchor every `anchor_every`, or if a delta saves little."""
        base = self._spool.serving
        staged = self._gather(version, tensors, adapter)
        if base is not None and (base.manifest.version == version or not _same_layout(base.manifest, staged.manifest)):
            base = None  # published a second time, or another model: nothing to build on
        if base is not None and self._since_anchor + 1 < self._anchor_every:
            found = self._write_delta(staged, base)
            self._since_anchor += 1
        else:
            found = self._write_anchor(staged)
            self._since_anchor = 0
        self._write_manifest(found)
        self._spool.promote(staged)
        if found.base < 0:
            self._forget_old()
        return found

    def retract(self, version: int) -> None:
        """Take back a version that is about to be published again; nobody must fetch the old one meanwhile."""
        path = f"{self._root}/v{version:08d}.json"
        if self._fs.exists(path):
            self._fs.rm_file(path)

    def _gather(self, version: int, tensors: Iterable[NamedTensor], adapter: AdapterSpec | None) -> Staged:
        """Copy the learner's tensors into the free place, one at a time, digesting each."""
        place, specs, at = self._spool.free(), [], 0
        for name, tensor in tensors:
            spec, data = spec_of(name, tensor), as_bytes(tensor)
            place.bytes(at + spec.nbytes)[at:].copy_(data)
            specs.append(TensorSpec(spec.name, spec.dtype, spec.shape, spec.nbytes, digest(data).hex()))
            place.release(at, at + spec.nbytes)
            at += spec.nbytes
        manifest = WeightManifest(version, tuple(specs), adapter)
        return Staged(manifest, root_digest(manifest), place)

    def _write_anchor(self, staged: Staged) -> Published:
        name = f"v{staged.manifest.version:08d}.anchor.safetensors"
        entries = [Entry(t.name, t.dtype, t.shape, t.nbytes) for t in staged.manifest.tensors]
        metadata = {"format": "pt", "version": str(staged.manifest.version), "root": staged.root}
        with self._fs.open(f"{self._root}/{name}", "wb") as file:
            nbytes = write(file, entries, (d.data for _, d in _pieces(staged)), metadata)
        return Published(staged.manifest, staged.root, -1, name, nbytes)

    def _write_delta(self, staged: Staged, base: Staged) -> Published:
        name = f"v{staged.manifest.version:08d}.delta.safetensors"
        entries: list[Entry] = []
        changed: dict[str, str] = {}
        with tempfile.TemporaryFile(dir=self._scratch) as blobs:
            for (spec, new), (_, old) in zip(_pieces(staged), _pieces(base), strict=True):
                delta = weight_delta.encode(old, new, getattr(torch, spec.dtype).itemsize)
                if delta.changed:
                    changed[spec.name] = str(delta.changed)
                    for part, blob in (("gaps", delta.gaps), ("xor", delta.xor)):
                        entries.append(Entry(f"{spec.name}/{part}", "uint8", (len(blob),), len(blob)))
                        blobs.write(blob)
            if blobs.tell() > staged.manifest.nbytes // 2:
                return self._write_anchor(staged)
            blobs.seek(0)
            with self._fs.open(f"{self._root}/{name}", "wb") as file:
                nbytes = write(file, entries, _chunks(blobs), changed)
        return Published(staged.manifest, staged.root, base.manifest.version, name, nbytes)

    def _write_manifest(self, p: Published) -> None:
        plain = {**manifest_to_plain(p.manifest), "root": p.root, "base": p.base, "file": p.file, "nbytes": p.nbytes}
        path = f"{self._root}/v{p.manifest.version:08d}.json"
        self._fs.pipe_file(path + ".new", json.dumps(plain).encode())
        self._fs.mv(path + ".new", path)

    def _forget_old(self) -> None:
        """Drop what is older than the `keep_anchors` newest anchors, also what a learner left that died while writing.

        Readers under way ask again.
        """
        found = [self.manifest(v) for v in self.versions()]
        anchors = [p.manifest.version for p in found if p.base < 0][-self._keep_anchors :]
        for name in self._names():
            if int(name[1:9]) < anchors[0]:
                self._fs.rm_file(f"{self._root}/{name}")

    # --- the engines' side --------------------------------------------------------------------------------------------

    def versions(self) -> list[int]:
        """Published versions, oldest first."""
        return sorted(int(n[1:9]) for n in self._names() if n.endswith(".json"))

    def _names(self) -> list[str]:
        """Our files: v00000010.json, v00000010.anchor.safetensors, ..."""
        self._fs.invalidate_cache()
        names = (Path(p).name for p in self._fs.ls(self._root, detail=False))
        return [n for n in names if n[:1] == "v" and n[1:9].isdigit()]

    def manifest(self, version: int) -> Published:
        """WeightError if `version` is not (or no longer) there, or its manifest is damaged."""
        path = f"{self._root}/v{version:08d}.json"
        try:
            plain: dict[str, Any] = json.loads(self._fs.cat_file(path))
            manifest = manifest_from_plain(plain)
            found = Published(manifest, plain["root"], plain["base"], plain["file"], plain["nbytes"])
        except FileNotFoundError as error:
            raise WeightError(
                f"version {version} is not in the store {self._root}; wait for it or ask newer"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise WeightError(f"the manifest {path} is damaged ({error}); publish the version again") from error
        if root_digest(manifest) != found.root or manifest.version != version:
            raise WeightError(f"the manifest {path} does not agree with itself; publish the version again")
        return found

    def wait_for(self, version: int, timeout_s: float, called_off: threading.Event | None = None) -> Published:
        """Block until `version` is published. Raises DeadlineError, and WeightError once `called_off` is set."""
        called_off = called_off or threading.Event()
        deadline = time.monotonic() + timeout_s
        while version not in self.versions():
            if time.monotonic() > deadline:
                raise DeadlineError(f"the learner to publish version {version} in {self._root}", timeout_s)
            if called_off.wait(_POLL_S):
                raise WeightError(f"nobody waits for version {version} any more: it was discarded")
        return self.manifest(version)

    def fetch(self, version: int, spool: Spool) -> Staged:
        """Bring `version` into the spool's free place and prove it. Raises WeightError; nothing is loaded."""
        wanted = self.manifest(version)
        place = spool.free()
        try:
            for step in self._path_to(wanted, spool.serving, place):
                self._apply(step, place)
        except FileNotFoundError as error:
            raise WeightError(f"a file of version {version} left the store while it was read; fetch again") from error
        data = place.bytes(wanted.manifest.nbytes)
        trail = DigestTrail(wanted.manifest)
        trail.update(data)
        place.release(0, wanted.manifest.nbytes)
        check_digests(wanted.manifest, [t.digest for t in wanted.manifest.tensors], trail.digests)
        return Staged(wanted.manifest, wanted.root, place)

    def _path_to(self, wanted: Published, have: Staged | None, place: Place) -> list[Published]:
        """What to apply, oldest first, after putting the base we have (if any) into the place."""
        path = [wanted]
        while path[-1].base >= 0:
            base = path[-1].base
            if have is not None and have.manifest.version == base and have.root == self.manifest(base).root:
                _copy(have, place)
                return path[::-1]
            path.append(self.manifest(base))
        return path[::-1]

    def _apply(self, step: Published, place: Place) -> None:
        data, where = place.bytes(step.manifest.nbytes).numpy(), _where(step.manifest)
        with self._fs.open(f"{self._root}/{step.file}", "rb") as file:
            entries, metadata = read_header(file)
            pieces = read_data(file, entries)
            if step.base < 0:
                for e, piece in pieces:
                    _, start, end = _find(where, e.name, step)
                    data[start:end] = np.frombuffer(piece, np.uint8)
                    place.release(start, end)
                return
            for e, gaps in pieces:
                name = e.name.removesuffix("/gaps")
                spec, start, end = _find(where, name, step)
                _, xor = next(pieces, (e, b""))
                delta = Delta(int(metadata.get(name, 0)), gaps, xor)
                weight_delta.apply(data[start:end], delta, getattr(torch, spec.dtype).itemsize)
                place.release(start, end)


def _same_layout(a: WeightManifest, b: WeightManifest) -> bool:
    return [(t.name, t.dtype, t.shape) for t in a.tensors] == [(t.name, t.dtype, t.shape) for t in b.tensors]


def _pieces(staged: Staged) -> Iterator[tuple[TensorSpec, np.ndarray]]:
    """Each tensor's bytes uint8[nbytes]; pages leave resident memory behind the reader."""
    data, at = staged.bytes().numpy(), 0
    for spec in staged.manifest.tensors:
        yield spec, data[at : at + spec.nbytes]
        staged.place.release(at, at + spec.nbytes)
        at += spec.nbytes


def _where(manifest: WeightManifest) -> dict[str, tuple[TensorSpec, int, int]]:
    """Name -> its spec and the `[start, end)` of its bytes in the version."""
    at, found = 0, {}
    for t in manifest.tensors:
        found[t.name] = (t, at, at + t.nbytes)
        at += t.nbytes
    return found


def _find(where: dict[str, tuple[TensorSpec, int, int]], name: str, step: Published) -> tuple[TensorSpec, int, int]:
    if name not in where:
        raise WeightError(f"{step.file} holds {name}, which version {step.manifest.version} does not have")
    return where[name]


def _copy(have: Staged, place: Place) -> None:
    source, target = have.bytes(), place.bytes(have.manifest.nbytes)
    for at in range(0, have.manifest.nbytes, _COPY):
        end = min(at + _COPY, have.manifest.nbytes)
        target[at:end].copy_(source[at:end])
        place.release(at, end)
        have.place.release(at, end)


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(_COPY):
        yield piece
