"""Which algorithm bears how much staleness? `python -m benchmarks.algorithms [--json FILE] [--seeds N]`

A policy small enough to know exactly: L positions, V tokens each, one table of logits. An answer's reward is the share
of positions that hold the wanted token, so the expected reward is a closed formula and needs no sampling to measure.

    weights of s updates ago  ->  sample P x G answers, log-probs with engine noise  ->  compute -> policy_loss -> Adam
                                          (same functions as training, same denominators)

Each cell of the table is the number of updates until the expected reward is 0.8 (chance: 1 / V), mean over seeds;
everything is seeded. It says which update rule is right and how it bears age, not how fast a language model learns.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from learner import advantages
from learner.choices import Choices
from learner.config import AlgorithmConfig
from learner.objective import policy_loss, step_keep, value_loss
from learner.presets import PRESETS, Setting, resolve
from learner.segments import Denominators

LENGTH, VOCABULARY, PROMPTS, GROUP = 4, 8, 4, 8
NOISE = 0.02  # standard deviation of engine against learner log-probs
STALENESS = (0, 1, 2, 4, 8)
TARGET = 0.8


def online() -> list[str]:
    """The presets this table is about: a policy is updated from scored answers."""
    return [n for n, c in PRESETS.items() if c.objective == "policy"]


def learn(preset: str, staleness: int, seed: int, steps: int = 100, rate: float = 0.1) -> int:
    """Updates until the target, each from answers sampled `staleness` updates ago; `steps` where it is not reached."""
    c = resolve(AlgorithmConfig.model_validate({"preset": preset}), Setting(group_size=GROUP, max_tokens=LENGTH))
    g = torch.Generator().manual_seed(seed)
    wanted = torch.randint(0, VOCABULARY, (LENGTH,), generator=g)
    logits = torch.zeros(LENGTH, VOCABULARY, requires_grad=True)
    values = torch.zeros(LENGTH, requires_grad=True)
    reference = logits.detach().clone()
    adam = torch.optim.Adam([logits, values], lr=rate)
    history = [logits.detach().clone()]
    for step in range(steps):
        sampler = history[max(0, step - staleness)]
        age = step - max(0, step - staleness)
        adam.zero_grad()
        _loss(c, logits, values, sampler, reference, wanted, age, g).backward()
        adam.step()
        history.append(logits.detach().clone())
        if expected_reward(logits.detach(), wanted) >= TARGET:
            return step + 1
    return steps


def expected_reward(logits: Tensor, wanted: Tensor) -> float:
    """The chance of the wanted token, averaged over positions."""
    return float(torch.softmax(logits, -1).gather(-1, wanted[:, None]).mean())


def _loss(
    c: Choices,
    logits: Tensor,
    values: Tensor,
    sampler: Tensor,
    reference: Tensor,
    wanted: Tensor,
    age: int,
    g: torch.Generator,
) -> Tensor:
    n = PROMPTS * GROUP
    chances = torch.softmax(sampler, -1).expand(n, LENGTH, VOCABULARY).reshape(-1, VOCABULARY)
    answers = torch.multinomial(chances, 1, generator=g).reshape(n, LENGTH)
    rewards = (answers == wanted).double().mean(dim=1)
    ids, groups = torch.arange(n).repeat_interleave(LENGTH), torch.arange(n) // GROUP
    mask = torch.ones(n * LENGTH, dtype=torch.bool)

    def chosen(table: Tensor) -> Tensor:
        return torch.log_softmax(table, -1).expand(n, -1, -1).gather(-1, answers[..., None]).reshape(-1)

    logp, old, ref = chosen(logits), chosen(logits.detach()), chosen(reference)
    mu = chosen(sampler) + NOISE * torch.randn(n * LENGTH, generator=g)
    v = values.expand(n, LENGTH).reshape(-1)
    adv = advantages.compute(
        c, rewards=rewards, group_ids=groups, mask=mask, sequence_ids=ids, components=rewards[:, None],
        component_weights=torch.ones(1), token_kl=old - ref, values=v.detach(),
    )  # fmt: skip
    keep = step_keep(c, scored=adv.scored, mask=mask, sequence_ids=ids, behaviour_logprobs=mu, old_logprobs=old)
    d = Denominators.count(mask, ids, groups)
    logz = torch.log_softmax(logits, -1)
    loss, _ = policy_loss(
        c, logprobs=logp, behaviour_logprobs=mu, ref_logprobs=ref, advantages=adv.per_token.float(), mask=mask,
        keep=keep, sequence_ids=ids, group_ids=groups, denominators=d, staleness=torch.full((n * LENGTH,), age),
        entropy=-(logz.exp() * logz).sum(-1).expand(n, -1).reshape(-1),
    )  # fmt: skip
    if adv.returns is None:
        return loss
    critic, _ = value_loss(c, values=v, old_values=v.detach(), returns=adv.returns.float(), mask=mask, denominators=d)
    return loss + critic


def table(seeds: int, steps: int = 100) -> dict[str, dict[int, float]]:
    """{preset: {staleness: mean number of updates}}"""
    return {
        name: {s: sum(learn(name, s, seed, steps) for seed in range(seeds)) / seeds for s in STALENESS}
        for name in online()
    }


def markdown(results: dict[str, dict[int, float]]) -> str:
    head = "| preset | " + " | ".join(f"staleness {s}" for s in STALENESS) + " |"
    rows = [f"| `{n}` | " + " | ".join(f"{r[s]:.0f}" for s in STALENESS) + " |" for n, r in results.items()]
    return "\n".join([head, "|" + "---|" * (len(STALENESS) + 1), *rows])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.algorithms", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    results = table(options.seeds, options.steps)
    print(markdown(results))
    line = json.dumps({"benchmark": "algorithms", "seeds": options.seeds, "steps": options.steps, "updates": results})
    if options.json:
        options.json.write_text(line + "\n", encoding="utf-8")
    else:
        print(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
