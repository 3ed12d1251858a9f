"""Does a journal teach without new rollouts? A finished run's groups become pairs, and DPO learns from them alone.

headrace bench learning_pairs RUN_DIR [--json FILE] [--preset dpo]

RUN_DIR/journal -> read_groups -> form_pairs     best against worst of each group; every fourth pair is held out
                -> policy_step                   the run's model as it was before the run, through DeepSpeed
margin     beta times the mean difference of log-ratios on the held-out pairs, by the canary's scoring function
reward     greedy answers to the run's held-out prompts, judged by the run's own reward processes
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from actors.evaluation import Answer, evaluate
from actors.prompts import answer_text
from actors.role import Task
from benchmarks.learning_table import FromJournal
from launch.config import RunConfig, load
from launch.preflight import preflight
from launch.run_dir import RunDirectory
from learner.config import AlgorithmConfig
from learner.engine import LearnerEngine
from learner.preference import Pair, form_pairs
from learner.preference_step import policy_step
from learner.presets import resolve
from rollout.event_log import JsonLines
from rollout.journal import read_groups
from rollout.types import Prompt

LEARNING_RATE = 6e-3
PAIRS_PER_STEP = 8
HELD_OUT_EVERY = 4  # one pair in so many is not learnt from


def learn(run: RunDirectory, preset: str = "dpo", steps: int = 24) -> FromJournal:
    """DPO on the pairs of a finished run's journal, from the weights the run began with."""
    config = load(run.config_path)
    algorithm = AlgorithmConfig(preset=preset, groups_per_step=PAIRS_PER_STEP, learning_rate=LEARNING_RATE)
    choices = resolve(algorithm)
    engine = LearnerEngine(
        config.model.path, choices, algorithm, config.topology.learner, "cpu", config.run.seed,
        temperature=config.sampling.temperature, serving_dtype=config.model.dtype, total_steps=steps,
    )  # fmt: skip
    pairs = list(form_pairs(read_groups(run.journal, fate="trained", verdict="scored")))
    held_out = pairs[::HELD_OUT_EVERY]
    training = [pair for n, pair in enumerate(pairs) if n % HELD_OUT_EVERY]
    asked = Exam(config, run)
    before, reward_before = gaps(engine, held_out), asked.take(engine)
    for step in range(steps):
        at = step * PAIRS_PER_STEP
        policy_step(engine, [training[(at + n) % len(training)] for n in range(PAIRS_PER_STEP)])
        engine.version += 1
    beta = choices.preference_beta
    margins = [beta * (after - old) for after, old in zip(gaps(engine, held_out), before, strict=True)]
    right = sum(m > 0 for m in margins) / len(margins)
    reward = (round(reward_before, 3), round(asked.take(engine), 3))
    margin = (0.0, round(sum(margins) / len(margins), 3))
    return FromJournal(preset, config.run.name, len(training), len(held_out), steps, margin, round(right, 3), reward)


def gaps(engine: LearnerEngine, pairs: Sequence[Pair]) -> list[float]:
    """log pi(chosen) - log pi(rejected) of each pair, under the present weights."""

    def logprob(pair: Pair, token_ids: Any) -> float:
        return float(engine.score(pair.prompt_ids.tolist(), token_ids.tolist()).sum())

    return [logprob(p, p.chosen.token_ids) - logprob(p, p.rejected.token_ids) for p in pairs]


class Exam:
    """The run's held-out prompts and rewards, for weights that no engine serves: transformers answers, greedily."""

    def __init__(self, config: RunConfig, run: RunDirectory) -> None:
        self.config, self.run = config, run
        context = preflight(config).context
        task = Task(str(run.path), config.run.seed, config.model, config.prompts, config.sampling, context)
        self.prompts = task.prompt_source()

    def take(self, engine: LearnerEngine) -> float:
        """The mean held-out reward of the engine's present weights."""
        from transformers import AutoModelForCausalLM

        from actors.rewards import build

        with tempfile.TemporaryDirectory() as folder:
            engine.export_hf(Path(folder) / "model")
            model = AutoModelForCausalLM.from_pretrained(Path(folder) / "model").eval()

        def answers(prompts: Sequence[Prompt]) -> list[Answer]:
            return [self._answer(model, p, engine.version) for p in prompts]

        scorer = build(self.config.rewards, log_dir=self.run.logs)
        try:
            return evaluate(self.prompts.held_out(), engine.version, answers, scorer.judge).score
        finally:
            scorer.close()

    def _answer(self, model: Any, prompt: Prompt, version: int) -> Answer:
        import torch

        ids = torch.tensor([[int(t) for t in prompt.token_ids]])
        out = model.generate(ids, do_sample=False, max_new_tokens=self.config.sampling.max_tokens)
        tokens = out[0, ids.shape[1] :].tolist()
        return answer_text(self.prompts.tokenizer, tokens, self.config.sampling.stop), tokens, [version]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace bench learning_pairs", description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="a finished run")
    parser.add_argument("--preset", default="dpo")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", type=Path, help="append one line to this file")
    options = parser.parse_args(argv)
    found = learn(RunDirectory.open(options.run_dir), options.preset, options.steps)
    print(json.dumps(asdict(found)))
    if options.json is not None:
        JsonLines(options.json).append(asdict(found))
    return int(not (found.margin[1] > 0 and found.reward[1] > found.reward[0]))


if __name__ == "__main__":
    raise SystemExit(main())
