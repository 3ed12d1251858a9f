"""How fast and how lean is one optimizer step? Against TRL's GRPOTrainer, interleaved in one run, and against a floor.

    headrace bench learner [--json FILE] [--trl-python VENV/bin/python] [--model models/smollm2-135m] [--steps 3]

    ours       LearnerEngine.train_step: prefix-shared packing, tiled head, DeepSpeed ZeRO-1, float32 masters
    plain      the same without sharing prompts (--plain)
    compiled   the same as ours with torch.compile (--compiled)
    trl        GRPOTrainer: _compute_loss over micro-batches, backward, clip, AdamW; float32 weights, bf16 autocast
    floor    FLOPs of the matmuls that the shared batch needs / the matmul rate measured on this machine just before

The batch is ragged: 64 answers of 16-512 tokens in groups of 8, prompts of 64-256. Both sides read the same tokens and
must report the same loss; in float32 nearly the same gradient norm too, in bfloat16 random tokens make it
ill-conditioned (docs/learner.md). Contenders take turns, after a step on a tiny batch to warm up; the median of each
counts. No round begins that would end after --limit-s. "trained tokens" are answer tokens. Seconds are wall clock; CPU
seconds stand beside them for busy machines.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.learner_contenders import batch_of

ROOT = Path(__file__).resolve().parent.parent
TRL_PYTHON = "HEADRACE_TRL_PYTHON"
TARGET_SPEED, TARGET_MEMORY = 3.0, 0.35


class Contender:
    """A process that makes one step when asked."""

    def __init__(self, name: str, python: str, kind: str, spec: dict[str, Any], folder: Path) -> None:
        self.name, self.rows = name, []  # type: tuple[str, list[dict[str, Any]]]
        path = folder / f"{name}.json"
        path.write_text(json.dumps(spec))
        environment = os.environ | {"OMP_NUM_THREADS": str(spec["threads"]), "HF_HUB_OFFLINE": "1"}
        self._log = open(folder / f"{name}.log", "w+")  # noqa: SIM115 - closed in `close`
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.learner_contenders", kind, str(path)],
            cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip
        self._answer()

    def step(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        self.rows.append(json.loads(self._answer()))

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"{self.name} ended before it answered:\n{self._log.read()[-2000:]}")
        return line

    def median(self) -> dict[str, Any]:
        """The step of median duration (the lower of two), the durations of all, loss and gradient norm of the first."""
        rows = sorted(self.rows, key=lambda r: r["seconds"])
        first = {name: self.rows[0][name] for name in ("loss", "grad_norm")}
        return rows[(len(rows) - 1) // 2] | first | {"all_s": [r["seconds"] for r in self.rows]}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


def needed_flops(spec: dict[str, Any], config: dict[str, Any]) -> float:
    """Multiply-adds x 2 of forward and backward (3 x forward) when every prompt is computed once."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    width = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    per_token = layers * (
        2 * hidden * heads * width + 2 * hidden * kv * width + 3 * hidden * config["intermediate_size"]
    )
    total = 0.0
    for prompt, answers, _ in batch_of(spec):
        p, lengths = len(prompt), [len(a) for a in answers]
        tokens = p + sum(lengths)
        pairs = p * (p + 1) / 2 + sum(n * p + n * (n + 1) / 2 for n in lengths)
        total += per_token * tokens + layers * 2 * pairs * heads * width + hidden * config["vocab_size"] * sum(lengths)
    return 2 * 3 * total


def matmul_rate(spec: dict[str, Any], config: dict[str, Any]) -> float:
    """FLOP/s over the model's widest product: forward, gradient of the input, gradient of the weight."""
    import torch

    torch.set_num_threads(spec["threads"])
    dtype = getattr(torch, spec["dtype"])
    x = torch.randn(2048, config["hidden_size"], dtype=dtype)
    w = torch.randn(config["intermediate_size"], config["hidden_size"], dtype=dtype)
    g = torch.randn(2048, config["intermediate_size"], dtype=dtype)
    products = (lambda: x @ w.t(), lambda: g @ w, lambda: g.t() @ x)
    seconds = 0.0
    for product in products:
        times = []
        for _ in range(20):
            start = time.perf_counter()
            product()
            times.append(time.perf_counter() - start)
        seconds += min(times)
    return 3 * 2 * 2048 * w.numel() / seconds


def _contenders(options: argparse.Namespace) -> list[tuple[str, str, str, dict[str, Any]]]:
    """(name, Python, kind of process, what its spec changes)."""
    made: list[tuple[str, str, str, dict[str, Any]]] = [("ours", sys.executable, "ours", {})]
    if options.plain:
        made.append(("plain", sys.executable, "ours", {"share": False}))
    if options.compiled:
        made.append(("compiled", sys.executable, "ours", {"compile": True}))
    if options.trl_python:
        made.append(("trl", options.trl_python, "trl", {}))
    return made


def _take_turns(made: Sequence[Contender], steps: int, limit_s: float) -> None:
    started = time.perf_counter()
    for number in range(1, steps + 1):
        for contender in made:
            contender.step()
        spent = time.perf_counter() - started
        if number < steps and spent * (number + 1) / number > limit_s:
            print(f"stopped after {number} of {steps} rounds: one more would end after {limit_s:g} s", file=sys.stderr)
            return


def measure(options: argparse.Namespace) -> dict[str, Any]:
    config = json.loads((Path(options.model) / "config.json").read_text())
    spec: dict[str, Any] = {
        "model": str(Path(options.model).resolve()), "seed": options.seed, "answers": options.answers, "group_size": 8,
        "prompt": options.prompt, "answer": options.answer, "vocab": config["vocab_size"], "dtype": options.dtype,
        "threads": options.threads, "token_budget": options.token_budget, "share": True, "compile": False,
        "trl_batch": options.trl_batch, "trl_checkpointing": options.trl_checkpointing,
    }  # fmt: skip
    rate = matmul_rate(spec, config)
    with tempfile.TemporaryDirectory() as folder:
        made: list[Contender] = []
        try:
            for name, python, kind, changes in _contenders(options):
                made.append(Contender(name, python, kind, spec | changes, Path(folder)))
            _take_turns(made, options.steps, options.limit_s)
            rows = {c.name: c.median() for c in made}
        finally:
            for contender in made:
                contender.close()
    trained = sum(len(a) for _, answers, _ in batch_of(spec) for a in answers)
    for row in rows.values():
        row["tokens_per_s"] = trained / row["seconds"]
    floor = needed_flops(spec, config) / rate
    found: dict[str, Any] = {"spec": spec, "trained_tokens": trained, "rows": rows, "matmul_gflops": rate / 1e9}
    found |= {"floor_s": floor, "times_floor": rows["ours"]["seconds"] / floor}
    if "plain" in rows:
        found["sharing_speedup"] = rows["plain"]["seconds"] / rows["ours"]["seconds"]
    if "trl" in rows:
        found["speedup"] = rows["trl"]["seconds"] / rows["ours"]["seconds"]
        found["cpu_speedup"] = rows["trl"]["cpu_seconds"] / rows["ours"]["cpu_seconds"]
        found["memory_share"] = rows["ours"]["peak_mb"] / rows["trl"]["peak_mb"]
    return found


def table(found: dict[str, Any]) -> str:
    lines = [f"{'':10}{'step s':>7}{'CPU s':>9}{'tokens/s':>10}{'peak MB':>9}{'loss':>12}{'grad norm':>11}   parts"]
    for name, r in found["rows"].items():
        parts = "  ".join(f"{k} {v:.1f}" for k, v in r["parts"].items())
        numbers = f"{r['seconds']:7.1f}{r['cpu_seconds']:9.1f}{r['tokens_per_s']:10.0f}{r['peak_mb']:9.0f}"
        spread = f"  ({min(r['all_s']):.1f} to {max(r['all_s']):.1f} s in {len(r['all_s'])} steps)"
        lines.append(f"{name:10}{numbers}{r['loss']:12.6f}{r['grad_norm']:11.4f}   {parts}{spread}")
    rate, times = found["matmul_gflops"], found["times_floor"]
    lines.append(
        f"floor   {found['floor_s']:9.1f}   at {rate:.0f} GFLOP/s measured; ours takes {times:.2f} times as long"
    )
    if "sharing_speedup" in found:
        lines.append(
            f"computing each prompt once: the whole step is {found['sharing_speedup']:.2f} x as fast as without"
        )
    if "speedup" in found:
        lines.append(
            f"ours against TRL: {found['speedup']:.2f} x its trained tokens/s (target {TARGET_SPEED}), "
            f"{found['memory_share']:.2f} of its peak memory (target {TARGET_MEMORY})"
        )
    else:
        lines.append(f"TRL is absent: pass --trl-python, or set {TRL_PYTHON}, to a Python that has trl 1.16.0")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace bench learner", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--trl-python", default=os.environ.get(TRL_PYTHON))
    parser.add_argument("--trl-batch", type=int, default=8, help="TRL's default per_device_train_batch_size")
    parser.add_argument("--trl-checkpointing", action="store_true", help="TRL's own default; slower and leaner")
    parser.add_argument("--plain", action="store_true", help="also measure ours without sharing prompts")
    parser.add_argument("--compiled", action="store_true", help="also measure ours with torch.compile")
    parser.add_argument("--steps", type=int, default=3, help="rounds")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="no round begins that would end after this")
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--prompt", type=int, nargs=2, default=[64, 256])
    parser.add_argument("--answer", type=int, nargs=2, default=[16, 512])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--token-budget", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    found = measure(options := parser.parse_args(argv))
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
