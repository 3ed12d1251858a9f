"""What does it save to send the adapter alone, and what does it cost to generate with it? Interleaved in one run.

    headrace bench weight_adapters --model models/smollm2-135m [--json FILE] [--rank 16] [--repeats 5]

    merged     whole models travel, adapters merged in; engines generate with plain weights
    adapter    the adapter travels; engines compute it beside the base (rollout/vllm_adapter.py: two products a layer)
    vllm       the same with vLLM's own arithmetic on CPU, which copies both matrices for every token

    bytes      of one version                     transfer_s   sent, staged and proven while the engine is idle
    stall_s    generation stands still            generate_s   64 answers of `--tokens` tokens to 8 prompts of 48
                                                  cpu_s        seconds of a core that those took in the engine's process

Two engines on one core each (0 and 1), of which one works at a time. Medians are shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from learner.config import LearnerConfig
from learner.policy import PolicyModule, load_policy
from learner.weight_sender import WeightSender
from learner.weights import NamedWeight, adapter_weights, base_weights, named_weights
from rollout.engine import SamplingParams
from rollout.versions import AdapterSpec
from rollout.vllm_engine import VllmEngine, VllmSettings
from rollout.vllm_weights import WeightCalls
from rollout.weight_adapter import base_root

ALPHA = 32.0


class KernelCalls(WeightCalls):
    """One more call in the worker: take vLLM's arithmetic, or ours again."""

    model_runner: Any

    def headrace_arithmetic(self, ours: bool) -> None:
        from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

        from rollout.vllm_adapter import OneAdapter

        manager = self.model_runner.lora_manager._adapter_manager
        kind = OneAdapter if ours else PunicaWrapperCPU
        manager.punica_wrapper_mapping = {
            name: kind(manager.max_num_batched_tokens, manager.max_num_seqs, manager.device)
            for name in manager.punica_wrapper_mapping
        }
        manager._last_mapping = None  # the new wrapper knows no batch yet
        (wrapper,) = manager.punica_wrapper_mapping.values()
        for module in manager.modules.values():
            module.set_mapping(wrapper)


class Side:
    """An engine with the sender that feeds it."""

    def __init__(self, model: Path, policy: PolicyModule, rank: int, core: int, adapters: bool) -> None:
        self._policy, self._walk = policy, adapter_weights if adapters else named_weights
        spec = AdapterSpec(rank, ALPHA, base_root(served(base_weights(policy)))) if adapters else None
        self.sender = WeightSender(lambda: served(self._walk(self._policy)), adapter=spec)
        self.engine = VllmEngine(
            VllmSettings(str(model), max_model_len=256, cores=(core,), adapter_rank=rank if adapters else 0)
        )

    async def start(self) -> None:
        before = set(psutil.Process().children(recursive=True))
        await self.engine.start()
        self.processes = set(psutil.Process().children(recursive=True)) - before
        rdv = self.sender.invite(["e0"])
        await asyncio.gather(asyncio.to_thread(self.sender.enter), self.engine.join(rdv["e0"]))

    async def update(self, version: int) -> dict[str, float]:
        manifest = self.sender.announce(version)
        started = time.perf_counter()
        sent, _ = await asyncio.gather(
            asyncio.to_thread(self.sender.send, manifest), self.engine.stage_weights(manifest)
        )
        transfer_s = time.perf_counter() - started
        report = await self.engine.commit_weights(version, sent.root)
        return {"bytes": float(sent.nbytes), "transfer_s": transfer_s, "stall_s": report.stall_s}

    async def generate(self, tag: str, tokens: int) -> dict[str, float]:
        prompts = [[(7 * i + 13 * j + len(tag)) % 199 + 1 for j in range(48)] for i in range(8)]
        started, used = time.perf_counter(), self.cpu_s()
        await asyncio.gather(
            *(self.engine.generate(f"{tag}.{i}", p, SamplingParams(tokens, seed=i), 8) for i, p in enumerate(prompts))
        )
        return {"generate_s": time.perf_counter() - started, "cpu_s": self.cpu_s() - used}

    def cpu_s(self) -> float:
        """Seconds of a core that the engine's processes have used: what a busy machine does not change."""
        return sum(sum(p.cpu_times()[:2]) for p in self.processes)

    async def close(self) -> None:
        self.sender.close()
        await self.engine.close()


def served(weights: Iterator[NamedWeight]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((w.name, w.whole().to(torch.bfloat16)) for w in weights)


async def measure(model: Path, rank: int, repeats: int, tokens: int) -> dict[str, float]:
    from rollout import vllm_weights

    vllm_weights.WORKER_EXTENSION = "benchmarks.weight_adapters.KernelCalls"
    config = LearnerConfig(lora_rank=rank, lora_alpha=ALPHA)
    policy = load_policy(model, config, torch.device("cpu"))
    sides = {
        name: Side(model, policy, rank, core, name == "adapter") for core, name in enumerate(("merged", "adapter"))
    }
    for side in sides.values():
        await side.start()
    seen: dict[str, list[dict[str, float]]] = {"merged": [], "adapter": [], "vllm": []}
    arithmetic = sides["adapter"].engine._llm.collective_rpc
    for k in range(repeats + 1):  # the first round warms up
        with torch.no_grad():
            for name, p in policy.named_parameters():
                if ".lora_B." in name:
                    p.add_(1e-3 * torch.randn_like(p))
        for name, side in sides.items():
            found = await side.update(k + 1) | await side.generate(f"{name}{k}", tokens)
            seen[name] += [found] if k else []
        if k <= min(repeats, 2):  # slow, and it does not vary
            await arithmetic("headrace_arithmetic", args=(False,))
            found = await sides["adapter"].generate(f"vllm{k}", tokens)
            await arithmetic("headrace_arithmetic", args=(True,))
            seen["vllm"] += [found] if k else []
    for side in sides.values():
        await side.close()
    return {
        f"{name}/{key}": statistics.median(row[key] for row in rows) for name, rows in seen.items() for key in rows[0]
    }


def table(found: dict[str, float]) -> str:
    lines = [f"{'':14}{'merged':>10}{'adapter':>10}{'vllm':>10}"]
    shown: dict[str, Callable[[float], str]] = {"bytes": lambda b: f"{b / 1e6:.2f} MB"}
    for key in ("bytes", "transfer_s", "stall_s", "generate_s", "cpu_s"):
        text = shown.get(key, lambda s: f"{s:.3f}")
        cells = [text(found[f"{n}/{key}"]) if f"{n}/{key}" in found else "" for n in ("merged", "adapter", "vllm")]
        lines.append(f"{key:14}" + "".join(f"{c:>10}" for c in cells))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace bench weight_adapters", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--json", type=Path, help="also write the measured values")
    a = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    found = asyncio.run(measure(a.model, a.rank, a.repeats, a.tokens))
    print(table(found))
    if a.json:
        a.json.write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
