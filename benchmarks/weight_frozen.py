"""Frozen weights, pushed over and over: does the canary stay silent, and how soon does it hear an error of 0.1 %?

    headrace bench weight_frozen [--model models/smollm2-135m] [--syncs 200] [--json FILE]

The whole protocol runs: WeightSync, gloo, inbox, digests, commits, the canary. First on light engines; with `--model`
also on vLLM, which generates meanwhile. After the last sync of frozen weights the engine's output logits are
multiplied by 1.001 (weights in bf16 cannot hold so small an error: it would round away), and it is counted how many
further syncs the alarm takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.weight_sync import CanaryPlan, ThreadedSender, WeightSync
from benchmarks.light_engine import LightEngine, bigram, score
from learner.weight_sender import WeightSender
from rollout.canary import CanaryText, Reading
from rollout.engine import SamplingParams
from rollout.service import RolloutService
from rollout.types import Float32
from rollout.vllm_settings import VllmSettings

ERROR = 1.001
PATIENCE = 3
LIGHT_VOCABULARY = 64
Weights = Mapping[str, torch.Tensor]


@dataclass
class Outcome:
    """`Outcome([Reading(...), ...] * 200, alarmed_after=1, alarms=[])`; alarms are those of the frozen syncs."""

    readings: list[Reading] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    alarmed_after: int | None = None
    alarm: str = ""

    def figures(self, tag: str) -> dict[str, float]:
        values = [r.mean_abs for r in self.readings]
        return {
            f"{tag}/syncs": float(len(values)),
            f"{tag}/false_alarms": float(len(self.alarms)),
            f"{tag}/mean_abs": float(np.mean(values)),
            f"{tag}/largest_slope": max(abs(r.slope) for r in self.readings),
            f"{tag}/stretch": float(np.mean([r.stretch for r in self.readings])),
            f"{tag}/tremble": float(np.std([r.stretch for r in self.readings])),
            f"{tag}/alarmed_after": float("nan") if self.alarmed_after is None else float(self.alarmed_after),
        }


async def frozen(
    weights: Weights,
    engines: Mapping[str, Any],
    texts: tuple[CanaryText, ...],
    wanted: Sequence[Float32],
    syncs: int,
    inject: Callable[[], Awaitable[None]],
    bucket_bytes: int = 8 << 20,
) -> Outcome:
    """Push the same `weights` `syncs` times, then `inject` the error and push on until an alarm, or `PATIENCE` times.

    `wanted` are the learner's log-probs, which do not change either.
    """
    outcome = Outcome()
    sender = WeightSender(lambda: weights.items(), bucket_bytes=bucket_bytes, timeout_s=60.0)

    async def scored(version: int) -> Sequence[Float32]:
        return wanted

    def event(kind: str, **fields: Any) -> None:
        if kind == "canary_alarm":
            alarms.append(str(fields["reason"]))

    alarms: list[str] = []
    plan = CanaryPlan(texts, scored, quarantine=False)
    sync = WeightSync(ThreadedSender(sender), event, timeout_s=60.0, canary=plan)
    for name, engine in engines.items():
        sync.admit(name, RolloutService(engine, SamplingParams(1), group_size=1, max_in_flight=1))
    for version in range(1, syncs + 1):
        outcome.readings += (await sync.push(version)).readings
    outcome.alarms, alarms = list(alarms), []
    await inject()
    for extra in range(1, PATIENCE + 1):
        await sync.push(syncs + extra)
        if alarms:
            outcome.alarmed_after, outcome.alarm = extra, alarms[0]
            break
    sender.close()
    return outcome


async def light(syncs: int, scratch: str, n_engines: int = 2) -> Outcome:
    """Bigram engines in this process; the last one gets the error."""
    weights, scale = bigram(LIGHT_VOCABULARY, seed=3), [1.0]
    text = CanaryText((9,), (1, 2, 3, 4, 60, 31))
    engines = {
        f"light-{i}": LightEngine(
            bigram(LIGHT_VOCABULARY),
            bucket_bytes=4096,
            spool_dir=scratch,
            on_load=(lambda name, t: t * scale[0]) if i == n_engines - 1 else None,
        )
        for i in range(n_engines)
    }

    async def inject() -> None:
        scale[0] = ERROR

    wanted = [score(weights, text.prompt_ids, text.token_ids, 1.0)]
    try:
        return await frozen(weights, engines, (text,), wanted, syncs, inject, bucket_bytes=4096)
    finally:
        for engine in engines.values():
            await engine.close()


# --- vLLM -------------------------------------------------------------------------------------------------------------


def scaled_calls() -> type:
    """vLLM's worker extension with one more call, which multiplies the output logits from then on."""
    from rollout.vllm_weights import WeightCalls

    class ScaledCalls(WeightCalls):
        model_runner: Any

        def headrace_scale_logits(self, factor: float) -> None:
            self.model_runner.get_model().logits_processor.scale *= factor

    return ScaledCalls


def __getattr__(name: str) -> type:
    """vLLM's worker asks this module for "ScaledCalls"; only then is vLLM imported."""
    if name == "ScaledCalls":
        return scaled_calls()
    raise AttributeError(name)


async def vllm(
    settings: VllmSettings, weights: Weights, texts: tuple[CanaryText, ...], wanted: Sequence[Float32], syncs: int
) -> Outcome:
    """One real engine that answers requests all the time; `wanted` are the learner's log-probs of `weights`."""
    from rollout import vllm_weights
    from rollout.engine import SamplingParams
    from rollout.vllm_engine import VllmEngine

    vllm_weights.WORKER_EXTENSION = "benchmarks.weight_frozen.ScaledCalls"
    engine = VllmEngine(settings)
    await engine.start()

    async def chatter(i: int) -> None:
        k = 0
        while True:
            await engine.generate(f"{i}.{k}", [10 + i] * 12, SamplingParams(24), 4)
            k += 1

    async def inject() -> None:
        await engine._llm.collective_rpc("headrace_scale_logits", args=(ERROR,))

    talking = [asyncio.create_task(chatter(i)) for i in range(2)]
    try:
        return await frozen(weights, {"vllm": engine}, texts, wanted, syncs, inject, settings.bucket_bytes)
    finally:
        for task in talking:
            task.cancel()
        await asyncio.gather(*talking, return_exceptions=True)
        await engine.close()


def learner_scores(model_dir: str, texts: Sequence[CanaryText]) -> list[Float32]:
    """Log-probs float32[L] of each text by transformers in float32."""
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), []
    for text in texts:
        ids = torch.tensor([text.prompt_ids + text.token_ids])
        with torch.no_grad():
            rows = torch.log_softmax(model(ids).logits[0, len(text.prompt_ids) - 1 : -1], dim=-1)
        found.append(rows.gather(1, ids[0, len(text.prompt_ids) :, None]).squeeze(1).numpy())
    return found


def texts_for(vocabulary: int, n: int = 4, length: int = 16, seed: int = 0) -> tuple[CanaryText, ...]:
    """Fixed random tokens."""
    rows = np.random.default_rng(seed).integers(1, vocabulary, (n, 2, length))
    return tuple(CanaryText(tuple(a.tolist()), tuple(b.tolist())) for a, b in rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace bench weight_frozen", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="also push this model's weights to a real vLLM")
    parser.add_argument("--syncs", type=int, default=200)
    parser.add_argument("--json", type=Path, help="also write one JSON object to this file")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = {"light": asyncio.run(light(args.syncs, scratch))}
        if args.model:
            from benchmarks.weights import load

            weights, settings = load(args.model), VllmSettings(str(args.model), max_model_len=256, spool_dir=scratch)
            texts = texts_for(30_000)
            wanted = learner_scores(str(args.model), texts)  # float32 beside vLLM's bf16
            outcomes["vllm"] = asyncio.run(vllm(settings, weights, texts, wanted, args.syncs))
    found = {k: v for tag, o in outcomes.items() for k, v in o.figures(tag).items()}
    for key, value in found.items():
        print(f"{key:28} {value:10.6f}")
    for tag, o in outcomes.items():
        print(f"{tag}: {o.alarm or 'NO ALARM'}")
    if args.json:
        args.json.write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
