"""Engines into whose layers weights come directly, while generation stands still: what NCCL and IPC have in common.

    step            what it does                                                               generation
    join            the workers enter the epoch's group                                        goes on
    stage_weights   pause, begin vLLM's update session, receive and load, take the sums        stands still
    commit_weights  the sums are the learner's: finish, stamp the version, go on               goes on afterwards
    discard         what was received is forgotten, what it was written over is lost           stands still

There is no place to stage a version, so the stall is the transfer and the load. What is loaded is summed on the device
(`vllm_summing`); weights whose sums are not the learner's never make a token: the pause stays until the next attempt,
requests live through it, and if none comes in time everything in flight is aborted before the engine goes on, serving
nothing (`_resume`).
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Awaitable
from typing import Any, TypeVar

from rollout.engine import CommitReport, Rendezvous
from rollout.errors import EngineError, HeadraceError, WeightError
from rollout.versions import WeightManifest
from rollout.vllm_engine import VllmEngine
from rollout.vllm_requests import death_named
from rollout.weight_inbox import Receipt
from rollout.weight_stream import root_digest, sealed

T = TypeVar("T")


class InPlaceEngine(VllmEngine):
    """`VllmEngine` whose weights are received by vLLM's own engine. Same protocol."""

    _staged: WeightManifest | None = None
    _pause_token: int | None = None
    _paused_at = 0.0

    @abstractmethod
    async def _enter(self, rendezvous: Rendezvous) -> None:
        """Enter the epoch's group."""

    async def _awaited(self, manifest: WeightManifest) -> None:
        """Wait for the learner to begin, while generation goes on (where the plane can tell)."""

    @abstractmethod
    async def _receive(self, manifest: WeightManifest) -> None:
        """Have the workers receive and load every tensor of the manifest."""

    async def join(self, rendezvous: Rendezvous) -> None:
        async with self._lock:
            await self._ask(f"entering weight group epoch {rendezvous.epoch}", self._enter(rendezvous))

    async def stage(self, manifest: WeightManifest) -> Receipt:
        async with self._lock:
            self._staged = None
            await self._awaited(manifest)
            await self._stand_still(manifest.version)
            started = time.monotonic()
            self._broken = f"version {manifest.version} is half loaded"  # true until a commit says otherwise
            await self._ask("the begin of an update", self._llm.collective_rpc("headrace_begin"))
            await self._receive(manifest)
            answers: list[dict[str, str]] = await self._workers("sums")
            if any(a != answers[0] for a in answers) or set(answers[0]) != {t.name for t in manifest.tensors}:
                raise WeightError(f"version {manifest.version}: the workers did not receive the same tensors")
            self._staged = sealed(manifest, [answers[0][t.name] for t in manifest.tensors])
            seconds = time.monotonic() - started
            return Receipt("staged", -1, manifest.version, root_digest(self._staged), seconds)

    async def _stand_still(self, version: int) -> None:
        """Pause, or stay paused since an attempt before, for the time of an update."""
        before = self._pause_token
        token = await self._pauses.hold(f"update to version {version}", 2 * self.settings.timeout_s)
        if before is None or not await self._pauses.release(before):
            self._paused_at = time.monotonic()
        self._pause_token = token

    async def commit_weights(self, version: int, digest: str = "") -> CommitReport:
        async with self._lock:
            staged, self._staged = self._staged, None
            if staged is None or staged.version != version:
                raise WeightError(f"cannot commit version {version}: it is not what was received last")
            root = root_digest(staged)
            if digest and root != digest:
                raise WeightError(f"version {version} was received as {root}, the learner sent {digest}; refused")
            started = time.monotonic()
            await self._ask(f"the commit of version {version}", self._llm.finish_weight_update(str(version)))
            self._version, self._broken = version, ""
            await self._end_pause()  # one that has expired has left nothing in flight: these weights are whole
            self._counts["commits"] += 1
            ended = time.monotonic()
            self._last_commit = CommitReport(version, ended - self._paused_at, ended - started)
            return self._last_commit

    async def _end_pause(self) -> None:
        token, self._pause_token = self._pause_token, None
        if token is not None:
            await self._pauses.release(token)

    async def discard_weights(self) -> None:
        """Nothing of it will be committed. Where the old weights are lost, generation stands until the next attempt."""
        self._staged = None
        if not self._broken:
            await self._end_pause()

    async def _resume(self) -> None:
        if self._broken and self._llm is not None and not self._llm.errored:
            await self._llm.abort(list(self._llm.output_processor.request_states), internal=True)
        await super()._resume()

    async def _workers(self, what: str) -> list[dict[str, str]]:
        """What each worker answers to a weight call."""
        answers = await self._ask(what, self._llm.collective_rpc("headrace_weights", args=(what, {})))
        for answer in answers:
            if answer.get("state") == "failed":
                raise WeightError(answer["message"])
        return answers

    async def _ask(self, what: str, call: Awaitable[T]) -> T:
        """vLLM's answer within the deadline. EngineError if it is dead or silent, and for what it raises."""
        try:
            with death_named(what):
                async with asyncio.timeout(self.settings.timeout_s):
                    return await call
        except TimeoutError as error:
            raise EngineError(f"vLLM's engine process did not end {what} in time; restart the engine") from error
        except HeadraceError:
            raise
        except Exception as error:
            raise EngineError(f"{what} failed ({type(error).__name__}: {error}); restart the engine") from error

    def _update(self, manifest: WeightManifest, start: int = 0, stop: int | None = None, **more: Any) -> Any:
        """What vLLM's engines are told of tensors [start, stop) of a version."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        tensors = manifest.tensors[start:stop]
        update = {
            "names": [t.name for t in tensors],
            "dtype_names": [t.dtype for t in tensors],
            "shapes": [list(t.shape) for t in tensors],
        }
        return WeightTransferUpdateRequest(update_info=update | more)
