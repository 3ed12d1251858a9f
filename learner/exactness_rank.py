"""One rank of learner/exactness.py: walks the cases of its world; rank 0 compares each with its plain case.

    python -m learner.exactness_rank PLAN.json RANK

The folder of the plan holds what ranks and worlds leave each other: plain-<label>.safetensors (gradients and weights
of the plain case), <case>.checkpoint where a later case goes on from it, and found-<world>.jsonl, one line per case.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from learner import presets, snapshot
from learner.config import AlgorithmConfig, LearnerConfig
from learner.engine import LearnerEngine
from learner.exactness import Case
from rollout.types import Failed, Group, Scored, Status, Trajectory
from rollout.versions import VersionSpan

STEPS = 2
COLLECTIVE_S = 120.0


def groups_of(seed: int, n_groups: int = 7, size: int = 4) -> list[Group]:
    """Ragged groups of bytes; some answers begin with tool tokens whose log-probs are NaN, one verdict failed.

    Seven, so that ranks hold different numbers of them.
    """
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


def engine_of(model_dir: Path, case: Case) -> LearnerEngine:
    constant = presets.PRESETS[case.preset].aggregation == "constant"
    algorithm = AlgorithmConfig.model_validate(
        {
            "preset": case.preset, "learning_rate": 2e-4, "grad_clip": 0.5,
            "mini_batches": case.mini_batches, "epochs": case.epochs,
            "overrides": {"length_constant": 12.0} if constant else {},
        }
    )  # fmt: skip
    config = LearnerConfig.model_validate(
        {
            "ranks": case.world, "zero_stage": case.zero_stage, "compute_dtype": "float32",
            "packing": "padded" if case.layout == "padded" else "packed", "share_prompts": case.layout == "shared",
            "accumulation": case.accumulation, "token_budget": 100_000, "timeout_s": COLLECTIVE_S,
        }
    )  # fmt: skip
    choices = presets.resolve(algorithm)
    weights = {"exact": 1.0}
    return LearnerEngine(
        model_dir, choices, algorithm, config, serving_dtype="float32", component_weights=weights, max_tokens=12
    )


def run_case(model_dir: Path, case: Case, folder: Path, keep_checkpoint: bool) -> dict[str, Tensor]:
    """Two steps on this rank's share; what came out, under "gradient/..." and "weights/..."."""
    engine = engine_of(model_dir, case)
    kept: dict[str, Tensor] = {}
    if case.loads:
        engine.load_checkpoint(folder / f"{case.loads}.checkpoint")
    for step in range(engine.version, STEPS):
        groups = groups_of(step)
        engine.train_step([g for i, g in enumerate(groups) if i % case.world == engine.world.rank], step)
        if step == 0:  # after the first step the first moment is (1 - beta) times the clipped gradient
            kept |= {f"gradient/{n}": engine.zero.read(p, "exp_avg").clone() for n, p in engine.zero.trained()}
            if engine.critic:
                own = engine.critic
                kept |= {f"gradient/critic.{n}": own.read(p, "exp_avg").clone() for n, p in own.trained()}
            if keep_checkpoint:
                engine.save_checkpoint(folder / f"{case.name}.checkpoint")
    if not engine.world.agree(snapshot.fingerprint(engine)):
        raise RuntimeError(f"{case.name}: the ranks hold different weights")
    kept |= {f"weights/{name}": tensor.clone().contiguous() for name, tensor in engine.state_tensors()}
    if engine.critic:
        kept |= {f"weights/critic.{n}": engine.critic.read(p, "master").clone() for n, p in engine.critic.trained()}
    return kept


def difference(got: dict[str, Tensor], want: dict[str, Tensor], continued: bool) -> dict[str, float | str]:
    """The largest relative distance of any tensor, by kind; a continued case made only the second step."""
    if continued:
        want = {key: tensor for key, tensor in want.items() if key.startswith("weights/")}
    if got.keys() != want.keys():
        raise RuntimeError(f"other tensors than in the plain case: {sorted(got.keys() ^ want.keys())}")
    worst = {"gradient": (0.0, ""), "weights": (0.0, "")}
    for key, tensor in want.items():
        scale = float(tensor.norm())
        distance = float((got[key] - tensor).norm()) / scale if scale else float(got[key].norm())
        kind = key.partition("/")[0]
        worst[kind] = max(worst[kind], (distance if distance == distance else float("inf"), key))
    return {"gradient": worst["gradient"][0], "weights": worst["weights"][0], "worst": max(worst.values())[1]}


def main(plan_path: Path, rank: int) -> None:
    plan, folder = json.loads(plan_path.read_text()), plan_path.parent
    world = int(plan["world"])
    store = dist.FileStore(str(folder / f"meeting-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=COLLECTIVE_S))
    wanted = set(plan["wanted_checkpoints"])
    with open(folder / f"found-{world}.jsonl", "a", buffering=1) as found:
        for case in (Case(**raw) for raw in plan["cases"]):
            started = time.monotonic()
            got = run_case(Path(plan["model_dir"]), case, folder, case.name in wanted)
            if rank == 0:
                plain = folder / f"plain-{case.label}.safetensors"
                if case == case.plain:
                    save_file(got, plain)
                row = difference(got, load_file(plain), bool(case.loads))
                found.write(json.dumps({"name": case.name, "seconds": time.monotonic() - started} | row) + "\n")
            gc.collect()  # engines hold themselves in cycles; without this a thousand of them stay
            gc.freeze()  # what stays all the same is not looked through again and again


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
