"""Advantages against numbers worked by hand, the stated outcome of every odd group (one answer, all equal, failed
rewards, negative means), invariances, batch statistics over ranks, and returns that skip tool tokens."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner import advantages as adv
from learner import returns
from learner.advantages import Groups
from learner.choices import Choices
from learner.presets import PRESETS
from learner.segments import Segments, alone

GROUP_KINDS = ["group_std", "group_mean", "leave_one_out", "batch_std", "maxrl", "opo", "pass_at_k"]


def choices(**values: Any) -> Choices:
    return Choices.model_validate({"preset": "test", "advantage_eps": 0.0, **values})


def of(rewards: list[float], groups: list[int] | None = None, **values: Any) -> adv.Advantages:
    """One token per answer, so that per_token is [N]."""
    n = len(rewards)
    ids = torch.zeros(n, dtype=torch.long) if groups is None else torch.tensor(groups)
    return adv.compute(
        choices(**values), rewards=torch.tensor(rewards, dtype=torch.float64), group_ids=ids,
        mask=torch.ones(n, dtype=torch.bool), sequence_ids=torch.arange(n),
    )  # fmt: skip


def values(a: adv.Advantages) -> list[float]:
    return [float(x) for x in a.per_token]


@pytest.mark.parametrize(
    ("kind", "rewards", "by_hand"),
    [
        ("group_std", [1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),  # std = sqrt((9 + 3) / 16 / 3) = 1/2
        ("group_mean", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ("leave_one_out", [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ("maxrl", [1, 0, 0, 0], [3, -1, -1, -1]),
        ("maxrl", [1, 1, 1, 0], [1 / 3, 1 / 3, 1 / 3, -1]),
        ("maxrl", [-1, -1, 1, -1], [0, 0, 0, 0]),  # a negative mean: no flipped signs
        ("pass_at_k", [0.9, 0.1, 0.4, 0.6], [0.3, 0, 0, 0]),
        ("pass_at_k", [1, 1, 0, 0], [0, 0, 0, 0]),
        ("batch_mean", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_by_hand(kind: str, rewards: list[float], by_hand: list[float]) -> None:
    assert values(of(rewards, advantage=kind)) == pytest.approx(by_hand, abs=1e-15)


def test_opo_weighs_the_baseline_by_length() -> None:
    """Lengths 3, 1: baseline (3 * 1 + 1 * 0) / 4 = 0.75."""
    a = adv.compute(
        choices(advantage="opo"), rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([0, 0]),
        mask=torch.tensor([1, 1, 1, 1]).bool(), sequence_ids=torch.tensor([0, 0, 0, 1]),
    )  # fmt: skip
    assert values(a) == pytest.approx([0.25, 0.25, 0.25, -0.75])


@pytest.mark.parametrize("kind", GROUP_KINDS)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 0.7, -3.3, 1e6])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_single_and_all_equal_groups_are_exactly_zero_and_counted(kind: str, value: float, size: int) -> None:
    a = of([value] * size, advantage=kind)
    assert values(a) == [0.0] * size
    done = a.metrics.finish()
    assert done["groups/single"] == (size == 1)
    assert done["groups/all_equal"] == (size > 1)


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_nearly_equal_counts_as_equal_up_to_one_millionth(kind: str) -> None:
    assert values(of([0.5, 0.5 + 0.9e-6], advantage=kind)) == [0, 0]
    assert any(values(of([0.5, 0.5 + 1.2e-6], advantage=kind)))


@pytest.mark.parametrize("kind", [*GROUP_KINDS, "batch_mean", "reinforce_pp", "reinforce_pp_baseline"])
def test_a_failed_reward_is_left_out_of_the_statistics(kind: str) -> None:
    """[1, NaN, 0, 0]: the others get what a group of three would get; the failed one 0, and it may give no loss."""
    a, without = of([1, torch.nan, 0, 0], advantage=kind), of([1, 0, 0], advantage=kind)
    got = values(a)
    assert [got[0], got[2], got[3]] == pytest.approx(values(without), abs=1e-12)
    assert got[1] == 0
    assert a.scored.tolist() == [True, False, True, True]
    assert a.metrics.finish()["answers/unscored"] == 1


def test_a_failed_reward_agrees_with_trl() -> None:
    """[1, nan, 0, 0] -> [1.1545, 0, -.5773, -.5773] (TRL, eps 1e-4)."""
    got = values(of([1, torch.nan, 0, 0], advantage_eps=1e-4))
    assert got == pytest.approx([1.1545, 0, -0.5773, -0.5773], abs=1e-4)


@pytest.mark.parametrize("kind", [*GROUP_KINDS, "batch_mean", "reinforce_pp", "reinforce_pp_baseline"])
def test_nothing_scored_is_zero_and_counted(kind: str) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        a = of([bad, bad, bad], advantage=kind)
        assert values(a) == [0, 0, 0]
        assert a.metrics.finish()["groups/unscored"] == 1
        assert all(x == x for x in a.metrics.finish().values())


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_all_but_one_failed_is_a_group_of_one(kind: str) -> None:
    a = of([1, torch.nan, torch.nan], advantage=kind)
    assert values(a) == [0, 0, 0]
    assert a.metrics.finish()["groups/single"] == 1


def test_maxrl_counts_groups_without_success() -> None:
    a = of([0, 0, -1, 1, 0, 0], [0, 0, 1, 1, 2, 2], advantage="maxrl")
    assert values(a) == [0.0] * 6
    assert a.metrics.finish()["answers/nonpositive_mean"] == 6


REWARDS = st.lists(st.integers(0, 4), min_size=2, max_size=12)


@given(REWARDS, st.randoms())
def test_group_order_and_labels_do_not_matter(rewards: list[int], rnd: Any) -> None:
    groups = [rnd.randrange(3) for _ in rewards]
    order = list(range(len(rewards)))
    rnd.shuffle(order)
    for kind in GROUP_KINDS:
        plain = values(of([float(r) for r in rewards], groups, advantage=kind))
        mixed = values(of([float(rewards[i]) for i in order], [groups[i] for i in order], advantage=kind))
        assert mixed == pytest.approx([plain[i] for i in order], abs=1e-9)


@given(REWARDS)
def test_identities(rewards: list[int]) -> None:
    """Centred estimators sum to 0; RLOO = n/(n-1) Dr.GRPO; GRPO ignores the scale; MaxRL = Dr.GRPO / mean."""
    r = [float(x) for x in rewards]
    mean, n = sum(r) / len(r), len(r)
    centred = values(of(r, advantage="group_mean"))
    for kind in ("group_mean", "group_std", "leave_one_out", "maxrl"):
        assert sum(values(of(r, advantage=kind))) == pytest.approx(0, abs=1e-9)
    assert values(of(r, advantage="leave_one_out")) == pytest.approx([x * n / (n - 1) for x in centred], abs=1e-12)
    assert values(of([5 * x for x in r])) == pytest.approx(values(of(r)), abs=1e-9)
    if mean > 0:
        assert values(of(r, advantage="maxrl")) == pytest.approx([x / mean for x in centred], abs=1e-9)


@pytest.mark.parametrize("kind", ["batch_std", "batch_mean", "reinforce_pp", "reinforce_pp_baseline"])
def test_batch_statistics_are_those_of_all_ranks(kind: str) -> None:
    """Two ranks (threads) with one group each, their sums exchanged: the advantages of one rank with both groups."""
    whole = values(of([1.0, 0.0, 0.5, 2.0, 0.0], [0, 0, 0, 1, 1], advantage=kind))
    wires: list[queue.Queue[Tensor]] = [queue.Queue(), queue.Queue()]

    def run(rank: int, rewards: list[float]) -> list[float]:
        def exchange(x: Tensor) -> Tensor:
            wires[1 - rank].put(x.clone())
            return x + wires[rank].get(timeout=20)

        n = len(rewards)
        a = adv.compute(
            choices(advantage=kind), rewards=torch.tensor(rewards), group_ids=torch.zeros(n, dtype=torch.long),
            mask=torch.ones(n, dtype=torch.bool), sequence_ids=torch.arange(n), reduce=exchange,
        )  # fmt: skip
        return values(a)

    with ThreadPoolExecutor(2) as pool:
        parts = pool.map(run, (0, 1), ([1.0, 0.0, 0.5], [2.0, 0.0]))
        assert [x for part in parts for x in part] == pytest.approx(whole, abs=1e-12)


def test_components_sum_then_normalize_is_scale_sensitive_and_gdpo_is_not() -> None:
    parts = torch.tensor([[1.0, 100.0], [0.0, 0.0], [0.0, 100.0], [1.0, 0.0]])
    weights = torch.tensor([1.0, 1.0])

    def run(scale: float) -> list[float]:
        p = parts * torch.tensor([1.0, scale])
        return values(
            adv.compute(
                choices(components="normalize_then_sum"), rewards=p.sum(1), group_ids=torch.zeros(4, dtype=torch.long),
                mask=torch.ones(4).bool(), sequence_ids=torch.arange(4), components=p, component_weights=weights,
            )
        )  # fmt: skip

    assert run(1.0) == pytest.approx(run(0.01), abs=1e-9)
    assert values(of([101, 0, 100, 1])) != pytest.approx(values(of([2, 0, 1, 1])), abs=1e-3)


def test_a_constant_component_adds_nothing() -> None:
    parts = torch.tensor([[1.0, 7.7], [0.0, 7.7], [0.0, 7.7]])
    ids, one = torch.zeros(3, dtype=torch.long), torch.tensor([1.0, 1.0])
    with_it = adv.normalize_then_sum(parts, one, ids, 0.0, 1)
    without = adv.normalize_then_sum(parts[:, :1], one[:1], ids, 0.0, 1)
    torch.testing.assert_close(with_it, without)


@pytest.mark.parametrize(
    ("metric", "kept"),
    [
        ([1, 0, 0, 0], True),
        ([1, 1, 1, 1], False),
        ([0, 0], False),
        ([0.1] * 7, False),
        ([1], False),
        ([1, torch.nan], False),
    ],
)
def test_dynamic_sampling(metric: list[float], kept: bool) -> None:
    assert bool(adv.keep_group(torch.tensor(metric), torch.zeros(len(metric), dtype=torch.long))[0]) is kept


def test_advantage_clip_limits_both_sides() -> None:
    a = of([1.0] + [0.0] * 15, advantage_clip=0.5)
    assert max(values(a)) == 0.5 and min(values(a)) > -0.5


# ------------------------------------------------------------ returns


def segments(mask: list[int], ids: list[int]) -> Segments:
    return Segments(torch.tensor(ids), max(ids) + 1, torch.tensor(mask).bool())


def test_gae_by_hand_and_without_the_tool_tokens() -> None:
    """Masked tokens are skipped: the result is that of the answer with them cut out, wherever they stand."""
    gamma, lam = 0.9, 0.8
    seq = segments([1, 1], [0, 0])
    rho, v = torch.tensor([0.0, 1.0]).double(), torch.tensor([0.5, 0.2]).double()
    a, r = returns.gae(rho, v, seq, gamma, lam)
    last = 1.0 - 0.2
    first = 0.0 + gamma * 0.2 - 0.5 + gamma * lam * last
    assert a.tolist() == pytest.approx([first, last]) and r.tolist() == pytest.approx([first + 0.5, 1.0])

    holes = segments([0, 1, 0, 0, 1, 0], [0] * 6)
    wide = torch.tensor([9.0, 0.0, torch.nan, 9.0, 1.0, 9.0]).double()
    values_ = torch.tensor([9.0, 0.5, 9.0, torch.nan, 0.2, 9.0]).double()
    a6, r6 = returns.gae(torch.where(holes.mask, wide, 0.0), values_, holes, gamma, lam)
    assert a6.tolist() == pytest.approx([0, first, 0, 0, last, 0])
    assert r6.tolist() == pytest.approx([0, first + 0.5, 0, 0, 1.0, 0])


def test_a_truncated_answer_bootstraps_and_a_finished_one_does_not() -> None:
    seq = segments([1, 1], [0, 1])
    zero = torch.zeros(2).double()
    a, _ = returns.gae(zero, zero, seq, 0.5, 1.0, bootstrap=torch.tensor([4.0, 0.0]))
    assert a.tolist() == [2.0, 0.0]


def test_reward_sits_on_the_last_unmasked_token() -> None:
    seq = segments([1, 1, 0, 0, 0], [0, 0, 0, 1, 1])
    got = returns.token_rewards(torch.tensor([1.0, 5.0]), torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]), seq)
    assert got.tolist() == pytest.approx([-0.1, 0.8, 0, 0, 0])


@given(
    st.lists(st.tuples(st.booleans(), st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=12),
    st.floats(0.5, 1),
    st.floats(0, 1),
)
def test_gae_agrees_with_the_sum_over_deltas(tokens: list[tuple[bool, float, float]], gamma: float, lam: float) -> None:
    """A_t = sum_k (gamma lam)^k delta_{t+k} over the unmasked tokens."""
    mask = torch.tensor([t[0] for t in tokens])
    rho, v = (torch.tensor([t[i] for t in tokens], dtype=torch.float64) for i in (1, 2))
    seq = Segments(torch.zeros(len(tokens), dtype=torch.long), 1, mask)
    a, _ = returns.gae(torch.where(mask, rho, 0.0), v, seq, gamma, lam)
    on = [i for i, t in enumerate(tokens) if t[0]]
    for n, i in enumerate(on):
        total = 0.0
        for k, j in enumerate(on[n:]):
            after = float(v[on[n + k + 1]]) if n + k + 1 < len(on) else 0.0
            total += (gamma * lam) ** k * (float(rho[j]) + gamma * after - float(v[j]))
        assert float(a[i]) == pytest.approx(total, abs=1e-9)


def test_whitening_edges() -> None:
    one = torch.tensor([True, False])
    assert returns.whiten(torch.tensor([3.0, torch.nan]), one, 1e-8, 1).tolist() == [0, 0]
    assert returns.whiten(torch.full((7,), 0.1), torch.ones(7).bool(), 0.0, 1).tolist() == [0] * 7
    assert returns.whiten(torch.zeros(2), torch.zeros(2).bool(), 0.0, 1).tolist() == [0, 0]
    x = returns.whiten(torch.tensor([0.0, 2.0, 4.0]).double(), torch.ones(3).bool(), 0.0, 1)
    assert x.tolist() == pytest.approx([-1, 0, 1])


def test_kl_charged_to_the_reward() -> None:
    """Group kinds pay the sum over the answer. Masked and NaN charges are nothing."""
    shared: dict[str, Any] = {
        "rewards": torch.tensor([1.0, 1.0]), "group_ids": torch.tensor([0, 0]),
        "sequence_ids": torch.tensor([0, 0, 1, 1]),
        "mask": torch.tensor([1, 1, 1, 0]).bool(), "token_kl": torch.tensor([1.0, 2.0, 1.0, torch.nan]),
    }  # fmt: skip
    a = adv.compute(choices(advantage="group_mean", kl_coef=0.1, kl_in="reward", kl_kind="k1"), **shared)
    assert values(a) == pytest.approx([-0.1, -0.1, 0.1, 0])  # rewards 0.7 and 0.9
    with pytest.raises(ValueError, match="token_kl"):
        adv.compute(choices(kl_coef=0.1, kl_in="reward"), **(shared | {"token_kl": None}))


def test_ppo_needs_values() -> None:
    with pytest.raises(ValueError, match="values"):
        of([1.0, 0.0], advantage="gae")


def test_every_online_preset_computes_in_a_ragged_batch_with_an_empty_answer() -> None:
    for c in PRESETS.values():
        if c.objective != "policy":
            continue
        a = adv.compute(
            c, rewards=torch.tensor([1.0, 0.0, torch.nan, 0.5]), group_ids=torch.tensor([0, 0, 1, 1]),
            mask=torch.tensor([1, 1, 0, 1, 1]).bool(), sequence_ids=torch.tensor([0, 0, 1, 2, 3]),
            components=torch.tensor([[1.0], [0.0], [torch.nan], [0.5]]), component_weights=torch.tensor([1.0]),
            token_kl=torch.zeros(5), values=torch.zeros(5), reduce=alone,
        )  # fmt: skip
        assert torch.isfinite(a.per_token).all(), c.preset
        assert a.metrics.finish()["answers/empty"] == 1


def test_groups_of_nothing() -> None:
    g = Groups.of(torch.zeros(0), torch.zeros(0, dtype=torch.long))
    assert g.n == 0 and adv.group_mean(torch.zeros(0), g).shape == (0,)
