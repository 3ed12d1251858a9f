"""How fast is the replay queue? Against TransferQueue, ray.util.queue and raw ZeroMQ, interleaved in one run.

    headrace bench queue [--json FILE] [--repeats 5] [--peer-python VENV/bin/python] [--shapes 8x256,64x32768]

    ours      producer, scorer, consumer and server are separate processes: lease, put, score, take, trained, release
    tq_serial TransferQueue (SimpleStorage) as in its own examples: kv_batch_put, kv_batch_get and kv_clear in turn, in
              one process; what the targets are about
    tq        TransferQueue pipelined by this benchmark, which makes it faster: kv_batch_put in one process,
              kv_batch_get and kv_clear in another, told over bare ZeroMQ sockets what is ready
    ray       ray.util.queue.Queue: one put and one get per group; no scoring, nothing durable
    raw       ZeroMQ PUSH/PULL, one message per group: the ceiling; no server between, no replies, nothing kept

A shape is SAMPLES x TOKENS; 8 samples are one group, all samples of a shape are one step. Each sample carries ids
int32, log-probs float32 and a mask: 9 bytes a token. The peers do no scoring. Every contender moves the same number of
steps, all but tq_serial with up to three of them under way. Whoever takes a step has its arrays, checked, as columns.
Contenders take turns, `--repeats` times. Each lives only for its turn, which begins when the machine is at rest: a Ray
cluster beside it, or one that is still ending, would slow anybody down. Medians are shown. A peer that is not installed
is named as absent.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEER_PYTHON = "HEADRACE_TQ_PYTHON"
OURS = ("memory", "os", "fsync")


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape(64, 1024): 8 groups of 8 samples of 1024 tokens each per step."""

    samples: int
    tokens: int
    steps: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        samples, tokens = map(int, text.split("x"))
        return cls(samples, tokens, max(8, min(600, 120_000 // samples, 1_200_000_000 // (samples * tokens * 9))))

    @property
    def name(self) -> str:
        return f"{self.samples}x{self.tokens}"

    @property
    def groups(self) -> int:
        return self.samples // 8

    @property
    def nbytes(self) -> int:
        return self.samples * self.tokens * 9


AT_REST, REST_LIMIT_S = 0.04, 20.0  # share of the cores in use; how long to wait for that

DEFAULT_SHAPES = "8x256,64x1024,64x32768,1024x256"
OS_TARGETS: dict[str, float] = {"8x256": 10, "64x1024": 10, "1024x256": 10, "64x32768": 3}
FSYNC_TARGETS: dict[str, float] = {"8x256": 5, "64x1024": 5, "1024x256": 5, "64x32768": 1}
TARGETS: dict[
    tuple[str, str], dict[str, float]
] = {  # (contender, against): {shape: how many times as fast, in samples per second}
    ("os", "tq_serial"): OS_TARGETS,
    ("fsync", "tq_serial"): FSYNC_TARGETS,
    ("memory", "raw"): {"64x32768": 0.5},
    ("os", "tq"): OS_TARGETS,
    ("fsync", "tq"): FSYNC_TARGETS,
}
PEERS = ("tq_serial", "tq")
ALL = ("raw", *OURS, *PEERS, "ray")


class Contender:
    """A process that measures on request: one JSON line in, one JSON line out."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0", "PYTHONPATH": str(ROOT)}
        self.words = tempfile.TemporaryFile("w+", prefix=f"headrace-bench-{name}-")  # noqa: SIM115 (as long as the process)
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.words,
        )  # fmt: skip

    def measure(self, **order: Any) -> dict[str, Any]:
        """Raises RuntimeError with the last words of a contender that died."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        self.words.seek(0)
        raise RuntimeError(f"{self.name} died: {self.words.read()[-800:]}")

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def contenders(names: Sequence[str], peer_python: str | None) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The commands of those of `names` that can run here, and why the others cannot."""
    import importlib.util

    absent: dict[str, str] = {}
    ours, peers = "benchmarks.queue_contenders", "benchmarks.queue_peers"
    commands = {"raw": [sys.executable, "-m", ours, "raw"]}
    commands |= {name: [sys.executable, "-m", ours, "ours", name] for name in OURS}
    if importlib.util.find_spec("ray"):
        commands["ray"] = [sys.executable, "-m", peers, "ray"]
    else:
        absent["ray"] = "Ray is not installed in this environment"
    for name in PEERS:
        if peer_python and Path(peer_python).exists():
            commands[name] = [peer_python, "-m", peers, name]
        else:
            absent[name] = f"TransferQueue needs an environment of its own: --peer-python, or {PEER_PYTHON}"
    absent |= {name: "not asked for" for name in commands if name not in names}
    return {name: command for name, command in commands.items() if name in names}, absent


@dataclass
class Figures:
    """What was found: by shape and contender; latencies by contender."""

    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    cpu: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    latencies: dict[str, dict[str, float]] = field(default_factory=dict)

    def turn(self, contender: Contender, shapes: Sequence[Shape], say: Any) -> None:
        """One contender, all shapes."""
        name = contender.name
        for shape in shapes:
            contender.measure(**asdict(shape) | {"steps": 4})  # warms up, and does not count
            found = contender.measure(**asdict(shape))
            samples = shape.samples * shape.steps
            self.rates.setdefault(shape.name, {}).setdefault(name, []).append(samples / found["seconds"])
            say(f"{shape.name} {name}: {samples / found['seconds']:,.0f} samples/s", flush=True)
            if "cpu" in found:
                spent = {role: round(s / samples * 1e6, 1) for role, s in found["cpu"].items()}
                self.cpu.setdefault(shape.name, {})[name] = spent
        if name in (*OURS, *PEERS):
            self.latencies[name] = contender.measure(samples=8, tokens=1024, steps=300, latency=True)


def core_ticks() -> tuple[int, int]:
    """Clock ticks of all cores since the machine started, and those of them in which they were in use."""
    ticks = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(ticks), sum(ticks) - ticks[3] - ticks[4]  # but idle and iowait


def rest(say: Any) -> None:
    """Wait until the machine is at rest: a Ray cluster takes seconds to end, and takes them from who comes next."""
    deadline = time.monotonic() + REST_LIMIT_S
    while True:
        before = core_ticks()
        time.sleep(0.5)
        everything, used = (now - then for now, then in zip(core_ticks(), before, strict=True))
        if used <= AT_REST * everything:
            return
        if time.monotonic() > deadline:
            say(f"not at rest: {used / everything:.0%} of the cores are in use by others; this turn is slower for it")
            return


def run(
    shapes: Sequence[Shape], repeats: int, peer_python: str | None, names: Sequence[str] = ALL, say: Any = print
) -> dict[str, Any]:
    """Measure everything, saying each rate as it comes; returns the figures of the JSON line."""
    found, absent = contenders(names, peer_python)
    for name, reason in absent.items():
        say(f"absent: {name}: {reason}")
    seen = Figures()
    for _ in range(repeats):
        for name, command in found.items():
            rest(say)
            with Contender(name, command) as contender:
                seen.turn(contender, shapes, say)
    medians = {s: {n: statistics.median(v) for n, v in by_name.items()} for s, by_name in seen.rates.items()}
    return {
        "benchmark": "queue",
        "samples_per_s": medians,
        "all": seen.rates,
        "latency_ms": seen.latencies,
        "cpu_us_per_sample": seen.cpu,
        "absent": absent,
        "targets": judge(medians),
    }


def judge(medians: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Each target that could be measured: what was asked, what was found."""
    rows = []
    for (name, against), wanted in TARGETS.items():
        for shape, times in wanted.items():
            found = medians.get(shape, {})
            if name in found and against in found:
                ratio = found[name] / found[against]
                row = {"what": f"{name} / {against}", "shape": shape, "wanted": times, "found": round(ratio, 2)}
                rows.append({**row, "ok": ratio >= times})
    return rows


def show(figures: dict[str, Any], shapes: Sequence[Shape]) -> None:
    names = [n for n in ALL if any(n in v for v in figures["samples_per_s"].values())]
    print(f"{'samples/s (MB/s)':>16}" + "".join(f"{n:>19}" for n in names))
    for shape in shapes:
        found = figures["samples_per_s"][shape.name]
        cells = [f"{found[n]:,.0f} ({found[n] * shape.tokens * 9 / 1e6:,.0f})" if n in found else "-" for n in names]
        print(f"{shape.name:>16}" + "".join(f"{c:>19}" for c in cells))
    for name, row in figures["latency_ms"].items():
        print(f"one group, put to taken, {name}: p50 {row['p50']:.2f} ms, p99 {row['p99']:.2f} ms")
    for shape_name, by_name in figures["cpu_us_per_sample"].items():
        for name, roles in by_name.items():
            parts = ", ".join(f"{role} {us:g}" for role, us in roles.items())
            print(f"{shape_name:>16} {name}: microseconds of processor time per sample: {parts}")
    for row in figures["targets"]:
        verdict = "ok" if row["ok"] else "MISSED"
        print(f"{row['what']:>18} on {row['shape']:<9} wanted {row['wanted']:g}x, found {row['found']:g}x  {verdict}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace bench queue", description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures here as well")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shapes", default=DEFAULT_SHAPES)
    parser.add_argument("--contenders", default=",".join(ALL), help="a part of raw,memory,os,fsync,tq_serial,tq,ray")
    parser.add_argument("--peer-python", default=os.environ.get(PEER_PYTHON), metavar="PYTHON")
    options = parser.parse_args(argv)
    shapes = [Shape.parse(s) for s in options.shapes.split(",")]
    started = time.monotonic()
    figures = run(shapes, options.repeats, options.peer_python, options.contenders.split(","))
    figures["seconds"] = round(time.monotonic() - started, 1)
    show(figures, shapes)
    line = json.dumps(figures)
    print(line)
    if options.json:
        Path(options.json).write_text(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
