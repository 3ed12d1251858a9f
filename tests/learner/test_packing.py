"""Proves that packing neither loses nor doubles a token, keeps its budget, and that packed equals unpacked.

Equal means: hidden states, log-probs and gradients of shared, packed and padded layouts agree on the same answers,
for both attention kernels, with answers of very different lengths.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner import attention
from learner.config import LearnerConfig
from learner.packing import Answer, Layout, pack
from learner.policy import Inputs, load_policy
from rollout.errors import ConfigError

LAYOUTS: tuple[Layout, ...] = ("shared", "packed", "padded")


def answers_of(shape: list[tuple[int, list[int]]], seed: int = 0, holes: bool = False) -> list[Answer]:
    """`[(prompt length, [answer lengths])]` -> answers with random bytes; `holes` masks some tokens out."""
    rng = np.random.default_rng(seed)
    made: list[Answer] = []
    first = 0
    for group, (n_prompt, lengths) in enumerate(shape):
        prompt = rng.integers(0, 256, n_prompt).astype(np.int32)
        for n in lengths:
            mask = rng.random(n) < 0.6 if holes else np.ones(n, bool)
            mask[-1] = True
            made.append(Answer(len(made), group, first, prompt, rng.integers(0, 256, n).astype(np.int32), mask))
            first += n
    return made


shapes = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 7), min_size=1, max_size=5)), max_size=5)


@settings(deadline=None, max_examples=200)
@given(shape=shapes, budget=st.integers(1, 60), layout=st.sampled_from(LAYOUTS), at_least=st.integers(1, 4))
def test_every_loss_position_appears_once_with_its_target(
    shape: list[tuple[int, list[int]]], budget: int, layout: Layout, at_least: int
) -> None:
    answers = answers_of(shape, holes=True)
    flat = np.concatenate([a.token_ids for a in answers]) if answers else np.zeros(0, np.int32)
    wanted = [a.first + i for a in answers for i in np.flatnonzero(a.loss_mask)]
    batches = pack(answers, token_budget=budget, layout=layout, at_least=at_least)
    assert len(batches) >= at_least
    seen = np.concatenate([b.origin for b in batches])
    assert sorted(seen.tolist()) == wanted
    for b in batches:
        assert (flat[b.origin] == b.targets).all()
        owner = np.array([answers[s].group for s in b.sequences], np.int64)
        assert (owner == b.groups).all()


@settings(deadline=None, max_examples=200)
@given(shape=shapes, budget=st.integers(8, 60), layout=st.sampled_from(("shared", "packed")))
def test_the_budget_holds_unless_one_answer_is_longer_than_it(
    shape: list[tuple[int, list[int]]], budget: int, layout: Layout
) -> None:
    for b in pack(answers_of(shape), token_budget=budget, layout=layout):
        assert b.n_tokens <= budget or len(b.sequences) == 1


@settings(deadline=None, max_examples=200)
@given(shape=shapes)
def test_the_predictor_of_a_target_is_the_token_before_it(shape: list[tuple[int, list[int]]]) -> None:
    answers = answers_of(shape)
    for b in pack(answers, token_budget=10_000, layout="shared"):
        inside = b.predict_at[1:][b.sequence_ids[1:] == b.sequence_ids[:-1]]
        assert (b.token_ids[inside] == b.targets[:-1][b.sequence_ids[1:] == b.sequence_ids[:-1]]).all()
        firsts = np.unique(b.sequence_ids, return_index=True)[1]
        for at, group in zip(firsts, b.groups, strict=True):
            prompt = next(a.prompt_ids for a in answers if a.group == group)
            assert b.token_ids[b.predict_at[at]] == prompt[-1]
            assert b.position_ids[b.predict_at[at]] == len(prompt) - 1


def brute_force_mask(batch_answers: list[list[int]], n_prompt: list[int]) -> np.ndarray:
    """bool[T, T] by the definition: a token sees its own prompt and, causally, its own answer."""
    kinds = [
        (g, s)
        for g, lengths in enumerate(batch_answers)
        for s, n in enumerate([n_prompt[g], *lengths])
        for _ in range(n)
    ]
    size = len(kinds)
    return np.array(
        [
            [j <= i and kinds[i][0] == kinds[j][0] and kinds[j][1] in (0, kinds[i][1]) for j in range(size)]
            for i in range(size)
        ]
    ).reshape(size, size)


@pytest.mark.parametrize("rows", [None, 7, 1])
@pytest.mark.parametrize("scale", [1, 60], ids=["one block per group", "one block per answer"])
def test_tiles_are_the_mask_of_the_definition(scale: int, rows: int | None) -> None:
    shape = [(3 * scale, [2 * scale, 5, 3 * scale]), (4, [1]), (2 * scale, [4 * scale, 4 * scale])]
    (batch,) = pack(answers_of(shape), token_budget=1 << 20, layout="shared")
    got = np.zeros((batch.n_tokens, batch.n_tokens), bool)
    tiles = attention.Masks(batch.blocks, torch.device("cpu")).tiles(rows, torch.float32)
    for tile in tiles:
        keys = [*range(tile.prefix_start, tile.prefix_stop), *range(tile.own_start, tile.own_stop)]
        scores = torch.zeros(1, tile.stop - tile.start, len(keys))
        tile.hide(scores)
        got[np.ix_(range(tile.start, tile.stop), keys)] = scores[0] == 0
        assert rows is None or tile.stop - tile.start <= rows
    assert (got == brute_force_mask([lengths for _, lengths in shape], [p for p, _ in shape])).all()
    assert len(batch.blocks) == (3 if scale == 1 else len(batch.blocks)) and len(batch.blocks) >= 3


def forward_and_gradients(
    model: Path, config: LearnerConfig, layout: Layout, answers: list[Answer], budget: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs on the step's flat axis, and the gradient of their weighted sum."""
    policy = load_policy(model, config, torch.device("cpu"))
    weights = torch.linspace(-1, 1, sum(len(a.token_ids) for a in answers))
    flat = torch.zeros(len(weights))
    for batch in pack(answers, token_budget=budget, layout=layout):
        out = policy(Inputs.of(batch, torch.device("cpu")), 1.3)
        origin = torch.from_numpy(batch.origin)
        (out.logprobs * weights[origin]).sum().backward()
        flat[origin] = out.logprobs.detach()
    return flat, {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("layout", ["shared", "packed"])
@pytest.mark.parametrize("budget", [1 << 20, 90], ids=["one batch", "several"])
def test_packed_equals_padded_in_value_and_gradient(
    tiny_model: Path, kernel: str, layout: Layout, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "ROWS", 16)  # so that the longer answers take several tiles
    answers = answers_of([(40, [3, 17, 60, 1]), (5, [2]), (21, [9, 9, 9])], holes=True)
    plain = LearnerConfig(compute_dtype="float32", packing="padded", attention="eager")
    mine = LearnerConfig(compute_dtype="float32", attention=kernel)  # type: ignore[arg-type]
    want, want_grads = forward_and_gradients(tiny_model, plain, "padded", answers, 1 << 20)
    got, got_grads = forward_and_gradients(tiny_model, mine, layout, answers, budget)
    assert torch.allclose(got, want, atol=2e-5)
    assert got_grads.keys() == want_grads.keys() and len(got_grads) > 10
    for name, grad in want_grads.items():
        assert (got_grads[name] - grad).norm() <= 2e-6 * grad.norm() + 1e-6, name


def test_the_kernels_agree_on_any_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also flex, whose backward pass needs a GPU: here its sparsity is proved to be the same mask."""
    (batch,) = pack(answers_of([(40, [3, 17, 60, 1]), (5, [2]), (3, [90, 90])]), token_budget=1 << 20, layout="shared")
    layout = attention.Masks(batch.blocks, torch.device("cpu"))
    monkeypatch.setattr(attention, "ROWS", 32)  # so that the longer answers take several tiles
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, batch.n_tokens, 16) for heads in (4, 2, 2))
    with torch.no_grad():
        eager, sdpa, flex = (
            attention.packed_attention(torch.nn.Identity(), query, key, value, None, layout=layout, kernel=kernel)[0]
            for kernel in ("eager", "sdpa", "flex")
        )
    assert torch.allclose(eager, sdpa, atol=1e-5) and torch.allclose(eager, flex, atol=1e-5)


def test_an_empty_micro_batch_gives_every_parameter_a_zero_gradient(tiny_model: Path) -> None:
    (empty,) = pack([], token_budget=8, layout="shared", at_least=1)
    policy = load_policy(tiny_model, LearnerConfig(compute_dtype="float32"), torch.device("cpu"))
    policy(Inputs.of(empty, torch.device("cpu")), 1.0).logprobs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


@pytest.mark.parametrize("asked", [{"sliding_window": 64}, {"softcap": 30.0}, {"s_aux": torch.zeros(4)}], ids=str)
def test_a_model_that_attends_otherwise_is_refused(asked: dict[str, object]) -> None:
    (batch,) = pack(answers_of([(3, [2])]), token_budget=64, layout="shared")
    layout, states = attention.Masks(batch.blocks, torch.device("cpu")), torch.zeros(1, 4, batch.n_tokens, 8)
    with pytest.raises(ConfigError, match=r"packing: padded"):
        attention.packed_attention(torch.nn.Identity(), states, states, states, None, layout=layout, **asked)
