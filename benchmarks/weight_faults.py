"""What happens when something fails in the weight plane: every fault, on light engines in processes of their own.

    headrace bench weight_faults --json faults.json

Two engines, "healthy" and "victim", generate all the time with weights under which every token is the version that
made it. Version 1 arrives well; then the fault strikes version 2. A case holds if

    nobody served a token by anything but proven weights,
    the fault was named in an event or by an error,
    within the deadline the healthy engine serves version 2 (sent again), or, if the learner itself is at fault or dead,
    everybody still serves version 1 and the next learner's version 3 arrives.

`tests/actors/test_weight_faults.py` runs all of it and holds the table in docs/weights.md against what it saw.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from actors.weight_sync import CanaryPlan, SenderPort, ThreadedSender, WeightSync
from learner.weight_publisher import WeightPublisher
from learner.weight_sender import Sent, WeightSender
from rollout.canary import CanaryText
from rollout.engine import Rendezvous, SamplingParams
from rollout.errors import HeadraceError
from rollout.light_engine import DOWN, HEAD, UP, LightEngine, adapter, always, score
from rollout.light_process import Doom, LightProcess, Remote, Steps, serve
from rollout.types import Float32
from rollout.versions import VersionSpan, WeightManifest
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
    ends: str  # "sent again" | "victim quarantined" | "old version kept"
    inject: Callable[[Scene], None] = lambda scene: None
    victim: Doom | None = None
    learner: Doom | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of one case; `wrong` says why it does not hold, "" if it does."""

    plane: str
    fault: str
    named: str
    ended: str
    seconds: float
    wrong: str


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
        return LightEngine(always(0, V), **{**self._settings(scratch), **self.case.settings})

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
        async def wanted() -> list[Float32]:
            return [score(self.truth(), CANARY.prompt_ids, CANARY.token_ids, 1.0)]

        plan = CanaryPlan((CANARY,), wanted, tolerance=0.01)
        sync = WeightSync(
            sender, lambda kind, **f: self.events.append((kind, f)), timeout_s=TIMEOUT_S, grace_s=GRACE_S, canary=plan
        )
        for name, engine in self.engines.items():
            sync.admit(name, engine)
        return sync

    async def push(self, version: int) -> None:
        self.version = version
        patience = 1.5 if self.case.learner else 6  # a learner that stops is its supervisor's affair, not the plane's
        await asyncio.wait_for(self.sync.push(version, grad_norm=1.0), patience * TIMEOUT_S)

    def next_learner(self) -> None:
        """The old one is dead; another starts from its checkpoint with the engines that are left."""
        self.case = Case(self.case.plane, "", "", "")
        self.sync = self._sync(self._sender())

    async def close(self) -> None:
        await asyncio.gather(*(e.close() for e in self.engines.values()))
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


# --- the faults -------------------------------------------------------------------------------------------------------


def on_wire(alter: Callable[[int, torch.Tensor], torch.Tensor]) -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        scene.tamper = alter

    return inject


def flip(i: int, buffer: torch.Tensor) -> torch.Tensor:
    if i == 2:
        buffer = buffer.clone()
        buffer[100] ^= 8
    return buffer


def scribble(i: int, buffer: torch.Tensor) -> torch.Tensor:
    return buffer.fill_(7) if i == 2 else buffer  # the sender refills its bucket while it is still on the way


def repeat_bucket() -> Callable[[int, torch.Tensor], torch.Tensor]:
    seen: dict[int, torch.Tensor] = {}

    def alter(i: int, buffer: torch.Tensor) -> torch.Tensor:
        seen[i] = buffer.clone()
        return seen[1] if i == 2 and len(seen[1]) == len(buffer) else buffer

    return alter


def old_prologue(i: int, buffer: torch.Tensor) -> torch.Tensor:
    if i == 0:
        buffer = buffer.clone()
        buffer[2] -= 1
    return buffer


def source(change: Callable[[Weights], Weights]) -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        scene.yields = change

    return inject


def stale(scene: Scene) -> None:
    """The optimizer stepped, but what is sent is the version before."""
    scene.yields = lambda weights: always(scene.version - 1, V)


def forgotten_adapter(scene: Scene) -> None:
    """The learner trains base + adapter and sends the base: its bytes never change."""
    base = always(1, V)
    scene.truth = lambda: {**base, **adapter(scene.version, V)}  # type: ignore[method-assign]
    scene.yields = lambda weights: base


def in_store(pattern: str, damage: Callable[[Path], None]) -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        scene.before_publish = lambda: [damage(p) for p in scene.store_dir.glob(pattern)] and None

    return inject


def flip_file(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def older_file(path: Path) -> None:
    (old,) = path.parent.glob("v00000001.anchor*")
    path.write_bytes(old.read_bytes())


def scaled(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 1.001


def transposed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.T if name == HEAD else tensor


AGAIN, OUT, KEPT = "sent again", "victim quarantined", "old version kept, next learner served"
ALARM = "learner stopped"


def cases() -> list[Case]:
    """All rows, in the order of the table."""
    rows = [
        Case("gloo", "bit flip in a bucket", "weights_refused", AGAIN, on_wire(flip)),
        Case(
            "gloo",
            "truncated bucket",
            "weights_interrupted|weights_refused",
            AGAIN,
            on_wire(lambda i, b: b[: len(b) // 2] if i == 2 else b),
        ),
        Case("gloo", "bucket sent twice, next one lost", "weights_refused", AGAIN, on_wire(repeat_bucket())),
        Case("gloo", "buffer reused before it was sent", "weights_refused", AGAIN, on_wire(scribble)),
        Case("gloo", "stale version in the stream", "weights_refused", AGAIN, on_wire(old_prologue)),
        Case("store", "bit flip in a file", "weights_refused", AGAIN, in_store("v00000002.*tensors", flip_file)),
        Case(
            "store",
            "truncated file",
            "weights_refused",
            AGAIN,
            in_store("v00000002.*tensors", lambda p: p.write_bytes(p.read_bytes()[:-9]) and None),
        ),
        Case("store", "file gone", "weights_refused", AGAIN, in_store("v00000002.*tensors", Path.unlink)),
        Case(
            "store",
            "stale file under the new name",
            "weights_refused",
            AGAIN,
            in_store("v00000002.*tensors", older_file),
        ),
    ]
    for plane in ("gloo", "store"):
        rows += [
            Case(plane, "missing tensor", "error", KEPT, source(lambda w: {})),
            Case(
                plane,
                "unannounced tensor (base beside the adapter)",
                "error",
                KEPT,
                source(lambda w: {**w, UP: torch.zeros(V, 4)}),
            ),
            Case(plane, "wrong dtype", "error", KEPT, source(lambda w: {HEAD: w[HEAD].bfloat16()})),
            Case(plane, "stale weights", "weights_unchanged", ALARM, stale),
            Case(plane, "forgotten adapter", "canary_alarm", ALARM, forgotten_adapter),
            Case(plane, "base sent instead of the adapter", "weights_refused", OUT, settings={"takes": [UP, DOWN]}),
            Case(plane, "weights loaded transposed", "canary_alarm", OUT, settings={"on_load": transposed}),
            Case(plane, "weights loaded with a scale of 0.1 %", "canary_alarm", OUT, settings={"on_load": scaled}),
        ]
        steps = (
            ["join", "stage", "bucket", "commit", "committed"] if plane == "gloo" else ["stage", "commit", "committed"]
        )
        for signalled, word in ((signal.SIGKILL, "killed"), (signal.SIGSTOP, "stopped")):
            for step in steps:
                nth = {"join": 1, "bucket": 8}.get(step, 2)
                named = "engine_quarantined"
                rows.append(Case(plane, f"engine {word} at {step}", named, OUT, victim=Doom(step, nth, signalled)))
            learner = (
                ["enter", "announce", "send", "bucket", "sent"] if plane == "gloo" else ["announce", "gather", "sent"]
            )
            for step in learner:
                nth = {"enter": 1, "bucket": 8, "gather": 3}.get(step, 2)
                rows.append(Case(plane, f"learner {word} at {step}", "error", KEPT, learner=Doom(step, nth, signalled)))
    return rows


# --- running one ------------------------------------------------------------------------------------------------------


class Watcher:
    """Generates on an engine all the time; remembers the first token that no proven weights made."""

    def __init__(self, name: str, engine: Any, allowed: Callable[[VersionSpan, int], bool]) -> None:
        self._name, self._engine, self._allowed = name, engine, allowed
        self.wrong, self.tokens, self.newest = "", 0, -1
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        k = 0
        while True:
            k += 1
            (answer,) = await self._engine.generate(f"w{k}", [1], SamplingParams(8, temperature=0.0), 1)
            for span in answer.versions:
                for token in answer.token_ids[span.start : span.end].tolist():
                    if not self._allowed(span, token):
                        self.wrong = self.wrong or f"{self._name} emitted {token} as version {span.version}"
                self.newest = span.version
            self.tokens += len(answer.token_ids)
            await asyncio.sleep(0.005)

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def run_case(case: Case) -> Seen:
    """Version 1 well, the fault in version 2, and what is served afterwards."""
    with tempfile.TemporaryDirectory() as scratch:
        scene = Scene(case, Path(scratch))
        watcher = Watcher("healthy", scene.engines["healthy"], lambda span, token: token == span.version % V)
        try:
            return await _play(case, scene, watcher)
        finally:
            await watcher.end()
            await scene.close()


async def _play(case: Case, scene: Scene, watcher: Watcher) -> Seen:
    started, errors = time.monotonic(), []
    early = (case.victim or case.learner or Doom("")).step in ("join", "enter")
    if not early and "takes" not in case.settings and "on_load" not in case.settings:
        await scene.push(1)
    case.inject(scene)
    began = time.monotonic()
    try:
        await scene.push(2)
    except Exception as error:  # noqa: BLE001 - whatever ends a push is the row's answer
        errors.append(f"{type(error).__name__}: {error}")
    seconds = time.monotonic() - began
    ended = _ending(scene, errors)
    if ended == KEPT:
        scene.next_learner()
        scene.yields, scene.tamper = (lambda weights: weights), None
        await scene.push(3)
    await _served(watcher, 3 if ended == KEPT else 2, alarmed=ended == ALARM)
    named = _named(case, scene, errors)
    wrong = watcher.wrong if ended != ALARM else ""
    wrong = wrong or ("" if named else f"not named: {[k for k, _ in scene.events]} {errors}")
    wrong = wrong or ("" if ended == case.ends else f"ended with {ended!r}, expected {case.ends!r}")
    assert watcher.tokens > 0 and started
    return Seen(case.plane, case.fault, named or "-", ended, round(seconds, 2), wrong)


def _ending(scene: Scene, errors: list[str]) -> str:
    kinds = [k for k, _ in scene.events]
    if kinds.count("canary_alarm") == len(scene.engines):
        return ALARM  # every engine disagrees with the learner: it is the learner that is wrong
    if errors:
        return KEPT
    return OUT if "engine_quarantined" in kinds else AGAIN


def _named(case: Case, scene: Scene, errors: list[str]) -> str:
    if case.named_by == "error":
        return errors[0].split(":")[0] if errors else ""
    kinds = {k for k, _ in scene.events}
    return next((k for k in case.named_by.split("|") if k in kinds), "")


async def _served(watcher: Watcher, version: int, alarmed: bool) -> None:
    """Wait until the healthy engine emits `version`; TimeoutError if it does not within the deadline."""
    async with asyncio.timeout(3 * TIMEOUT_S):
        while watcher.newest != version and not alarmed:  # noqa: ASYNC110 - what we wait for is in another process
            await asyncio.sleep(0.01)


def table(seen: Sequence[Seen]) -> str:
    """The table of docs/weights.md: no timings, so that it is the same on every machine."""
    lines = ["| plane | fault | named by | ends with |", "|---|---|---|---|"]
    lines += [f"| {s.plane} | {s.fault} | {s.named} | {s.ended} |" for s in seen]
    return "\n".join(lines)


async def run_all(chosen: Sequence[Case], tell: Callable[[str], None] = lambda line: None) -> list[Seen]:
    seen = []
    for case in chosen:
        started = time.monotonic()
        try:
            seen.append(await run_case(case))
        except (HeadraceError, TimeoutError, ConnectionError) as error:
            wrong = f"{type(error).__name__}: {error}"
            seen.append(Seen(case.plane, case.fault, "-", "not at all", round(time.monotonic() - started, 2), wrong))
        s = seen[-1]
        tell(f"{time.monotonic() - started:5.1f} s  {s.plane:5}  {s.fault}: {s.named}, {s.ended}  {s.wrong}")
    return seen


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace bench weight_faults", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write one JSON object to this file")
    parser.add_argument("--only", default="", help="run the rows whose name contains this")
    args = parser.parse_args(argv)
    chosen = [c for c in cases() if args.only in f"{c.plane} {c.fault}"]
    seen = asyncio.run(run_all(chosen, lambda line: print(line, flush=True)))
    print(table(seen))
    if args.json:
        args.json.write_text(json.dumps({"faults": [asdict(s) for s in seen], "held": not any(s.wrong for s in seen)}))
    return 1 if any(s.wrong for s in seen) else 0


if __name__ == "__main__":
    raise SystemExit(main())
