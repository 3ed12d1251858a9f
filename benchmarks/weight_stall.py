"""How long does generation stand still for a new version? Our commit against vLLM's bare reload, taking turns.

bare   vLLM's layerwise reload from memory, generation standing still: what nobody can do without
ours   the stall of a commit during generation: pause, reload from the spool, mend, stamp the version, resume
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from learner.weight_sender import WeightSender
from rollout.engine import SamplingParams
from rollout.vllm_weights import WeightCalls

Weights = dict[str, torch.Tensor]


class BareCalls(WeightCalls):
    """The worker's calls, and vLLM's reload as it is: from memory, without spool, mend or version."""

    model_runner: Any
    model_config: Any
    vllm_config: Any

    def headrace_bare_load(self) -> float:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        from rollout.weight_stream import views

        staged = self.weight_transfer_engine.inbox.spool.serving
        tensors = [(n, t.clone()) for n, t in views(staged.manifest, staged.bytes())]
        model = self.model_runner.get_model()
        started = time.perf_counter()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights(iter(tensors))
            finalize_layerwise_reload(model, self.model_config)
        return time.perf_counter() - started


async def bare_load(engine: Any) -> float:
    token = await engine.pause("bench", ttl_s=60)
    (seconds,) = await engine._llm.collective_rpc("headrace_bare_load")
    await engine.resume(token)
    return float(seconds)


async def stall(model: Path, weights: Weights, repeats: int, scratch: str, bucket: int) -> dict[str, float]:
    """Medians over `repeats` updates while 16 requests are always in flight; one before them only warms up."""
    from rollout import vllm_weights
    from rollout.vllm_engine import VllmEngine, VllmSettings

    vllm_weights.WORKER_EXTENSION = "benchmarks.weight_stall.BareCalls"
    started = time.perf_counter()
    settings = VllmSettings(str(model), max_model_len=256, cores=(0, 1), spool_dir=scratch, bucket_bytes=bucket)
    engine = VllmEngine(settings)
    await engine.start()
    found = {"engine/start_s": time.perf_counter() - started}
    sender = WeightSender(lambda: weights.items(), bucket_bytes=bucket)
    rdv = sender.invite(["e0"])
    await asyncio.gather(asyncio.to_thread(sender.enter), engine.join(rdv["e0"]))
    traffic = [asyncio.create_task(_ask_for_ever(engine, i)) for i in range(4)]
    rows = [await _update(engine, sender, version) for version in range(1, repeats + 2)]
    for task in traffic:
        task.cancel()
    await asyncio.gather(*traffic, return_exceptions=True)
    found["engine/tokens"] = engine.gauges()["engine_tokens"]
    sender.close()
    await engine.close()
    found |= {f"load/{key}": statistics.median(row[key] for row in rows[1:]) for key in rows[0]}
    found["load/stall_ratio"] = found["load/stall_s"] / found["load/bare_s"]
    return found


async def _ask_for_ever(engine: Any, i: int) -> None:
    for k in itertools.count():
        await engine.generate(f"{i}.{k}", [100 + i] * 20, SamplingParams(32), 4)


async def _update(engine: Any, sender: WeightSender, version: int) -> dict[str, float]:
    """A bare reload of what is served, and our update; who loads second finds warmer caches: they take turns."""
    manifest, at = sender.announce(version), time.perf_counter()
    sent, _ = await asyncio.gather(asyncio.to_thread(sender.send, manifest), engine.stage_weights(manifest))
    row = {"stage_beside_decoding_s": time.perf_counter() - at}
    if version % 2 == 0:
        row["bare_s"] = await bare_load(engine)
    report = await engine.commit_weights(version, sent.root)
    if version % 2:
        row["bare_s"] = await bare_load(engine)
    return row | {"stall_s": report.stall_s, "inside_s": report.load_s}
