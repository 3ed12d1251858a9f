"""The stage of the fault matrix: a learner that can be made to lie or die, two engines, and a push between them.

`benchmarks/weight_fault_table.py` says what is done to whom, `benchmarks/weight_faults.py` plays it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from actors.weight_sync import CanaryPlan, SenderPort, ThreadedSender, WeightSync
from benchmarks.light_engine import LightEngine, always, score
from benchmarks.light_process import Doom, LightProcess, Remote, Steps, light_service, serve
from learner.weight_epochs import Sent
from learner.weight_publisher import WeightPublisher
from learner.weight_sender import WeightSender
from rollout.canary import CanaryText
from rollout.engine import Rendezvous, SamplingParams
from rollout.service import RolloutService
from rollout.types import Float32
from rollout.versions import WeightManifest
from rollout.weight_inbox import manifest_from_plain, manifest_to_plain
from rollout.weight_store import Published, WeightStore

V, BUCKET, TIMEOUT_S, GRACE_S = 64, 4096, 2.0, 0.5
Weights = dict[str, torch.Tensor]
CANARY = CanaryText((9,), (1, 2, 3, 4))


@dataclass(frozen=True, slots=True)
class Case:
    """One row: what is done to whom, and what must name it."""

    plane: str  # gloo | store
    fault: str
    named_by: str  # the event's kind, or "error"
    ends: str  # "sent again" | "victim quarantined" | "old version kept" | "learner stopped"
    inject: Callable[[Scene], None] = lambda scene: None
    victim: Doom | None = None
    learner: Doom | None = None
    settings: dict[str, Any] = field(default_factory=dict)


# --- the scene --------------------------------------------------------------------------------------------------------


class Tampering:
    """Stands between a sender and its group; `alter(i, buffer)` sees each broadcast (0 is the prologue), once."""

    def __init__(self, group: Any, alter: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        self._group, self._alter, self._i = group, alter, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def broadcast(self, buffer: torch.Tensor) -> int:
        i, self._i = self._i, self._i + 1
        return int(self._group.broadcast(self._alter(i, buffer)))


class Scene:
    """One learner and two engines; faults reach in and change what the learner does next."""

    def __init__(self, case: Case, scratch: Path) -> None:
        self.case, self.version = case, 0
        self.store_dir = scratch / "store"
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.yields: Callable[[Weights], Weights] = lambda weights: weights
        self.before_publish: Callable[[], None] = lambda: None
        self.tamper: Callable[[int, torch.Tensor], torch.Tensor] | None = None
        self.canary_fails = False
        self.engines = {
            "healthy": LightProcess(V, None, **self._settings(scratch)),
            "victim": self._victim(scratch),
        }
        self.sync = self._sync(self._sender())

    def _settings(self, scratch: Path) -> dict[str, Any]:
        url = str(self.store_dir) if self.case.plane == "store" else ""
        return {"bucket_bytes": BUCKET, "timeout_s": TIMEOUT_S, "spool_dir": str(scratch), "store_url": url}

    def _victim(self, scratch: Path) -> Any:
        if not self.case.settings:
            return LightProcess(V, self.case.victim, **self._settings(scratch))
        return light_service(LightEngine(always(0, V), **{**self._settings(scratch), **self.case.settings}))

    def truth(self) -> Weights:
        """What the learner's optimizer holds: version v emits token v."""
        return always(self.version, V)

    def _sender(self) -> SenderPort:
        if self.case.learner is not None:
            return SenderProcess(self.case.plane, str(self.store_dir), self.case.learner)
        if self.case.plane == "store":
            return ThreadedSender(_Publisher(self))  # type: ignore[arg-type]
        return ThreadedSender(_Sender(self))

    def _sync(self, sender: SenderPort) -> WeightSync:
        async def wanted(version: int) -> list[Float32]:
            if self.canary_fails:
                raise ConnectionError("the learner is gone")
            return [score(self.truth(), CANARY.prompt_ids, CANARY.token_ids, 1.0)]

        plan = CanaryPlan((CANARY,), wanted, tolerance=0.01)
        sync = WeightSync(
            sender, lambda kind, **f: self.events.append((kind, f)), timeout_s=TIMEOUT_S, grace_s=GRACE_S, canary=plan
        )
        for name, engine in self.engines.items():
            sync.admit(name, engine)
        return sync

    async def ready(self) -> None:
        """Engines answer, so that no deadline of a case pays for a process that is still importing torch."""
        async with asyncio.timeout(120):
            for engine in self.engines.values():
                await engine.answer("ready", [1], SamplingParams(1, temperature=0.0), 1)
            if isinstance(self.sync.sender, SenderProcess):
                await self.sync.sender.close_group()

    async def push(self, version: int) -> None:
        self.version = version
        patience = 1.5 if self.case.learner else 6  # a learner that stops is its supervisor's affair, not the plane's
        await asyncio.wait_for(self.sync.push(version, grad_norm=1.0), patience * TIMEOUT_S)

    def next_learner(self) -> None:
        """The old one is dead; another starts from its checkpoint with the engines that are left."""
        self.case = Case(self.case.plane, "", "", "")
        self.yields, self.tamper, self.canary_fails = (lambda weights: weights), None, False
        self.truth = lambda: always(self.version, V)  # type: ignore[method-assign]
        self.sync = self._sync(self._sender())

    async def close(self) -> None:
        for engine in self.engines.values():
            await (engine.engine if isinstance(engine, RolloutService) else engine).close()
        sender = self.sync.sender
        if isinstance(sender, SenderProcess):
            await sender.remote.close()
        else:
            sender._sender.close()  # type: ignore[attr-defined]


class _Sender(WeightSender):
    """A WeightSender whose scene may lie to it."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(lambda: scene.yields(scene.truth()).items(), bucket_bytes=BUCKET, timeout_s=TIMEOUT_S)
        self._scene = scene

    def send(self, manifest: WeightManifest) -> Sent:
        alter, self._scene.tamper = self._scene.tamper, None  # once: the second sending is good
        if alter is not None:
            self._group = Tampering(self._group, alter)  # type: ignore[assignment]
        return super().send(manifest)


class _Publisher(WeightPublisher):
    """A WeightPublisher whose scene damages a file before anybody is told of it."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(lambda: scene.yields(scene.truth()).items(), _Damaged(scene))


class _Damaged(WeightStore):
    """A store in which a file breaks between its writing and its publication, once."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(str(scene.store_dir))
        self._scene = scene

    def _write_manifest(self, p: Published) -> None:
        damage, self._scene.before_publish = self._scene.before_publish, lambda: None
        damage()
        super()._write_manifest(p)


# --- a learner in its own process -------------------------------------------------------------------------------------


def _learner_child(connection: Connection, plane: str, url: str, doom: Doom) -> None:
    """Serves the steps of a sender whose version v emits token v. Steps: invite, enter, announce, send, bucket."""
    steps = Steps(doom)
    steps.watch_buckets()
    now = [0]

    def source() -> list[tuple[str, torch.Tensor]]:
        steps.reach("gather")
        return list(always(now[0], V).items())

    if plane == "store":
        sender: Any = WeightPublisher(source, WeightStore(url))
    else:
        sender = WeightSender(source, bucket_bytes=BUCKET, timeout_s=TIMEOUT_S)

    async def handle(op: str, a: dict[str, Any]) -> Any:
        steps.reach(op)
        if op == "invite":
            found = await asyncio.to_thread(sender.invite, a["members"])
            return {name: asdict(r) for name, r in found.items()}
        if op == "announce":
            now[0] = a["version"]
            return manifest_to_plain(await asyncio.to_thread(sender.announce, a["version"]))
        if op == "send":
            sent = await asyncio.to_thread(sender.send, manifest_from_plain(a))
            steps.reach("sent")
            return {**asdict(sent), "manifest": manifest_to_plain(sent.manifest)}
        return await asyncio.to_thread(getattr(sender, op))

    asyncio.run(serve(connection, handle))


class SenderProcess:
    """A learner's sender in its own process, as a SenderPort."""

    def __init__(self, plane: str, url: str, doom: Doom) -> None:
        self.remote = Remote(_learner_child, plane, url, doom)

    async def invite(self, members: Sequence[str]) -> dict[str, Rendezvous]:
        found = await self.remote.call("invite", {"members": list(members)})
        return {name: Rendezvous(**r) for name, r in found.items()}

    async def enter(self) -> None:
        await self.remote.call("enter")

    async def announce(self, version: int) -> WeightManifest:
        return manifest_from_plain(await self.remote.call("announce", {"version": version}))

    async def send(self, manifest: WeightManifest) -> Sent:
        found = await self.remote.call("send", manifest_to_plain(manifest))
        return Sent(**{**found, "manifest": manifest_from_plain(found["manifest"])})

    async def close_group(self) -> None:
        await self.remote.call("close_group")
