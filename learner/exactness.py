"""Does the same batch give the same update, however it is cut? The claim of the learner that is easiest to get wrong.

    python -m learner.exactness MODEL_DIR [--full] [--preset P ... | --every-preset] [--updates M E]
        [--folder F] [--json]

One global batch (ragged groups, tool tokens, NaNs where nothing may be read, a failed verdict) goes through

    world 1, 2, 4  x  accumulation 1, 2, 4  x  shared, packed, padded  x  ZeRO 0, 1, 2, 3      for a preset

and gradients (as AdamW saw them) and weights after two steps are compared with world 1, one padded micro-batch, no
ZeRO. Without --full a spanning subset runs, in which checkpoints also cross from one cut to another. The ranks are
real processes over gloo (learner/exactness_rank.py); each world starts once and runs all its cases in turn.
Adam's first steps have the size of the learning rate however small a gradient is, so where one is rounding noise the
weight's last bits differ: the rate is 2e-4, and the comparison is in the norm of each tensor.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from learner.presets import PRESETS
from rollout.errors import DeadlineError

TOLERANCE = 1e-5  # relative, in the norm of each tensor
KINDS = ("gradient", "weights")
CASES_PER_LIFE = 100  # of a rank's process: DeepSpeed keeps something of every engine (10 MB of a tiny one)
WORLDS, ACCUMULATIONS, LAYOUTS, STAGES = (1, 2, 4), (1, 2, 4), ("shared", "packed", "padded"), (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Case:
    """Case(world=2, accumulation=4, layout="shared", zero_stage=3, preset="dapo")."""

    world: int = 1
    accumulation: int = 1
    layout: str = "padded"
    zero_stage: int = 0
    preset: str = "dapo"
    mini_batches: int = 1
    epochs: int = 1
    loads: str = ""  # the name of a case, of no more ranks, whose checkpoint after the first step this one goes on from

    @property
    def name(self) -> str:
        cut = f"{self.label}-w{self.world}-a{self.accumulation}-{self.layout}-z{self.zero_stage}"
        return f"{cut}-after-{self.loads}" if self.loads else cut

    @property
    def label(self) -> str:
        """What is learned, without how it is cut."""
        return self.preset + (f"-{self.epochs}x{self.mini_batches}" if self.epochs * self.mini_batches > 1 else "")

    @property
    def plain(self) -> Case:
        """What this case is compared with."""
        return Case(preset=self.preset, mini_batches=self.mini_batches, epochs=self.epochs)


@dataclass(frozen=True, slots=True)
class Difference:
    """Largest relative difference of a case to the plain one; `worst` is the tensor it was found in."""

    case: Case
    gradient: float
    weights: float
    worst: str
    seconds: float

    @property
    def holds(self) -> bool:
        return max(self.gradient, self.weights) <= TOLERANCE


def full(preset: str) -> list[Case]:
    """Every combination."""
    cuts = itertools.product(WORLDS, ACCUMULATIONS, LAYOUTS, STAGES)
    return [Case(world, accumulation, layout, stage, preset) for world, accumulation, layout, stage in cuts]


def spanning(preset: str) -> list[Case]:
    """Every value of every axis, each ZeRO stage with 1 and 2 ranks, the far corner, and checkpoints across them."""
    pairs = enumerate(itertools.product((1, 2), STAGES))
    cases = [Case(world, ACCUMULATIONS[i % 3], LAYOUTS[(i + i // 3) % 3], stage, preset) for i, (world, stage) in pairs]
    far = Case(4, 2, "shared", 3, preset)
    up = Case(2, 2, "shared", 3, preset, loads=Case(preset=preset).name)
    return [*cases, far, up, Case(4, 1, "packed", 1, preset, loads=cases[-1].name)]


def compare(
    model_dir: Path, cases: Sequence[Case], timeout_s: float = 600.0, folder: Path | None = None
) -> list[Difference]:
    """Run the cases, their plain ones first. Raises DeadlineError, or RuntimeError with a rank's last words.

    What is found stays in `folder`, if one is named, and is not run again.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as name:
            return compare(model_dir, cases, timeout_s, Path(name))
    folder.mkdir(parents=True, exist_ok=True)
    every = sorted({*cases, *(c.plain for c in cases)}, key=lambda c: (c.world, c != c.plain))
    deadline, done = time.monotonic() + timeout_s, _found(folder)
    left = [c for c in every if c.name not in done]
    wanted = {c.loads for c in every}
    for world in sorted({c.world for c in left}):
        its = [c for c in left if c.world == world]
        for at in range(0, len(its), CASES_PER_LIFE):
            _run_world(model_dir, world, its[at : at + CASES_PER_LIFE], wanted, folder, deadline)
    found = _found(folder)
    return [Difference(case, **found[case.name]) for case in cases]


def _found(folder: Path) -> dict[str, dict[str, Any]]:
    """What ranks wrote so far, by the name of the case."""
    lines = [line for path in folder.glob("found-*.jsonl") for line in path.read_text().splitlines()]
    return {row.pop("name"): row for row in map(json.loads, lines)}


def _run_world(
    model_dir: Path, world: int, cases: Sequence[Case], wanted: set[str], folder: Path, deadline: float
) -> None:
    """One process per rank, these cases of its world in turn. They meet in a file: no port, no name server."""
    (folder / f"meeting-{world}").unlink(missing_ok=True)
    plan = folder / f"plan-{world}.json"
    plan.write_text(
        json.dumps({
            "model_dir": str(model_dir), "world": world, "cases": [asdict(c) for c in cases],
            "wanted_checkpoints": sorted(wanted),
        })
    )  # fmt: skip
    ranks = []
    for rank in range(world):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
        log = open(folder / f"rank-{world}-{rank}.log", "wb")  # noqa: SIM115 - closed with the process below
        command = [sys.executable, "-m", "learner.exactness_rank", str(plan), str(rank)]
        ranks.append((subprocess.Popen(command, env=environment, stdout=log, stderr=log), log))
    try:
        for rank, (process, _) in enumerate(ranks):
            code = process.wait(max(deadline - time.monotonic(), 0.1))
            if code:
                raise RuntimeError(f"rank {rank} of {world} ended with code {code}\n{_last_words(folder, world)}")
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(f"{world} ranks to finish their cases", error.timeout) from error
    finally:
        for process, log in ranks:
            process.kill()
            process.wait()
            log.close()


def _last_words(folder: Path, world: int) -> str:
    """Of every rank: the one that ended first is often not the one that failed."""
    logs = sorted(folder.glob(f"rank-{world}-*.log"))
    return "\n".join(f"--- {log.stem}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)


def _table(differences: Iterable[Difference]) -> str:
    rows = [f"{'case':60} {'gradient':>10} {'weights':>10} {'seconds':>8}"]
    for d in differences:
        verdict = "" if d.holds else "  <- " + d.worst
        rows.append(f"{d.case.name:60} {d.gradient:10.1e} {d.weights:10.1e} {d.seconds:8.2f} {verdict}")
    return "\n".join(rows)


def _summary(differences: Sequence[Difference]) -> str:
    held, worst = sum(d.holds for d in differences), {k: max(getattr(d, k) for d in differences) for k in KINDS}
    figures = ", ".join(f"{kind} {value:.1e}" for kind, value in worst.items())
    return f"{held} of {len(differences)} cases within {TOLERANCE:g}; worst: {figures}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="learner.exactness", description=__doc__.splitlines()[0])
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--full", action="store_true", help="the whole matrix instead of a spanning subset")
    parser.add_argument("--preset", action="append", help="default: dapo; may be given several times")
    parser.add_argument("--every-preset", action="store_true")
    parser.add_argument("--updates", type=int, nargs=2, metavar=("MINI_BATCHES", "EPOCHS"), default=(1, 1))
    parser.add_argument("--folder", type=Path, help="keep what is found here, and go on from it when run again")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    presets = list(PRESETS) if options.every_preset else options.preset or ["dapo"]
    cases = [case for preset in presets for case in (full(preset) if options.full else spanning(preset))]
    if options.updates != (1, 1):
        mini_batches, epochs = options.updates
        cases = [replace(c, mini_batches=mini_batches, epochs=epochs) for c in cases if not c.loads]
    differences = compare(options.model_dir, cases, timeout_s=600.0 + 10.0 * len(cases), folder=options.folder)
    if options.json:
        print(json.dumps([asdict(d) | {"holds": d.holds} for d in differences]))
    else:
        print(_table(differences), _summary(differences), sep="\n")
    return 0 if all(d.holds for d in differences) else 1


if __name__ == "__main__":
    sys.exit(main())
