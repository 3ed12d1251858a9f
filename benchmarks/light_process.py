"""Light engines in processes of their own, to be killed and stopped at a chosen step.

    parent                                      child
    LightProcess (an EnginePort)   -- JSON -->  RolloutService around a LightEngine
    any other port over a Remote   -- JSON -->  whatever its target serves

Children come from a fork server that has torch imported, so that one costs milliseconds. A `Doom` sends the child a
signal when it gets to a step for the n-th time: SIGKILL is a crash, SIGSTOP a machine that hangs.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import multiprocessing as mp
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.engine import CommitReport, Completion, Rendezvous, SamplingParams
from rollout.errors import DeadlineError, HeadraceError, WeightError
from rollout.service import RolloutService
from rollout.types import Float32, Status
from rollout.versions import VersionSpan, WeightManifest
from rollout.weight_inbox import manifest_from_plain, manifest_to_plain

if TYPE_CHECKING:
    from benchmarks.light_engine import LightEngine

_SPAWN = mp.get_context("forkserver")
_SPAWN.set_forkserver_preload(["benchmarks.light_engine", "rollout.weight_store"])
HOLD_S = 60.0  # beyond every case: what waits for a confirmation that never comes must not get out, ever
Handler = Callable[[str, dict[str, Any]], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Doom:
    """`Doom("bucket", 3, signal.SIGKILL)`: die when the third bucket is about to move.

    steps of an engine: join, stage, bucket, commit, committed, score, confirm
    """

    step: str
    nth: int = 1
    signal: int = signal.SIGKILL


class Steps:
    """Counts steps in the child and carries out its doom."""

    def __init__(self, doom: Doom | None) -> None:
        self._doom, self._seen = doom, 0

    def reach(self, step: str) -> None:
        if self._doom is not None and step == self._doom.step:
            self._seen += 1
            if self._seen == self._doom.nth:
                os.kill(os.getpid(), self._doom.signal)

    def watch_buckets(self) -> None:
        from rollout.weight_group import GlooGroup

        broadcast = GlooGroup.broadcast

        def watched(group: GlooGroup, buffer: Any) -> int:
            self.reach("bucket")
            return broadcast(group, buffer)

        GlooGroup.broadcast = watched  # type: ignore[method-assign, assignment]


# --- the wire between parent and child --------------------------------------------------------------------------------


class Remote:
    """The parent's end: `await call(op, args)`; ConnectionError once the child is gone."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self._connection, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        atexit.register(self.process.kill)  # a stopped child would not hear the polite end that daemons get
        theirs.close()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._serial = 0
        self._gone = False
        asyncio.get_running_loop().add_reader(self._connection.fileno(), self._read)

    async def call(self, op: str, args: dict[str, Any] | None = None) -> Any:
        if self._gone:
            raise ConnectionError(f"process {self.process.pid} is gone")
        self._serial += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[self._serial] = future
        self._connection.send_bytes(json.dumps([self._serial, op, args or {}]).encode())
        return await future

    def _read(self) -> None:
        try:
            serial, result, error = json.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._end()
            return
        future = self._waiting.pop(serial)
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            kind, message = error
            future.set_exception(DeadlineError(message, 0.0) if kind == "DeadlineError" else WeightError(message))

    def _end(self) -> None:
        self._gone = True
        asyncio.get_running_loop().remove_reader(self._connection.fileno())
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionError(f"process {self.process.pid} died"))
        self._waiting.clear()

    async def close(self) -> None:
        """Kill the child, whatever state it is in."""
        if not self._gone:
            self._end()
        atexit.unregister(self.process.kill)
        self.process.kill()
        await asyncio.to_thread(self.process.join, 10)
        self._connection.close()


async def serve(connection: Connection, handle: Handler) -> None:
    """The child's end: answers every request, several at a time, until the parent is gone."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def answer(serial: int, op: str, args: dict[str, Any]) -> None:
        try:
            reply = [serial, await handle(op, args), None]
        except HeadraceError as error:
            reply = [serial, None, [type(error).__name__, str(error)]]
        connection.send_bytes(json.dumps(reply).encode())

    def read() -> None:
        try:
            request = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            ended.set()
            return
        task = loop.create_task(answer(*request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_reader(connection.fileno(), read)
    await ended.wait()
    os._exit(0)  # the parent is gone; nothing of ours is worth a clean end


# --- an engine --------------------------------------------------------------------------------------------------------


def _engine_child(connection: Connection, vocab: int, settings: dict[str, Any], doom: Doom | None) -> None:
    from benchmarks.light_engine import LightEngine, always

    steps = Steps(doom)
    steps.watch_buckets()

    async def child() -> None:
        engine = light_service(LightEngine(always(0, vocab), **settings))

        async def handle(op: str, a: dict[str, Any]) -> Any:
            steps.reach(op)
            if op == "join":
                return await engine.join(Rendezvous(**a))
            if op == "stage":
                return await engine.stage_weights(manifest_from_plain(a))
            if op == "commit":
                report = await engine.commit_weights(a["version"], a["digest"])
                steps.reach("committed")
                return asdict(report)
            if op == "confirm":
                return await engine.confirm_weights(a["version"])
            if op == "condemn":
                return await engine.condemn(a["reason"])
            if op == "discard":
                return await engine.discard_weights()
            if op == "score":
                return (await engine.score(a["prompt"], a["tokens"], 1.0)).tolist()
            answers = await engine.answer(a["id"], a["prompt"], SamplingParams(**a["sampling"]), a["n"])
            return [[c.token_ids.tolist(), c.logprobs.tolist(), [asdict(s) for s in c.versions]] for c in answers]

        await serve(connection, handle)

    asyncio.run(child())


def light_service(engine: LightEngine) -> RolloutService:
    """A light engine with what stands around every engine: answers leave it only once their weights are confirmed."""
    return RolloutService(engine, SamplingParams(8), group_size=1, max_in_flight=4, hold_s=HOLD_S)


class LightProcess:
    """A light engine and its service in a process of their own, as an EnginePort."""

    def __init__(self, vocab: int = 64, doom: Doom | None = None, **settings: Any) -> None:
        self.remote = Remote(_engine_child, vocab, settings, doom)

    async def join(self, rendezvous: Rendezvous) -> None:
        await self.remote.call("join", asdict(rendezvous))

    async def stage_weights(self, manifest: WeightManifest) -> float:
        return float(await self.remote.call("stage", manifest_to_plain(manifest)))

    async def commit_weights(self, version: int, digest: str = "") -> CommitReport:
        return CommitReport(**await self.remote.call("commit", {"version": version, "digest": digest}))

    async def confirm_weights(self, version: int) -> None:
        await self.remote.call("confirm", {"version": version})

    async def condemn(self, reason: str) -> None:
        await self.remote.call("condemn", {"reason": reason})

    async def discard_weights(self) -> None:
        await self.remote.call("discard")

    async def score(self, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float) -> Float32:
        asked = {"prompt": list(prompt_ids), "tokens": list(token_ids)}
        return np.array(await self.remote.call("score", asked), np.float32)

    async def answer(
        self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingParams, n: int
    ) -> list[Completion]:
        asked = {"id": request_id, "prompt": list(prompt_ids), "sampling": asdict(sampling), "n": n}
        return [
            Completion(
                np.array(tokens, np.int32),
                np.array(logprobs, np.float32),
                tuple(VersionSpan(**s) for s in spans),
                Status.TRUNCATED,
                "",
            )
            for tokens, logprobs, spans in await self.remote.call("answer", asked)
        ]

    async def close(self) -> None:
        await self.remote.close()
