"""The receiving end inside an engine's worker process: enters groups, stages versions, hands them over proven.

    thread      does                                          waits for            ends with
    receiver    enter a group, or receive + digest a version  the group, deadline  a Receipt: ready, or why not
    the owner   polls `status`, loads what is ready           nothing

The owner (vLLM's worker, the light engine) never blocks on the network: it starts a job and polls. One job runs at
a time; a new one first breaks off the old one by closing its group.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rollout.engine import Rendezvous
from rollout.errors import DeadlineError, HeadraceError, WeightError
from rollout.versions import AdapterSpec, TensorSpec, WeightManifest
from rollout.weight_group import GlooGroup
from rollout.weight_spool import Spool, Staged
from rollout.weight_stream import (
    DIGEST_BYTES,
    PROLOGUE_WORDS,
    DigestTrail,
    check_digests,
    check_prologue,
    layout_hash,
    pieces,
    prologue,
    read_trailer,
    root_digest,
    sealed,
)

CALL_OFF_S = 0.2


@dataclass(frozen=True, slots=True)
class Receipt:
    """Where a job stands: `Receipt("staged", epoch=2, version=7, root="9f2c...", seconds=0.21)`.

    state: idle | joining | joined | staging | staged | failed (then `error` and `message` say why).
    """

    state: str = "idle"
    epoch: int = -1
    version: int = -1
    root: str = ""
    seconds: float = 0.0
    error: str = ""
    message: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def raise_if_failed(self) -> None:
        """Turn a failure that crossed a process back into the error it was."""
        if self.state != "failed":
            return
        if self.error == "DeadlineError":
            raise DeadlineError("the weight sender", self.seconds, self.message)
        raise WeightError(self.message)


async def until(state: str, timeout_s: float, status: Callable[[], Awaitable[Receipt]], poll_s: float) -> Receipt:
    """Poll a job until it stands at `state`. Raises WeightError, DeadlineError: what ended it, or that nothing did."""
    deadline = time.monotonic() + timeout_s + 2.0  # the job's own deadline comes first, and says more
    while True:
        receipt = await status()
        receipt.raise_if_failed()
        if receipt.state == state:
            return receipt
        if receipt.state == "idle":
            raise WeightError("broken off: the staged weights were discarded")
        if time.monotonic() > deadline:
            raise DeadlineError(f"the engine's inbox to be {state}", timeout_s)
        await asyncio.sleep(poll_s)


def manifest_to_plain(manifest: WeightManifest) -> dict[str, Any]:
    """A manifest as lists and strings, for whatever carries it between processes."""
    rows = [[t.name, t.dtype, list(t.shape), t.nbytes, t.digest] for t in manifest.tensors]
    adapter = asdict(manifest.adapter) if manifest.adapter else None
    return {"version": manifest.version, "tensors": rows, "adapter": adapter}


def manifest_from_plain(plain: dict[str, Any]) -> WeightManifest:
    rows = tuple(TensorSpec(n, d, tuple(s), b, g) for n, d, s, b, g in plain["tensors"])
    return WeightManifest(plain["version"], rows, AdapterSpec(**plain["adapter"]) if plain["adapter"] else None)


def receive(group: GlooGroup, manifest: WeightManifest, spool: Spool, bucket_bytes: int) -> Staged:
    """Receive one version into the free place and prove it. Raises WeightError, DeadlineError; loads nothing."""
    place = spool.free()
    data = place.bytes(manifest.nbytes)
    head = torch.empty(PROLOGUE_WORDS, dtype=torch.int64)
    group.start_clock()
    group.wait(group.broadcast(head))
    try:
        check_prologue(head, prologue(group.rendezvous.epoch, manifest, bucket_bytes))
    except WeightError:
        _stay_in_step(group, manifest, head, bucket_bytes)
        raise
    trail = DigestTrail(manifest)
    plan, flying, posted = pieces(manifest.nbytes, bucket_bytes), deque[int](), 0
    for piece in plan:  # the next pieces flow while this one is digested; two buckets are touched at most
        while posted < len(plan) and plan[posted].end - piece.start <= max(2 * bucket_bytes, piece.end - piece.start):
            flying.append(group.broadcast(data[plan[posted].start : plan[posted].end]))
            posted += 1
        group.wait(flying.popleft())
        trail.update(data[piece.start : piece.end])
        place.release(piece.start, piece.end)
    tail = torch.empty(DIGEST_BYTES * len(manifest.tensors), dtype=torch.uint8)
    group.wait(group.broadcast(tail))
    check_digests(manifest, read_trailer(tail), trail.digests)
    proven = sealed(manifest, trail.digests)
    return Staged(proven, root_digest(proven), place)


def _stay_in_step(group: GlooGroup, manifest: WeightManifest, head: torch.Tensor, bucket_bytes: int) -> None:
    """Let a stream that we refuse pass by, if its sizes are the announced ones: the group stays of use."""
    sizes = [t.nbytes for t in manifest.tensors]
    if head.tolist()[4:7] != [sum(sizes), len(sizes), bucket_bytes]:
        return
    scratch = torch.empty(max(bucket_bytes, DIGEST_BYTES * len(sizes)), dtype=torch.uint8)
    for piece in pieces(sum(sizes), bucket_bytes):
        group.wait(group.broadcast(scratch[: piece.end - piece.start]))
    group.wait(group.broadcast(scratch[: DIGEST_BYTES * len(sizes)]))


def _pull(url: str, manifest: WeightManifest, spool: Spool, timeout_s: float, called_off: threading.Event) -> Staged:
    """Wait for a version in a store, hold it against what was announced, fetch and prove it."""
    from rollout.weight_store import WeightStore

    store = WeightStore(url)
    published = store.wait_for(manifest.version, timeout_s, called_off)
    if manifest.tensors and layout_hash(published.manifest) != layout_hash(manifest):
        raise WeightError(f"version {manifest.version} in {url} has other names, types or shapes than announced")
    return store.fetch(manifest.version, spool)


class WeightInbox:
    """Joins, stages, discards; what is staged and proven is `ready` until taken or discarded."""

    def __init__(self, bucket_bytes: int, spool_dir: Path | str | None = None) -> None:
        self._bucket_bytes = bucket_bytes
        self.spool = Spool(spool_dir)
        self._group: GlooGroup | None = None
        self._ready: Staged | None = None
        self._receipt = Receipt()
        self._thread: threading.Thread | None = None
        self._job = 0  # a job that was broken off must not write its result over the next one's
        self._called_off = threading.Event()  # tells a job that still waits for a version to end
        self._lock = threading.Lock()

    def status(self) -> Receipt:
        return self._receipt

    def join(self, rdv: Rendezvous) -> None:
        """Start to enter a group; leaves the one before and forgets what was staged."""
        self._break_off()
        self._run(Receipt("joining", rdv.epoch), lambda: GlooGroup.enter(rdv))

    def stage(self, manifest: WeightManifest) -> None:
        """Start to receive a version from the group entered last."""
        group = self._group
        if group is None or group.broken:
            raise WeightError(f"no weight group to receive version {manifest.version} from; join one first")
        if self._thread is not None and self._thread.is_alive():
            raise WeightError(f"still {self._receipt.state}; discard it before staging version {manifest.version}")
        self._ready = None
        epoch = group.rendezvous.epoch
        self._run(
            Receipt("staging", epoch, manifest.version),
            lambda: receive(group, manifest, self.spool, self._bucket_bytes),
        )

    def fetch(self, url: str, manifest: WeightManifest, timeout_s: float) -> None:
        """Start to pull a version from a store (the store plane); it may not be published yet."""
        if self._thread is not None and self._thread.is_alive():
            raise WeightError(f"still {self._receipt.state}; discard it before fetching version {manifest.version}")
        self._ready = None
        called_off = self._called_off = threading.Event()
        self._run(
            Receipt("staging", -1, manifest.version), lambda: _pull(url, manifest, self.spool, timeout_s, called_off)
        )

    def take(self, version: int) -> Staged:
        """The proven version, to be loaded; WeightError if another one, or none, is ready."""
        ready = self._ready
        if ready is None or ready.manifest.version != version:
            have = "nothing" if ready is None else f"version {ready.manifest.version}"
            raise WeightError(f"cannot load version {version}: {have} is staged; stage it first")
        return ready

    def committed(self, staged: Staged) -> None:
        """The engine now serves `staged`; the next version may be staged."""
        self.spool.promote(staged)
        self._ready = None
        self._receipt = Receipt("joined", self._receipt.epoch)

    def discard(self) -> None:
        """Forget what is staged; a reception under way is broken off (its group is of no more use). Idempotent."""
        if self._thread is not None and self._thread.is_alive():
            self._break_off()
        self._ready = None
        self._receipt = Receipt()

    def close(self) -> None:
        self._break_off()
        self._ready = None

    def _break_off(self) -> None:
        """Make the running job's result void and close its group. A job that enters a group ends at its deadline."""
        with self._lock:
            self._job += 1
        if self._group is not None:
            self._group.close()
            self._group = None
        self._called_off.set()
        if self._thread is not None:
            self._thread.join(CALL_OFF_S)  # one that only waits for a version ends at once
            if self._thread.is_alive():
                self.spool.abandon_free()  # it may still write: let it have that place, and take another
            self._thread = None

    def _run(self, begun: Receipt, work: Callable[[], GlooGroup | Staged]) -> None:
        with self._lock:
            self._job += 1
            job = self._job
        self._receipt = begun
        self._thread = threading.Thread(
            target=self._body, args=(job, begun, work), name=f"weights-{begun.state}", daemon=True
        )
        self._thread.start()

    def _body(self, job: int, begun: Receipt, work: Callable[[], GlooGroup | Staged]) -> None:
        started = time.monotonic()
        result: GlooGroup | Staged | None = None
        try:
            result = work()
            done = replace(begun, state="joined" if isinstance(result, GlooGroup) else "staged")
        except HeadraceError as error:
            done = replace(begun, state="failed", error=type(error).__name__, message=str(error))
        except Exception as error:  # noqa: BLE001 - nobody else hears of it: a full disk, a store out of reach, a bug
            message = f"{type(error).__name__}: {error}"
            done = replace(begun, state="failed", error="WeightError", message=message)
        with self._lock:
            current = job == self._job
            if current:
                self._install(result, replace(done, seconds=time.monotonic() - started))
        if not current and isinstance(result, GlooGroup):
            result.close()

    def _install(self, result: GlooGroup | Staged | None, done: Receipt) -> None:
        if isinstance(result, GlooGroup):
            self._group = result
        elif isinstance(result, Staged):
            self._ready = result
            done = replace(done, root=result.root)
        self._receipt = done
