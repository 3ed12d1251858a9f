"""Learning from pairs on a real tiny model: the step's gradient is that of the loss written out in one graph, however
the pairs are packed; DPO on pairs from a journal's groups raises the margin and the preference for held-out answers;
a reward model ranks more than nine in ten held-out pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from learner import preference_step
from learner.choices import Choices
from learner.config import AlgorithmConfig, LearnerConfig
from learner.critic import CriticModule
from learner.look import Stepped
from learner.policy import Inputs, PolicyOutput, layout_of, load_policy
from learner.preference import Pair, dpo_sigmoid, form_pairs
from learner.preference_data import PairTokens
from learner.preference_step import PairShare
from learner.reference import Copy
from learner.world import World
from rollout.types import Group, Scored, Status, Trajectory
from rollout.versions import VersionSpan

CPU = torch.device("cpu")


class Plain:
    """An Updater or Scorer without DeepSpeed: a module and AdamW."""

    version, temperature, kl_coef, max_tokens = 0, 1.0, 0.0, None
    component_names, component_weights, critic = (), None, None

    def __init__(self, model_dir: Path, scorer: bool = False, rate: float = 3e-3, **config: Any) -> None:
        self.choices = Choices(preset="dpo", objective="preference", preference_beta=0.3)
        self.algorithm = AlgorithmConfig(preset="dpo")
        self.config = LearnerConfig.model_validate({"compute_dtype": "float32", **config})
        self.layout, self.world = layout_of(self.config), World(0, 1, CPU)
        torch.manual_seed(0)
        self.reference = None if scorer else Copy(model_dir, self.config, CPU)
        self.module = CriticModule(model_dir, self.config, CPU) if scorer else load_policy(model_dir, self.config, CPU)
        self.arguments: tuple[float, ...] = () if scorer else (self.temperature,)
        self.adam = torch.optim.AdamW(self.module.parameters(), lr=rate, weight_decay=0.0)

    def forward(self, inputs: Inputs) -> Any:
        return self.module(inputs, *self.arguments)

    def look(self, inputs: Inputs) -> Any:
        with torch.no_grad():
            return self.forward(inputs)

    def look_values(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        raise AssertionError("pairs need no critic")

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def step(self) -> Stepped:
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None]))
        self.adam.step()
        self.last = {n: p.grad.clone() for n, p in self.module.named_parameters() if p.grad is not None}
        self.adam.zero_grad()
        return Stepped(norm, 0.0, True)


def words(rng: np.random.Generator, letter: str | None, length: int) -> np.ndarray:
    """Random small letters; with `letter`, half of them are that letter."""
    ids = rng.integers(ord("a"), ord("z") + 1, length).astype(np.int32)
    if letter is not None:
        ids[rng.permutation(length)[: length // 2]] = ord(letter)
    return ids


def pairs(n: int, seed: int) -> list[PairTokens]:
    """The answer with more q is preferred."""
    rng = np.random.default_rng(seed)
    return [
        PairTokens(
            words(rng, None, int(rng.integers(3, 9))), words(rng, "q", 8), words(rng, "x", int(rng.integers(4, 9)))
        )
        for _ in range(n)
    ]


@pytest.mark.parametrize(
    "config", [{}, {"token_budget": 16}, {"share_prompts": False, "token_budget": 40}, {"packing": "padded"}]
)
def test_the_gradient_is_that_of_the_whole_graph(tiny_model: Path, config: dict[str, Any]) -> None:
    """Pairs torn over micro-batches of 16 tokens, padded, with and without shared prompts: one gradient."""
    some = pairs(3, 1)
    plain = Plain(tiny_model)
    share = PairShare.of(some)
    (batch,) = preference_step.pack(share.answers, token_budget=10_000, layout="packed")
    inputs = Inputs.of(batch, CPU)
    # the first step starts at the reference, where every D is 0: move the policy away from it
    with torch.no_grad():
        ref = plain.reference.look(inputs, 1.0) + 0.1 * torch.sin(torch.arange(batch.n_loss).float())  # type: ignore[union-attr]
    shifted = ref.clone()
    out: PolicyOutput = plain.forward(inputs)
    ids, origin = share.sequence_ids, torch.from_numpy(batch.origin)
    sums = torch.zeros(len(share.answers)).index_add(0, ids[origin], out.logprobs - shifted)
    dpo_sigmoid(sums[share.chosen] - sums[share.rejected], 0.3).mean().backward()
    want = {n: p.grad for n, p in plain.module.named_parameters() if p.grad is not None}

    flat = torch.zeros(len(share.mask))
    flat[origin] = shifted
    other = Plain(tiny_model, **config)

    class Shifted:
        """The reference of the graph above, for any packing."""

        batches: list[Any] = []  # noqa: RUF012

        def look(self, inputs: Inputs, temperature: float) -> Tensor:
            return flat[torch.from_numpy(self.batches.pop(0).origin)]

    Shifted.batches = preference_step.pack(share.answers, token_budget=other.config.token_budget, layout=other.layout)
    assert config == {} or config == {"packing": "padded"} or len(Shifted.batches) > 1
    other.reference = Shifted()  # type: ignore[assignment]
    preference_step.policy_step(other, some)
    assert want.keys() == other.last.keys()
    for name, grad in want.items():
        assert grad is not None
        torch.testing.assert_close(other.last[name], grad, rtol=1e-4, atol=1e-6)


def as_groups(n: int, seed: int) -> list[Group]:
    """Journal groups of four answers; the reward is the share of q."""
    rng = np.random.default_rng(seed)
    groups = []
    for ordinal in range(n):
        answers = []
        for letter in (None, "q", "x", "q"):
            ids = words(rng, letter, 8)
            value = float((ids == ord("q")).mean())
            answers.append(
                Trajectory(
                    ids,
                    np.ones(8, bool),
                    np.zeros(8, np.float32),
                    (VersionSpan(3, 0, 8),),
                    Status.FINISHED,
                    Scored(value),
                )
            )
        groups.append(Group(ordinal, words(rng, None, 5), tuple(answers)))
    return groups


def test_dpo_on_journal_pairs_raises_the_margin_and_the_preference_for_held_out_answers(tiny_model: Path) -> None:
    plain = Plain(tiny_model)
    train, held_out = list(form_pairs(as_groups(24, 0), oldest=1)), list(form_pairs(as_groups(16, 9)))
    assert len(train) == 24
    first = preference_step.policy_step(plain, train)
    assert first["preference/margin"] == pytest.approx(0, abs=1e-4), "it starts at the reference"
    for _ in range(12):
        last = preference_step.policy_step(plain, train)
    assert last["preference/margin"] > 0.5 and last["preference/accuracy"] > 0.95
    assert last["preference/loss"] < 0.7 * first["preference/loss"]
    assert preferred(plain, held_out) > 0.9


def preferred(plain: Plain, some: list[Pair]) -> float:
    """Share of pairs whose chosen answer gained more than the rejected one against the reference."""
    share = PairShare.of(some)
    (batch,) = preference_step.pack(share.answers, token_budget=10_000, layout=plain.layout)
    inputs, origin = Inputs.of(batch, CPU), torch.from_numpy(batch.origin)
    gained = plain.look(inputs).logprobs - plain.reference.look(inputs, 1.0)  # type: ignore[union-attr]
    sums = torch.zeros(len(share.answers)).index_add(0, share.sequence_ids[origin], gained)
    return float((sums[share.chosen] > sums[share.rejected]).float().mean())


def test_a_reward_model_ranks_held_out_pairs(tiny_model: Path) -> None:
    scorer = Plain(tiny_model, scorer=True)
    train, held_out = pairs(32, 0), PairShare.of(pairs(40, 5))
    first = preference_step.reward_step(scorer, train)
    assert first["reward_model/loss"] == pytest.approx(np.log(2), abs=1e-5), "the head starts at 0"
    for _ in range(25):
        preference_step.reward_step(scorer, train)
    found = preference_step.scores(scorer, held_out)
    assert float((found[held_out.chosen] > found[held_out.rejected]).float().mean()) > 0.9


def test_without_a_reference_it_says_so(tiny_model: Path) -> None:
    plain = Plain(tiny_model)
    plain.reference = None
    with pytest.raises(ValueError, match="reference"):
        preference_step.policy_step(plain, pairs(1, 0))
