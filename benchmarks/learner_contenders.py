"""One contender of `benchmarks.learner` as a process of its own: "step" on stdin, one JSON line on stdout.

    python -m benchmarks.learner_contenders ours SPEC.json    the learner's own engine, one step per line
    python -m benchmarks.learner_contenders trl SPEC.json     TRL's GRPOTrainer: _compute_loss, backward, clip, AdamW

Both read the same ragged batch, made from the seed of the spec, and report the loss and the gradient norm of their
first step, so that one can see that they did the same work. TRL's process imports no other file of this project.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

#: The batch of the step that warms up.
TINY = {"answers": 8, "group_size": 8, "prompt": (16, 16), "answer": (16, 16)}

Step = Callable[[], dict[str, Any]]


def batch_of(spec: dict[str, Any]) -> list[tuple[np.ndarray, list[np.ndarray], list[float]]]:
    """Groups of (prompt ids, answers, rewards); lengths are uniform in the ranges of the spec."""
    rng = np.random.default_rng(spec["seed"])
    groups = []
    for _ in range(spec["answers"] // spec["group_size"]):
        prompt = rng.integers(0, spec["vocab"], rng.integers(spec["prompt"][0], spec["prompt"][1] + 1))
        lengths = rng.integers(spec["answer"][0], spec["answer"][1] + 1, spec["group_size"])
        answers = [rng.integers(0, spec["vocab"], n) for n in lengths]
        groups.append((prompt, answers, [float(i % 2) for i in range(spec["group_size"])]))
    return groups


def ours(spec: dict[str, Any]) -> Step:
    from learner import presets
    from learner.config import AlgorithmConfig, LearnerConfig
    from learner.engine import LearnerEngine
    from rollout.types import Group, Scored, Status, Trajectory
    from rollout.versions import VersionSpan

    overrides = {"correction": "none", "correction_high": None}
    algorithm = AlgorithmConfig(preset="dapo", learning_rate=2e-5, overrides=overrides)
    config = LearnerConfig(
        compute_dtype=spec["dtype"], token_budget=spec["token_budget"], share_prompts=spec["share"],
        compile=spec["compile"],
    )  # fmt: skip
    engine = LearnerEngine(spec["model"], presets.resolve(algorithm), algorithm, config)

    def trajectory(ids: np.ndarray, reward: float) -> Trajectory:
        n = len(ids)
        logprobs, spans = np.full(n, -10, np.float32), (VersionSpan(0, 0, n),)
        return Trajectory(ids.astype(np.int32), np.ones(n, bool), logprobs, spans, Status.FINISHED, Scored(reward))

    def groups_of(spec: dict[str, Any]) -> list[Group]:
        return [
            Group(i, prompt.astype(np.int32), tuple(trajectory(a, r) for a, r in zip(answers, rewards, strict=True)))
            for i, (prompt, answers, rewards) in enumerate(batch_of(spec))
        ]

    groups = groups_of(spec)
    engine.train_step(groups_of(spec | TINY), engine.version)

    def step() -> dict[str, Any]:
        metrics = engine.train_step(groups, engine.version)
        parts = {k.removeprefix("time/learn_"): v for k, v in metrics.items() if k.startswith("time/learn_")}
        return {"loss": metrics["loss/total"], "grad_norm": metrics["grad_norm"], "parts": parts}

    return step


def trl(spec: dict[str, Any]) -> Step:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    answers, micro = spec["answers"], spec["trl_batch"]
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=spec["dtype"] == "bfloat16", report_to="none",
        per_device_train_batch_size=micro, gradient_accumulation_steps=answers // micro,
        num_generations=spec["group_size"], max_completion_length=spec["answer"][1], beta=0.0, loss_type="dapo",
        epsilon=0.2, epsilon_high=0.28, learning_rate=2e-5, adam_beta2=0.99, max_grad_norm=1.0, temperature=1.0,
        gradient_checkpointing=spec["trl_checkpointing"], lr_scheduler_type="constant",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "x"}] * answers),
        processing_class=AutoTokenizer.from_pretrained(spec["model"]),
    )  # fmt: skip
    optimizer = trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = answers // micro
    model.train()

    def step_on(inputs: dict[str, Any]) -> dict[str, Any]:
        total, parts = 0.0, {"forward": 0.0, "backward": 0.0}
        for at in range(0, len(inputs["advantages"]), micro):
            piece = {k: v[at : at + micro] if v.dim() else v for k, v in inputs.items()}
            t0 = time.perf_counter()
            with trainer.compute_loss_context_manager():
                loss = trainer._compute_loss(model, piece)
            t1 = time.perf_counter()
            loss.backward()
            parts["forward"] += t1 - t0
            parts["backward"] += time.perf_counter() - t1
            total += float(loss.detach())
        t2 = time.perf_counter()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        return {"loss": total, "grad_norm": float(norm), "parts": parts | {"optimizer": time.perf_counter() - t2}}

    inputs = _padded(batch_of(spec))
    step_on(_padded(batch_of(spec | TINY)))
    return lambda: step_on(inputs)


def _padded(groups: list[tuple[np.ndarray, list[np.ndarray], list[float]]]) -> dict[str, Any]:
    """As TRL lays a generation batch out: prompts padded left, answers right, to the longest of the batch."""
    import torch

    rows = [(p, a, r, np.mean(rs), np.std(rs, ddof=1)) for p, xs, rs in groups for a, r in zip(xs, rs, strict=True)]
    wide, long = max(len(r[0]) for r in rows), max(len(r[1]) for r in rows)
    out = {k: torch.zeros(len(rows), n, dtype=torch.long) for k, n in (("prompt", wide), ("completion", long))}
    masks = {k: torch.zeros_like(v) for k, v in out.items()}
    for i, (prompt, answer, *_) in enumerate(rows):
        out["prompt"][i, wide - len(prompt) :], masks["prompt"][i, wide - len(prompt) :] = torch.from_numpy(prompt), 1
        out["completion"][i, : len(answer)], masks["completion"][i, : len(answer)] = torch.from_numpy(answer), 1
    advantages = torch.tensor([(r - mean) / (std + 1e-6) for _, _, r, mean, std in rows], dtype=torch.float32)
    named = {f"{k}_ids": v for k, v in out.items()} | {f"{k}_mask": v for k, v in masks.items()}
    return named | {"advantages": advantages, "num_items_in_batch": masks["completion"].sum().float()}


def main() -> None:
    kind, path = sys.argv[1:3]
    spec = json.loads(Path(path).read_text())
    import torch

    torch.set_num_threads(spec["threads"])
    out, sys.stdout = sys.stdout, sys.stderr  # libraries print what they like; stdout carries answers only
    step = {"ours": ours, "trl": trl}[kind](spec)
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        if line.strip() != "step":
            break
        wall, cpu = time.perf_counter(), time.process_time()
        found = step()
        found |= {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(found), file=out, flush=True)


if __name__ == "__main__":
    main()
