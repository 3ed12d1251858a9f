"""Does every algorithm learn in the whole asynchronous loop, and how old may its data be? One run per preset and bound.

    headrace bench learning [--json docs/learning.jsonl] [--presets gspo ppo] [--staleness 0 4]
    headrace bench learning --render docs/algorithms.md

Each cell is a run of launch/topologies/tiny_cpu.yaml with the real parts: vLLM on one core, the DeepSpeed learner on
the other, the ZeroMQ queue with its journal, reward processes, weights sent and proven after every step. The loop is
actors/learning_loop.py; only what a process has imported and vLLM's loaded engine outlive a cell (warm_cluster.py).

A line is appended per finished cell, and what is in the file is not run again: it may be interrupted at any time.
Cells differ by preset and bound only; the seed fixes weights, prompts and their order, not the timing of two processes,
so a number may differ a little from run to run. benchmarks/learning_table.py says what counts as having learnt.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks import learning_table
from benchmarks.learning_table import CHANGES, LEARNING_RATE, LEARNING_RATES, STALENESS, STEPS, TARGET, Cell, online
from benchmarks.warm_cluster import WarmCluster
from launch.cluster import RoleDied
from launch.config import RunConfig, load
from launch.inventory import local_inventory
from launch.plan import make_plan
from launch.preflight import preflight
from launch.run_dir import RunDirectory
from launch.span_check import check_spans
from rollout.audit import audit
from rollout.event_log import JsonLines

ROOT = Path(__file__).resolve().parent.parent
TOPOLOGY = ROOT / "launch" / "topologies" / "tiny_cpu.yaml"
RESULTS = ROOT / "docs" / "learning.jsonl"
EVALUATE_EVERY = 2
CELL_S = 300.0  # a run is a few seconds; a machine full of others makes it a minute
DRAIN_S = 60.0


def planned(preset: str, staleness: int, seed: int = 0, steps: int = STEPS) -> Cell:
    """The cell that is to be measured, as yet without a result."""
    rate, changes = LEARNING_RATES.get(preset, LEARNING_RATE), CHANGES.get(preset, {})
    return Cell(
        preset, staleness, seed, steps, rate, changes, held_out=(), reward=(), margin=(),
        staleness_mean=0.0, staleness_max=0, trained=0, dropped={}, books=False, seconds=0.0,
    )  # fmt: skip


def topology(cell: Cell, folder: Path) -> RunConfig:
    """The run of a cell. Model and prompts lie in `folder`, where `prepare` made them."""
    settings = {
        "run.name": f"{cell.preset}-{cell.staleness}",
        "run.seed": cell.seed,
        "run.steps": cell.steps,
        "model.path": folder / "tiny-llama",
        "prompts.path": folder / "letters.jsonl",
        "algorithm.preset": cell.preset,
        "algorithm.learning_rate": cell.learning_rate,
        "staleness.bound": cell.staleness,
        "evaluate.every": EVALUATE_EVERY,
        "checkpoint.every": 0,
        **{f"algorithm.overrides.{key}": value for key, value in cell.overrides.items()},
    }
    return load(TOPOLOGY, [f"{key}={value}" for key, value in settings.items()])


def prepare(folder: Path) -> None:
    """The model and the prompts, the same bytes every time."""
    from actors.models import make_tiny_llama
    from actors.prompts_data import write

    make_tiny_llama(folder / "tiny-llama")
    write("letters", folder / "letters.jsonl")


@contextmanager
def cluster_for(cells: Sequence[Cell], folder: Path) -> Iterator[WarmCluster]:
    """Processes in which any of the cells can be run."""
    widest = topology(max(cells, key=lambda c: c.staleness), folder)
    places = make_plan(widest, local_inventory()).placements
    first = RunDirectory(folder / "runs" / "start").prepared()
    most = widest.slots * widest.sampling.group_size
    with WarmCluster(
        widest, places, first, preflight(widest).context, say=lambda _: None, most_sequences=most
    ) as cluster:
        yield cluster


def measure(cluster: WarmCluster, cell: Cell, folder: Path) -> Cell:
    """Run one cell to its end. Raises RoleDied when a part dies or the run takes longer than CELL_S."""
    config = topology(cell, folder)
    shutil.rmtree(folder / "runs" / config.run.name, ignore_errors=True)  # of a try that was interrupted
    directory = RunDirectory(folder / "runs" / config.run.name).prepared()
    directory.write_config(config.to_yaml())
    cluster.turn_to(config, directory)
    cluster.start()
    began = time.monotonic()
    cluster.begin()
    while not cluster.poll(0.5):
        if time.monotonic() > began + CELL_S:
            raise RoleDied(f"{cell.preset} at staleness {cell.staleness} took longer than {CELL_S:.0f} s")
    seconds = time.monotonic() - began
    cluster.call("learner", "drain", "run_ended", timeout_s=DRAIN_S)
    late = cluster.await_loops(("rollout", "reward"), DRAIN_S)
    if late:
        raise RoleDied(f"{', '.join(late)} did not end within {DRAIN_S:.0f} s of draining")
    cluster.rest()
    return result(cell, directory, seconds)


def result(cell: Cell, directory: RunDirectory, seconds: float) -> Cell:
    """What a finished run's own files say."""
    rows = directory.metrics()
    found = audit(directory.journal, directory.trained_path)
    wrong = check_spans(directory, cell.staleness).wrong
    scores = [e["score"] for e in directory.events() if e["event"] == "evaluation"]
    margins = [row["preference/margin"] for row in rows if row.get("preference/margin") is not None]
    return replace(
        cell,
        held_out=[round(s, 4) for s in scores],
        reward=[round(row["reward/mean"], 4) for row in rows],
        margin=[round(m, 4) for m in margins],
        staleness_mean=round(sum(row["staleness/mean"] for row in rows) / len(rows), 3),
        staleness_max=int(max(row["staleness/max"] for row in rows)),
        trained=found.trained,
        dropped=dict(found.dropped),
        books=found.clean and not found.in_flight and not wrong,
        seconds=round(seconds, 1),
    )


def run_all(cells: Sequence[Cell], folder: Path, out: Path) -> int:
    """Run the cells that the file lacks, appending to it; returns how many could not be run."""
    done = {c.key for c in learning_table.read(out)}
    waiting = [c for c in cells if c.key not in done]
    failed = 0
    log = JsonLines(out)
    while waiting:
        try:
            with cluster_for(waiting, folder) as cluster:
                while waiting:
                    cell = measure(cluster, waiting.pop(0), folder)
                    log.append(cell.line())
                    print(said(cell), flush=True)
        except RoleDied as error:  # its processes are gone: the next cell gets new ones
            failed += 1
            print(f"FAILED: {error}", file=sys.stderr, flush=True)
    log.close()
    return failed


def said(cell: Cell) -> str:
    step = TARGET.steps_to(cell)
    verdict = f"step {step}" if step else "NOT REACHED"
    books = "" if cell.books else "  BOOKS WRONG"
    return (
        f"{cell.preset:22} bound {cell.staleness}  held-out {cell.held_out_start:.2f} -> {cell.held_out_end:.2f}  "
        f"sampled {cell.reward[0]:.2f} -> {TARGET.sampled_end(cell):.2f}  {verdict:11}  "
        f"age {cell.staleness_mean:.1f} / {cell.staleness_max}  {cell.seconds:.0f} s{books}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace bench learning", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS, help="one JSON line per cell; cells in it are not rerun")
    parser.add_argument("--presets", nargs="+", choices=online(), default=online(), metavar="NAME")
    parser.add_argument("--staleness", nargs="+", type=int, choices=range(9), default=STALENESS, metavar="S")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--runs", type=Path, help="keep the run directories here; default: they are deleted")
    parser.add_argument("--render", type=Path, metavar="PAGE", help="run nothing; put the file's table into this page")
    options = parser.parse_args(argv)
    if options.render:
        offline = learning_table.read_pairs(options.json.with_name("learning_pairs.jsonl"))
        learning_table.write_page(options.render, learning_table.read(options.json), offline)
        return 0
    cells = [planned(p, s, steps=options.steps) for p in options.presets for s in options.staleness]
    with tempfile.TemporaryDirectory(prefix="headrace-learning-") as scratch:
        folder = options.runs or Path(scratch)
        prepare(folder)
        failed = run_all(cells, folder.resolve(), options.json)
    keys = {c.key for c in cells}
    found = [c for c in learning_table.read(options.json) if c.key in keys]
    reached = sum(TARGET.reached(c) and c.books for c in found)
    print(f"{reached} of {len(cells)} cells reach the target; {failed} could not be run")
    return int(reached < len(cells))


if __name__ == "__main__":
    raise SystemExit(main())
