"""The Engine protocol on vLLM's `AsyncLLM`: generates in groups, takes new weights without losing a request.

    our event loop                                vLLM's engine process
    generate  -> one request, n samples        -> decodes in continuous batches
    stage     -> "stage", then poll "status"   -> a receiver thread fills the spool while decoding goes on
    commit    -> pause(keep)                   -> the running batch step ends, requests stay
                 load                          -> vLLM's update session: the proven bytes; mends tied heads
                 set the version, resume       -> tokens from here on carry the new version

The version is set between the load and the resume, so a token is always stamped with the weights that made it
(vLLM labels each step's output with the version that is set when the step ends, and no step runs in between).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rollout.engine import CommitReport, Completion, Rendezvous, SamplingParams
from rollout.errors import ConfigError, EngineError, WeightError
from rollout.pause import Pauses
from rollout.types import Float32, Int32
from rollout.versions import WeightManifest
from rollout.vllm_requests import check_room, completion, death_named, the_adapter, to_generate, to_score
from rollout.vllm_settings import VllmSettings, engine_arguments, refuse_what_no_plane_carries, vllm_environment
from rollout.weight_inbox import Receipt, manifest_to_plain, until

__all__ = ["VllmEngine", "VllmSettings", "engine_arguments", "vllm_engine", "vllm_environment"]

_POLL_S = 0.02


class VllmEngine:
    """`rollout.engine.Engine` on vLLM. One event loop owns it; `event` hears of expired pauses."""

    def __init__(self, settings: VllmSettings, event: Callable[..., None] | None = None) -> None:
        self.settings = settings
        self._event = event or (lambda kind, **fields: None)
        self._llm: Any = None
        self._adapter: Any = None  # what every request carries where only adapters travel
        self._version = settings.initial_version
        self._broken = ""  # why the weights are in no known state; "" while all is well
        self._stages: set[str] = set()
        self._counts = {"requests": 0, "tokens": 0, "commits": 0}
        self._last_commit = CommitReport(settings.initial_version, 0.0, 0.0)
        self._pauses = Pauses(self._pause, self._resume, self._event)
        self._lock = asyncio.Lock()  # one weight operation at a time

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Spawn vLLM and wait until it answers. Raises ConfigError for a directory without a model."""
        if not (Path(self.settings.model_dir) / "config.json").is_file():
            raise ConfigError(
                f"model.path: {self.settings.model_dir!r} has no config.json; name a Hugging Face model directory"
            )
        refuse_what_no_plane_carries(self.settings)
        for key, value in vllm_environment(self.settings.threads).items():
            os.environ.setdefault(key, value)
        os.environ["OMP_NUM_THREADS"] = str(self.settings.threads)
        if self.settings.cores is not None:
            os.sched_setaffinity(0, self.settings.cores)
        self._llm = await asyncio.to_thread(self._build)
        if self.settings.adapter_rank:
            (await self._call("open", {})).raise_if_failed()
            self._adapter = the_adapter()
        if self.settings.truncates:
            await self._llm.collective_rpc("headrace_record_before_the_cut")

    def _build(self) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(self.settings)))

    async def close(self) -> None:
        """Stop vLLM's processes. Idempotent."""
        await self._pauses.close()
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)
            llm.shutdown = lambda: None  # its destructor shuts down once more, which fails when Python itself is ending

    # --- generation ---------------------------------------------------------------------------------------------------

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int] | Int32, sampling: SamplingParams, n: int
    ) -> list[Completion]:
        """n answers to one prompt, started together (they share the prompt's KV)."""
        ids = [int(t) for t in prompt_ids]
        check_room(len(ids), sampling.max_tokens, self.settings.max_model_len)
        if sampling.truncates and not self.settings.truncates:
            raise ConfigError(
                f"top_p {sampling.top_p} / top_k {sampling.top_k}: this engine records log-probs after the cut, which "
                "no learner can use; start it with truncates=True"
            )
        output = await self._final(request_id, ids, to_generate(sampling, n))
        answers = [completion(o, self.settings.initial_version) for o in sorted(output.outputs, key=lambda o: o.index)]
        self._counts["requests"] += n
        self._counts["tokens"] += sum(len(a.token_ids) for a in answers)
        return answers

    async def score(self, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float) -> Float32:
        """Log-probs float32[L] of `token_ids` under the present weights; only at temperature 1."""
        parameters = to_score(temperature)
        prompt, tokens = [int(t) for t in prompt_ids], [int(t) for t in token_ids]
        check_room(len(prompt) + len(tokens), 1, self.settings.max_model_len)
        output = await self._final(f"score-{time.monotonic_ns()}", prompt + tokens, parameters)
        rows = output.prompt_logprobs[len(prompt) :]
        return np.array([row[t].logprob for row, t in zip(rows, tokens, strict=True)], dtype=np.float32)

    async def _final(self, request_id: str, ids: list[int], parameters: Any) -> Any:
        """The last output of one request; EngineError if vLLM died under it."""
        from vllm.inputs.engine import tokens_input

        await self._pauses.over()  # weights may change in a pause: what comes meanwhile starts under the new version
        # with "salt", KV of one version is never the prefix of a request that starts under another
        salt = f"v{self._version}" if self.settings.kv_policy == "salt" else None
        prompt = tokens_input(ids, cache_salt=salt)
        llm, final = self._running(), None
        with death_named(f"request {request_id}"):
            async for output in llm.generate(prompt, parameters, request_id, lora_request=self._adapter):
                final = output
        if final is None:
            raise EngineError(f"vLLM ended request {request_id} without an output; restart the engine")
        return final

    def _running(self) -> Any:
        if self._llm is None:
            raise EngineError("the engine is not running; start it first")
        if self._broken:
            raise EngineError(f"the engine serves nothing: {self._broken}; commit a version or replace it")
        return self._llm

    # --- weights ------------------------------------------------------------------------------------------------------

    async def join(self, rendezvous: Rendezvous) -> None:
        if self.settings.plane == "store":  # nothing to meet for: versions are pulled
            return
        async with self._lock:
            await self._call("join", asdict(rendezvous))
            await self._until("joined", rendezvous.timeout_s)

    async def stage_weights(self, manifest: WeightManifest) -> float:
        return (await self.stage(manifest)).seconds

    async def stage(self, manifest: WeightManifest) -> Receipt:
        """As `stage_weights`, with the root digest of what was received."""
        async with self._lock:
            plain = manifest_to_plain(manifest)
            if self.settings.plane == "store":
                pull = {"url": self.settings.store_url, "manifest": plain, "timeout_s": self.settings.timeout_s}
                (await self._call("fetch", pull)).raise_if_failed()
            else:
                (await self._call("stage", plain)).raise_if_failed()
            return await self._until("staged", self.settings.timeout_s)

    async def discard_weights(self) -> None:
        await self._call("discard", {})

    async def commit_weights(self, version: int, digest: str = "") -> CommitReport:
        """Load what is staged in a short pause. With `digest`, refuse anything but the version of that root digest.

        Refused before the pause: the engine serves on what it had. Failed inside it: the weights are in no known
        state, requests in flight are aborted, and nothing is served until a commit succeeds.
        """
        async with self._lock:
            ready = await self._call("status", {})
            if ready.state != "staged" or ready.version != version:
                raise WeightError(f"cannot commit version {version}: the engine is {ready.state} ({ready.version})")
            if digest and ready.root != digest:
                await self._call("discard", {})
                raise WeightError(f"version {version} was staged as {ready.root}, the learner sent {digest}; refused")
            return await self._commit(version)

    async def _commit(self, version: int) -> CommitReport:
        llm = self._llm
        token = await self._pauses.hold(f"commit of version {version}", ttl_s=2 * self.settings.timeout_s)
        started = time.monotonic()  # the step under way has ended: from here on generation stands still
        try:
            with death_named(f"the commit of version {version}"):
                async with asyncio.timeout(self.settings.timeout_s):
                    load_s = await self._load(llm, version)
        except EngineError:
            raise
        except Exception as error:
            self._broken = f"loading version {version} failed ({type(error).__name__}: {error})"
            await llm.abort([r for r in list(llm.output_processor.request_states)], internal=True)
            raise WeightError(self._broken) from error
        finally:
            await self._pauses.release(token)
        self._version, self._broken = version, ""
        self._counts["commits"] += 1
        self._last_commit = CommitReport(version, time.monotonic() - started, load_s)
        return self._last_commit

    async def _load(self, llm: Any, version: int) -> float:
        seconds = await llm.collective_rpc("headrace_load", args=(version, self.settings.mend))
        await llm.update_weight_version(str(version))  # still paused: no token between the weights and their name
        return float(max(seconds))

    async def _pause(self) -> None:
        with death_named("a pause"):
            # vLLM's pause_generation sleeps 20 ms for the looks of it; its own scheduler call is the pause itself
            clear = self.settings.kv_policy == "recompute"
            await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear)

    async def _resume(self) -> None:
        if self._llm is not None and not self._llm.errored:
            await self._llm.resume_generation()

    async def pause(self, holder: str, ttl_s: float) -> int:
        """Stand still for at most `ttl_s`; requests stay. Returns the token for `resume`."""
        return await self._pauses.hold(holder, ttl_s)

    async def resume(self, token: int) -> bool:
        """False if the pause had ended by itself."""
        return await self._pauses.release(token)

    async def _call(self, what: str, args: Mapping[str, Any]) -> Receipt:
        """One RPC to every worker; the first failure speaks for all, and they must agree on what they hold."""
        if self._llm is None:
            raise EngineError("the engine is not running; start it first")
        try:
            with death_named(f"weight call {what!r}"):
                async with asyncio.timeout(self.settings.timeout_s):
                    answers = await self._llm.collective_rpc("headrace_weights", args=(what, dict(args)))
        except TimeoutError as error:
            raise EngineError(f"vLLM's engine process did not answer {what!r}; restart the engine") from error
        receipts = [Receipt(**a) for a in answers]
        failed = [r for r in receipts if r.state == "failed"]
        behind = [r for r in receipts if r.state != receipts[0].state]
        return failed[0] if failed else min(behind + receipts[:1], key=lambda r: r.state in ("joined", "staged"))

    async def _until(self, state: str, timeout_s: float) -> Receipt:
        return await until(state, timeout_s, lambda: self._call("status", {}), _POLL_S)

    async def adapters(self) -> list[int]:
        """Numbers of the adapters that vLLM holds: [1] where only adapters travel, however many versions came."""
        return sorted(await self._running().list_loras()) if self.settings.adapter_rank else []

    # --- what others may know -----------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._version

    def gauges(self) -> dict[str, float]:
        return {
            "engine_version": float(self._version),
            "engine_requests": float(self._counts["requests"]),
            "engine_tokens": float(self._counts["tokens"]),
            "engine_commits": float(self._counts["commits"]),
            "engine_stall_s": self._last_commit.stall_s,
            "engine_load_s": self._last_commit.load_s,
            "engine_broken": float(bool(self._broken)),
            "engine_paused": float(len(self._pauses.holders)),
        }


def vllm_engine(settings: VllmSettings, event: Callable[..., None] | None = None) -> VllmEngine:
    """The engine for `settings.plane`."""
    if settings.plane == "nccl":
        from rollout.vllm_nccl import NcclEngine

        return NcclEngine(settings, event)
    if settings.plane == "ipc":
        from rollout.vllm_ipc import IpcEngine

        return IpcEngine(settings, event)
    return VllmEngine(settings, event)
