"""Does the same batch give the same update, however it is cut? The claim of the learner that is easiest to get wrong.

    python -m learner.exactness MODEL_DIR [--full] [--json]

One global batch (ragged groups, tool tokens, NaNs where nothing may be read, a failed verdict) goes through

    world 1, 2, 4  x  accumulation 1, 2, 4  x  shared, packed, padded  x  ZeRO 0, 1, 2, 3      for a preset

and gradients (as AdamW saw them) and weights after two steps are compared with world 1, one padded micro-batch, no
ZeRO. Without --full a spanning subset runs, in which checkpoints also cross from one cut to another. The ranks are
real processes over gloo; each world runs its cases in turn.
Adam's first steps have the size of the learning rate however small a gradient is, so where one is rounding noise the
weight's last bits differ: the rate is 2e-4, and the comparison is in the norm of each tensor.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from rollout.errors import DeadlineError
from rollout.types import Failed, Group, Scored, Status, Trajectory
from rollout.versions import VersionSpan

STEPS = 2
TOLERANCE = 1e-5  # relative, in the norm of each tensor


@dataclass(frozen=True, slots=True)
class Case:
    """Case(world=2, accumulation=4, layout="shared", zero_stage=3, preset="dapo")."""

    world: int = 1
    accumulation: int = 1
    layout: str = "padded"
    zero_stage: int = 0
    preset: str = "dapo"
    loads: str = ""  # the name of a case, of no more ranks, whose checkpoint after the first step this one goes on from

    @property
    def name(self) -> str:
        cut = f"{self.preset}-w{self.world}-a{self.accumulation}-{self.layout}-z{self.zero_stage}"
        return f"{cut}-after-{self.loads}" if self.loads else cut


@dataclass(frozen=True, slots=True)
class Difference:
    """Largest relative difference of a case to the plain one; `worst` is the tensor it was found in."""

    case: Case
    gradient: float
    weights: float
    worst: str

    @property
    def holds(self) -> bool:
        return max(self.gradient, self.weights) <= TOLERANCE


def full(preset: str) -> list[Case]:
    """Every combination."""
    cuts = itertools.product((1, 2, 4), (1, 2, 4), ("shared", "packed", "padded"), (0, 1, 2, 3))
    return [Case(world, accumulation, layout, stage, preset) for world, accumulation, layout, stage in cuts]


def spanning(preset: str) -> list[Case]:
    """Every value of every axis, each ZeRO stage with 1 and 2 ranks, the far corner, and checkpoints across them."""
    layouts, counts = ("shared", "packed", "padded"), (1, 2, 4)
    pairs = enumerate(itertools.product((1, 2), (0, 1, 2, 3)))
    cases = [Case(world, counts[i % 3], layouts[(i + i // 3) % 3], stage, preset) for i, (world, stage) in pairs]
    far = Case(4, 2, "shared", 3, preset)
    up = Case(2, 2, "shared", 3, preset, loads=Case(preset=preset).name)
    return [*cases, far, up, Case(4, 1, "packed", 1, preset, loads=cases[-1].name)]


def compare(model_dir: Path, cases: Sequence[Case], timeout_s: float = 600.0) -> list[Difference]:
    """Run the cases and their plain ones. Raises DeadlineError, or RuntimeError with a rank's last words."""
    plain = {case.preset: Case(preset=case.preset) for case in cases}
    wanted = sorted({*cases, *plain.values()}, key=lambda c: c.world)
    with tempfile.TemporaryDirectory() as folder:
        for world, of_world in itertools.groupby(wanted, key=lambda c: c.world):
            _run_world(model_dir, world, list(of_world), Path(folder), timeout_s)
        return [_difference(Path(folder), case, plain[case.preset]) for case in cases]


def _run_world(model_dir: Path, world: int, cases: Sequence[Case], folder: Path, timeout_s: float) -> None:
    """One process per rank, all cases of this world in turn."""
    order = json.dumps([asdict(c) for c in cases])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(world):
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank),
        }  # fmt: skip
        command = [
            sys.executable,
            "-m",
            "learner.exactness",
            str(model_dir),
            "--rank-of",
            str(folder),
            "--cases",
            order,
        ]
        log = open(folder / f"rank-{world}-{rank}.log", "wb")  # noqa: SIM115 - closed with the process below
        ranks.append((subprocess.Popen(command, env=environment, stdout=log, stderr=log), log))
    deadline = time.monotonic() + timeout_s
    try:
        for rank, (process, _) in enumerate(ranks):
            code = process.wait(max(deadline - time.monotonic(), 0.1))
            if code:
                words = (folder / f"rank-{world}-{rank}.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"rank {rank} of {world} ended with code {code}:\n{words}")
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(f"{world} ranks to finish {len(cases)} cases", timeout_s) from error
    finally:
        for process, log in ranks:
            process.kill()
            process.wait()
            log.close()


def _difference(folder: Path, case: Case, plain: Case) -> Difference:
    from safetensors.torch import load_file

    got, want = load_file(folder / f"{case.name}.safetensors"), load_file(folder / f"{plain.name}.safetensors")
    if case.loads:
        want = {key: tensor for key, tensor in want.items() if key.startswith("weights/")}
    if got.keys() != want.keys():
        raise RuntimeError(f"{case.name} wrote other tensors than {plain.name}: {sorted(got.keys() ^ want.keys())}")
    worst = {"gradient": (0.0, ""), "weights": (0.0, "")}
    for key, tensor in want.items():
        scale = float(tensor.norm())
        distance = float((got[key] - tensor).norm()) / scale if scale else float(got[key].norm())
        kind = key.partition("/")[0]
        worst[kind] = max(worst[kind], (distance if distance == distance else float("inf"), key))
    return Difference(case, worst["gradient"][0], worst["weights"][0], max(worst.values())[1])


# ---- one rank -------------------------------------------------------------------------------------------------------


def groups_of(seed: int, n_groups: int = 8, size: int = 4) -> list[Group]:
    """Ragged groups of bytes; some answers begin with tool tokens whose log-probs are NaN, one verdict failed."""
    rng = np.random.default_rng(seed)
    made = []
    for g in range(n_groups):
        answers = []
        for i in range(size):
            n = int(rng.integers(2, 12))
            mask, logprobs = np.ones(n, bool), rng.normal(-5.5, 0.5, n).astype(np.float32)
            if n > 5 and i % 2:
                mask[:2], logprobs[:2] = False, np.nan
            reward = float(rng.integers(0, 3)) if i < 2 else float(i)
            verdict = Failed("raised") if (g, i) == (1, 1) else Scored(reward, {"exact": reward})
            tokens = rng.integers(0, 256, n).astype(np.int32)
            status = Status.TRUNCATED if n > 9 else Status.FINISHED
            answers.append(Trajectory(tokens, mask, logprobs, (VersionSpan(0, 0, n),), status, verdict))
        prompt = rng.integers(0, 256, int(rng.integers(3, 20))).astype(np.int32)
        made.append(Group(g, prompt, tuple(answers)))
    return made


def run_case(model_dir: Path, case: Case, folder: Path) -> None:
    """Two steps on this rank's share; rank 0 writes what came out."""
    from safetensors.torch import save_file
    from torch import Tensor

    from learner import presets
    from learner.config import AlgorithmConfig, LearnerConfig
    from learner.engine import LearnerEngine

    overrides: dict[str, float] = (
        {"length_constant": 12.0} if presets.PRESETS[case.preset].aggregation == "constant" else {}
    )
    algorithm = AlgorithmConfig.model_validate(
        {"preset": case.preset, "learning_rate": 2e-4, "grad_clip": 0.5, "overrides": overrides}
    )
    config = LearnerConfig.model_validate(
        {
            "ranks": case.world, "zero_stage": case.zero_stage, "compute_dtype": "float32",
            "packing": "padded" if case.layout == "padded" else "packed", "share_prompts": case.layout == "shared",
            "accumulation": case.accumulation, "token_budget": 100_000,
        }
    )  # fmt: skip
    engine = LearnerEngine(
        model_dir,
        presets.resolve(algorithm),
        algorithm,
        config,
        serving_dtype="float32",
        component_weights={"exact": 1.0},
    )
    kept: dict[str, Tensor] = {}
    if case.loads:
        engine.load_checkpoint(folder / f"{case.loads}.checkpoint")
    for step in range(engine.version, STEPS):
        groups = groups_of(step)
        engine.train_step([g for i, g in enumerate(groups) if i % case.world == engine.world.rank], step)
        if step == 0:  # after the first step the first moment is (1 - beta) times the clipped gradient
            kept |= {f"gradient/{n}": engine.zero.read(p, "exp_avg").clone() for n, p in engine.zero.trained()}
        if step == 0:
            engine.save_checkpoint(folder / f"{case.name}.checkpoint")
    kept |= {f"weights/{name}": tensor.clone().contiguous() for name, tensor in engine.state_tensors()}
    if engine.world.rank == 0:
        save_file(kept, folder / f"{case.name}.safetensors")


def _table(differences: Iterable[Difference]) -> str:
    rows = [f"{'case':44} {'gradient':>10} {'weights':>10}"]
    for d in differences:
        rows.append(f"{d.case.name:44} {d.gradient:10.1e} {d.weights:10.1e} {'' if d.holds else '  <- ' + d.worst}")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="learner.exactness", description=__doc__.splitlines()[0])
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--full", action="store_true", help="the whole matrix instead of a spanning subset")
    parser.add_argument("--preset", action="append", help="default: dapo; may be given several times")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rank_of:
        for raw in json.loads(options.cases):
            run_case(options.model_dir, Case(**raw), options.rank_of)
        return 0
    presets = options.preset or ["dapo"]
    cases = [case for preset in presets for case in (full(preset) if options.full else spanning(preset))]
    differences = compare(options.model_dir, cases, timeout_s=600.0 + 10.0 * len(cases))
    if options.json:
        print(json.dumps([asdict(d) | {"holds": d.holds} for d in differences]))
    else:
        print(_table(differences))
    return 0 if all(d.holds for d in differences) else 1


if __name__ == "__main__":
    sys.exit(main())
