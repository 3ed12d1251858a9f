"""Proves several updates per step (mini-batches, epochs): which groups meet in an update, that the update is the one a
plain torch loop makes, that a step stays one version with every token counted once, and that it resumes exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.updates import cut, updates_of
from learner.world import World
from rollout.types import Group
from tests.learner.steps import MakeGroups, engine, weights, with_behaviour_of


@given(
    st.sets(st.integers(0, 10**9), min_size=1, max_size=40), st.integers(0, 99), st.integers(0, 9), st.integers(1, 9)
)
def test_an_epoch_is_every_group_once_in_even_parts(
    ordinals: set[int], version: int, epoch: int, mini_batches: int
) -> None:
    parts = cut(sorted(ordinals), version, epoch, mini_batches)
    assert sorted(o for part in parts for o in part) == sorted(ordinals)
    assert len(parts) == min(mini_batches, len(ordinals))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert parts == cut(sorted(ordinals, reverse=True), version, epoch, mini_batches)  # however ranks hold them


def test_epochs_and_versions_shuffle_anew() -> None:
    ordinals = range(64)
    seen = {tuple(map(tuple, map(sorted, cut(ordinals, v, e, 4)))) for v in range(3) for e in range(3)}
    assert len(seen) == 9


def test_one_mini_batch_is_everything() -> None:
    world = World(0, 1, torch.device("cpu"))
    assert updates_of(world, [7, 9], 0, mini_batches=1, epochs=3) == [frozenset({0, 1})] * 3


def log_probs(model: torch.nn.Module, group: Group) -> list[Tensor]:
    found = []
    for t in group.trajectories:
        ids = torch.cat([torch.from_numpy(group.prompt_ids), torch.from_numpy(t.token_ids)]).long()
        logits = torch.log_softmax(model(ids[None]).logits[0].float(), -1)
        at = torch.arange(len(group.prompt_ids) - 1, len(ids) - 1)
        found.append(logits[at, ids[at + 1]])
    return found


def by_hand(model_dir: Path, groups: Sequence[Group], mini_batches: int, epochs: int) -> dict[str, Tensor]:
    """DAPO's update as one would write it in an afternoon: no packing, no DeepSpeed, old log-probs kept from before."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0)
    of = {g.ordinal: g for g in groups}
    with torch.no_grad():
        old = {o: log_probs(model, g) for o, g in of.items()}
    for epoch in range(epochs):
        for part in cut(list(of), 0, epoch, mini_batches):
            loss, tokens = torch.zeros(()), 0
            for o in part:
                rewards = torch.tensor([t.verdict.value for t in of[o].trajectories])
                advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
                for i, now in enumerate(log_probs(model, of[o])):
                    ratio = (now - old[o][i]).exp()
                    mu = torch.from_numpy(of[o].trajectories[i].behaviour_logprobs)
                    weight = (old[o][i] - mu).exp().clamp(max=2.0)
                    worse = torch.maximum(-ratio * advantages[i], -ratio.clamp(0.8, 1.28) * advantages[i])
                    loss, tokens = loss + (weight * worse).sum(), tokens + len(now)
            adam.zero_grad()
            (loss / tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize(("mini_batches", "epochs", "stage"), [(2, 2, 1), (1, 3, 0), (4, 1, 3)])
def test_the_updates_are_those_of_a_plain_loop(
    tiny_model: Path, make_groups: MakeGroups, mini_batches: int, epochs: int, stage: int
) -> None:
    groups = make_groups()
    e = engine(tiny_model, mini_batches=mini_batches, epochs=epochs, zero_stage=stage, token_budget=64)
    before = weights(e)
    metrics = e.train_step(groups, 0)
    want = by_hand(tiny_model, groups, mini_batches, epochs)
    assert e.version == 1 and e.zero.steps == mini_batches * epochs
    assert metrics["tokens/trained"] == sum(g.n_tokens for g in groups) and metrics["groups/trained"] == 4
    assert metrics["policy/kl"] > 0 and (metrics["policy/clip_fraction"] > 0 or epochs == 1)
    for name, tensor in weights(e).items():
        assert torch.allclose(tensor, want[name], rtol=1e-4, atol=2e-5), name
    assert max(float((before[n] - want[n]).abs().max().detach()) for n in before) > 1e-3  # far above the tolerance


def test_the_first_update_of_a_step_starts_at_ratio_one(tiny_model: Path, make_groups: MakeGroups) -> None:
    """A learning rate of almost nothing: all ratios stay 1, so the losses are those of a single update."""
    options = {"rate": 1e-12}
    one, several = engine(tiny_model, **options), engine(tiny_model, mini_batches=1, epochs=2, **options)
    groups = make_groups()
    want, got = one.train_step(groups, 0), several.train_step(groups, 0)
    for key in ("loss/policy", "loss/total", "policy/ratio_mean", "tokens/kept", "reward/mean", "policy/clip_fraction"):
        assert got[key] == pytest.approx(want[key], rel=1e-5, abs=1e-7), key


def test_a_checkpoint_goes_on_exactly_between_steps(tiny_model: Path, make_groups: MakeGroups, tmp_path: Path) -> None:
    options = {"preset": "ppo", "mini_batches": 2, "epochs": 2}
    first = engine(tiny_model, **options)
    first.train_step(make_groups(), 0)
    first.save_checkpoint(tmp_path / "v1")
    second = engine(tiny_model, **options)
    second.load_checkpoint(tmp_path / "v1")
    assert second.zero.steps == 4 and second.version == 1
    got, want = (e.train_step(make_groups(seed=1), 1)["loss/total"] for e in (second, first))
    assert got == want
    assert all(torch.equal(t, weights(second)[n]) for n, t in weights(first).items())


def test_one_bad_update_costs_only_itself(
    tiny_model: Path, make_groups: MakeGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = engine(tiny_model, mini_batches=4, epochs=1)
    groups, real, turn = make_groups(), e.backward, iter(range(4))
    monkeypatch.setattr(e, "backward", lambda loss, last: real(loss * (float("nan") if next(turn) == 2 else 1), last))
    metrics = e.train_step(groups, 0)
    (blamed,) = cut([g.ordinal for g in groups], 0, 0, 4)[2]
    assert metrics["step/skipped"] == 1 and e.skipped_ordinals == (blamed,)
    assert e.zero.steps == 3 and e.bad_steps == 1
    assert all(torch.isfinite(t).all() for t in weights(e).values())


def test_the_critic_learns_in_every_update(tiny_model: Path, make_groups: MakeGroups) -> None:
    groups = make_groups()
    once, often = engine(tiny_model, "ppo"), engine(tiny_model, "ppo", epochs=4)
    groups = with_behaviour_of(once, groups)
    for e in (once, often):
        e.train_step(groups, 0)
    assert (once.critic.steps, often.critic.steps) == (1, 4)
    errors = [e.train_step([replace(g) for g in groups], 1)["critic/squared_error"] for e in (once, often)]
    assert errors[1] < errors[0]
