"""policy_loss of every preset: micro-batch splits and packing change nothing, masked NaN cannot leak, a NaN at a
trainable token is dropped and counted, nothing trainable gives an exact 0 with a graph, float32 agrees with float64,
metrics add up exactly."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner import advantages
from learner.choices import Choices
from learner.config import AlgorithmConfig
from learner.metric_sums import MetricSums
from learner.objective import policy_loss, step_keep, value_loss
from learner.presets import PRESETS, Setting, resolve
from learner.segments import Denominators

ONLINE = sorted(n for n, c in PRESETS.items() if c.objective == "policy" and c.components == "sum_then_normalize")
VARIANTS: list[tuple[str, dict[str, float | int | str | bool | None]]] = [
    *((n, {}) for n in ONLINE),
    ("dapo", {"dual_clip": 3.0, "entropy_coef": 0.01}),
    ("dapo", {"aggregation": "prompt-mean", "correction": "geo_mis", "correction_low": 0.7, "correction_high": 1.4}),
    ("dapo", {"aggregation": "sum", "correction": "seq_mask", "correction_low": 0.3, "correction_high": 3.0}),
    ("grpo", {"aggregation": "seq-mean-token-sum", "kl_kind": "k3_ratio", "correction": "seq_tis"}),
    ("dapo", {"mode": "bypass", "correction": "mask", "correction_low": 0.5, "staleness_clip": 0.5, "opsm_delta": 0.2}),
    ("gspo", {"correction": "geo_mask", "correction_low": 0.8, "opsm_delta": 0.1}),
]
IDS = [f"{n}-{'-'.join(v)}" if v else n for n, v in VARIANTS]


@dataclass
class Batch:
    """A rank's whole step, padded [B, L] with holes and an empty answer."""

    logp: Tensor
    old: Tensor
    mu: Tensor
    ref: Tensor
    entropy: Tensor
    staleness: Tensor
    mask: Tensor
    rewards: Tensor
    groups: Tensor

    @staticmethod
    def of(seed: int, n_groups: int = 3, size: int = 3, width: int = 5, dtype: torch.dtype = torch.float64) -> Batch:
        g = torch.Generator().manual_seed(seed)
        n = n_groups * size

        def draw(low: float, high: float) -> Tensor:
            return (torch.rand(n, width, generator=g, dtype=torch.float64) * (high - low) + low).to(dtype)

        old = draw(-3, -0.2)
        mask = draw(0, 1) < 0.75
        mask[0] = False
        rewards = torch.randint(0, 2, (n,), generator=g).double()
        rewards[:2] = torch.tensor([1.0, 0.0])
        return Batch(
            old + draw(-0.4, 0.4), old, old + draw(-0.7, 0.7), old + draw(-0.5, 0.5), draw(0.1, 2.0),
            torch.randint(0, 4, (n, width), generator=g), mask, rewards, torch.arange(n) // size,
        )  # fmt: skip

    @property
    def ids(self) -> Tensor:
        return torch.arange(len(self.mask)).repeat_interleave(self.mask.shape[1])


def choose(name: str, overrides: dict[str, float | int | str | bool | None]) -> Choices:
    return resolve(AlgorithmConfig(preset=name, overrides=overrides), Setting(group_size=3, max_tokens=8))


def prepare(c: Choices, b: Batch) -> tuple[Tensor, Tensor, Denominators]:
    """Per-token advantages and keep [B, L], and the step's denominators."""
    flat = b.mask.reshape(-1)
    adv = advantages.compute(
        c, rewards=b.rewards, group_ids=b.groups, mask=flat, sequence_ids=b.ids,
        token_kl=torch.nan_to_num(b.old - b.ref).reshape(-1), values=torch.zeros(flat.shape),
        bootstrap=torch.zeros(len(b.groups)),
    )  # fmt: skip
    keep = step_keep(
        c,
        scored=adv.scored,
        mask=flat,
        sequence_ids=b.ids,
        behaviour_logprobs=b.mu.reshape(-1),
        old_logprobs=b.old.reshape(-1),
    )
    shape = b.mask.shape
    return adv.per_token.reshape(shape), keep.reshape(shape), Denominators.count(flat, b.ids, b.groups)


def padded(c: Choices, b: Batch, rows: list[int] | None = None) -> tuple[Tensor, Tensor, MetricSums]:
    """Loss, gradient with respect to logp [B, L] and metrics of the given rows as one micro-batch of the step."""
    A, keep, d = prepare(c, b)
    at = torch.arange(len(b.mask)) if rows is None else torch.tensor(rows)
    leaf = b.logp.clone().requires_grad_()
    loss, metrics = policy_loss(
        c, logprobs=leaf[at], old_logprobs=b.old[at], behaviour_logprobs=b.mu[at], ref_logprobs=b.ref[at],
        entropy=b.entropy[at], staleness=b.staleness[at], advantages=A[at], mask=b.mask[at], keep=keep[at],
        group_ids=b.groups[at], denominators=d,
    )  # fmt: skip
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad, metrics


def packed(c: Choices, b: Batch) -> tuple[Tensor, Tensor]:
    """The same step with every masked position left out altogether."""
    A, keep, d = prepare(c, b)
    on = b.mask
    leaf = b.logp.clone().requires_grad_()
    loss, _ = policy_loss(
        c, logprobs=leaf[on], old_logprobs=b.old[on], behaviour_logprobs=b.mu[on], ref_logprobs=b.ref[on],
        entropy=b.entropy[on], staleness=b.staleness[on], advantages=A[on], mask=on[on], keep=keep[on],
        group_ids=b.groups, denominators=d, sequence_ids=b.ids.reshape(on.shape)[on],
    )  # fmt: skip
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.parametrize(("name", "overrides"), VARIANTS, ids=IDS)
def test_packed_equals_padded(name: str, overrides: dict[str, float | int | str | bool | None]) -> None:
    c, b = choose(name, overrides), Batch.of(1)
    loss, grad, _ = padded(c, b)
    loss_packed, grad_packed = packed(c, b)
    torch.testing.assert_close(loss_packed, loss, rtol=0, atol=1e-13)
    torch.testing.assert_close(grad_packed, grad, rtol=0, atol=1e-13)
    assert grad.abs().max() > 0 and not grad[~b.mask].any()


@pytest.mark.parametrize(("name", "overrides"), VARIANTS, ids=IDS)
@settings(max_examples=8)
@given(data=st.data())
def test_micro_batches_add_up_however_the_step_is_cut(
    name: str, overrides: dict[str, float | int | str | bool | None], data: st.DataObject
) -> None:
    """Random cuts, groups torn apart: the sum of losses, gradients and metrics is that of the whole step."""
    c, b = choose(name, overrides), Batch.of(data.draw(st.integers(0, 50)))
    n = len(b.mask)
    order = data.draw(st.permutations(range(n)))
    cuts = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=4)))
    parts = [list(order[i:j]) for i, j in zip([0, *cuts], [*cuts, n], strict=True)]
    whole_loss, whole_grad, whole_metrics = padded(c, b)
    pieces = [padded(c, b, rows) for rows in parts]
    torch.testing.assert_close(sum(p[0] for p in pieces), whole_loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(sum(p[1] for p in pieces), whole_grad, rtol=0, atol=1e-12)
    total = MetricSums()
    for p in pieces:
        total = total + p[2]
    together, apart = whole_metrics.finish(), total.finish()
    assert together.keys() == apart.keys()
    assert all(abs(together[k] - apart[k]) < 1e-9 for k in together)


@pytest.mark.parametrize(("name", "overrides"), VARIANTS, ids=IDS)
def test_nan_and_inf_at_masked_positions_do_not_leak(
    name: str, overrides: dict[str, float | int | str | bool | None]
) -> None:
    c, clean, dirty = choose(name, overrides), Batch.of(2), Batch.of(2)
    hole = ~clean.mask
    for column, poison in (
        (dirty.logp, torch.nan),
        (dirty.old, torch.inf),
        (dirty.mu, -torch.inf),
        (dirty.ref, torch.nan),
    ):
        column[hole] = poison
    dirty.entropy[hole] = torch.nan
    want, got = padded(c, clean), padded(c, dirty)
    assert torch.equal(want[0], got[0]) and torch.equal(want[1], got[1])
    assert want[2].finish() == got[2].finish()


@pytest.mark.parametrize(("name", "overrides"), VARIANTS, ids=IDS)
@pytest.mark.parametrize("column", ["logp", "old", "mu", "ref"])
def test_nan_at_a_trainable_token_drops_that_token_and_is_counted(
    name: str, overrides: dict[str, float | int | str | bool | None], column: str
) -> None:
    """The outcome: no NaN anywhere, zero gradient at the token, tokens/nonfinite says how many; denominators stay."""
    c, b = choose(name, overrides), Batch.of(3)
    A, keep, d = prepare(c, Batch.of(3))
    row, place = (int(x) for x in keep.nonzero()[-1])
    getattr(b, column)[row, place] = torch.nan if column != "mu" else -torch.inf
    leaf = b.logp.clone().requires_grad_()
    loss, metrics = policy_loss(
        c, logprobs=leaf, old_logprobs=b.old, behaviour_logprobs=b.mu, ref_logprobs=b.ref, entropy=b.entropy,
        staleness=b.staleness, advantages=A, mask=b.mask, keep=keep, group_ids=b.groups, denominators=d,
    )  # fmt: skip
    loss.backward()
    assert leaf.grad is not None
    assert torch.isfinite(loss) and torch.isfinite(leaf.grad).all()
    assert leaf.grad[row, place] == 0
    assert metrics.finish()["tokens/nonfinite"] == 1
    assert all(x == x for x in metrics.finish().values())


@pytest.mark.parametrize(("name", "overrides"), VARIANTS, ids=IDS)
def test_nothing_trainable_gives_an_exact_zero_with_a_graph(
    name: str, overrides: dict[str, float | int | str | bool | None]
) -> None:
    c, b = choose(name, overrides), Batch.of(4)
    b.mask[:] = False
    loss, grad, metrics = padded(c, b)
    assert loss == 0 and not grad.any()
    assert metrics.finish()["tokens/kept"] == 0
    assert all(x == x for x in metrics.finish().values())


@pytest.mark.parametrize(("name", "overrides"), VARIANTS, ids=IDS)
def test_all_equal_rewards_move_nothing(name: str, overrides: dict[str, float | int | str | bool | None]) -> None:
    """No regulariser, equal rewards: the policy term and its gradient are exactly 0 (REINFORCE++ whitens to 0)."""
    c = choose(name, overrides | {"kl_coef": 0.0, "entropy_coef": 0.0, "trust_region_coef": 0.0})
    if c.loss == "opmd" or c.advantage == "gae":
        return  # opmd is a regression onto A / tau and pulls back to pi_old; gae's rewards differ along an answer
    b = Batch.of(5)
    b.rewards[:] = 0.1
    loss, grad, _ = padded(c, b)
    assert loss == 0 and not grad.any()


@pytest.mark.parametrize(("name", "overrides"), VARIANTS, ids=IDS)
def test_float32_agrees_with_float64(name: str, overrides: dict[str, float | int | str | bool | None]) -> None:
    c = choose(name, overrides)
    loss64, grad64, _ = padded(c, Batch.of(6))
    loss32, grad32, _ = padded(c, Batch.of(6, dtype=torch.float32))
    assert loss32.dtype == torch.float32
    torch.testing.assert_close(loss32.double(), loss64, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(grad32.double(), grad64, rtol=1e-4, atol=2e-6)


def test_half_precision_is_lifted_to_float32() -> None:
    b = Batch.of(6, dtype=torch.bfloat16)
    loss, _, _ = padded(choose("dapo", {}), b)
    assert loss.dtype == torch.float32


@pytest.mark.parametrize(("name", "overrides"), VARIANTS, ids=IDS)
def test_huge_log_ratios_stay_finite(name: str, overrides: dict[str, float | int | str | bool | None]) -> None:
    """Log-probs of -1e4 beside -0.1: clamped ratios, no inf, no NaN in loss, gradient or metrics."""
    c, b = choose(name, overrides), Batch.of(7)
    b.logp[1::2] = -1e4
    b.mu[::2] = -1e4
    loss, grad, metrics = padded(c, b)
    assert torch.isfinite(loss) and torch.isfinite(grad).all()
    assert all(abs(x) < 1e30 for x in metrics.finish().values())


def test_old_logprobs_left_out_means_one_update_per_batch() -> None:
    c, b = choose("dapo", {}), Batch.of(8)
    A, keep, d = prepare(c, b)
    b.old = b.logp.clone()
    want, grad, _ = padded(c, b)
    leaf = b.logp.clone().requires_grad_()
    loss, metrics = policy_loss(
        c,
        logprobs=leaf,
        behaviour_logprobs=b.mu,
        advantages=A,
        mask=b.mask,
        keep=keep,
        group_ids=b.groups,
        denominators=d,
    )
    loss.backward()
    torch.testing.assert_close(loss.detach(), want, rtol=0, atol=1e-13)
    torch.testing.assert_close(leaf.grad, grad, rtol=0, atol=1e-13)
    assert metrics.finish()["policy/ratio_mean"] == 1.0
    assert metrics.finish()["policy/clip_fraction"] == 0.0, "decoupled mode: the first update clips nothing"


def test_an_unscored_answer_gives_no_loss_but_stays_in_the_denominator() -> None:
    c, b = choose("grpo", {"kl_coef": 0.5}), Batch.of(9)
    b.rewards[4] = torch.nan
    A, keep, d = prepare(c, b)
    _, grad, _ = padded(c, b)
    assert not grad[4].any() and not A[4].any() and not keep[4].any()
    assert d.tokens == int(b.mask.sum())


def test_a_dropped_token_stays_in_its_answers_length() -> None:
    """Two answers of two tokens, one token dropped: 1/(2 answers x 2 tokens) for every other token, not 1/(2 x 1)."""
    logp = torch.tensor([[-1.0, -1.0], [-1.0, torch.nan]], dtype=torch.float64, requires_grad=True)
    ones = torch.ones(2, 2, dtype=torch.bool)
    groups, ids = torch.tensor([0, 0]), torch.tensor([0, 0, 1, 1])
    loss, _ = policy_loss(
        choose("grpo", {"kl_coef": 0.0, "correction": "none"}), logprobs=logp,
        behaviour_logprobs=-torch.ones(2, 2).double(),
        advantages=torch.ones(2, 2).double(), mask=ones, group_ids=groups,
        denominators=Denominators.count(ones.reshape(-1), ids, groups),
    )  # fmt: skip
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-0.75)
    assert logp.grad is not None and logp.grad.reshape(-1).tolist() == pytest.approx([-0.25, -0.25, -0.25, 0])


def test_an_answer_of_mixed_ages_has_one_clip_width_where_it_has_one_ratio() -> None:
    """Ages 0 and 2, exponent 1: width 0.001 x (1 + 1). A ratio of 1.0015 is inside for the whole answer or nowhere."""
    old = -torch.ones(1, 2).double()
    leaf = (old + 0.0015).requires_grad_()
    one = torch.ones(1, 2, dtype=torch.bool)
    c = choose("gspo", {"clip_low": 0.001, "clip_high": 0.001, "staleness_clip": 1.0, "correction": "none"})
    loss, metrics = policy_loss(
        c, logprobs=leaf, old_logprobs=old, behaviour_logprobs=old, advantages=one.double(), mask=one,
        group_ids=torch.tensor([0]), denominators=Denominators(2, 1, 1), staleness=torch.tensor([[0, 2]]),
    )  # fmt: skip
    loss.backward()
    assert metrics.finish()["policy/clip_fraction"] == 0
    assert leaf.grad is not None and leaf.grad[0, 0] == leaf.grad[0, 1] != 0


def test_truncated_answers_are_masked_only_when_asked_for() -> None:
    b = Batch.of(10)
    truncated = torch.zeros(len(b.groups), dtype=torch.bool)
    truncated[5] = True
    flat, scored = b.mask.reshape(-1), torch.ones(len(b.groups), dtype=torch.bool)
    for filtering in (False, True):
        keep = step_keep(
            choose("dapo", {"mask_truncated": filtering}), scored=scored, mask=flat, sequence_ids=b.ids,
            behaviour_logprobs=b.mu.reshape(-1), truncated=truncated,
        ).reshape(b.mask.shape)  # fmt: skip
        assert bool(keep[5].any()) is not filtering
        assert torch.equal(keep[:5], b.mask[:5])


def test_loglinear_proximal_policy_follows_the_age_of_each_token() -> None:
    """Age 0 or 1: the engine's policy is proximal, weight 1; age 3: two thirds of the way to the current one."""
    b = Batch.of(13)
    b.staleness[:] = 1
    _, _, young = padded(choose("a3po", {}), b)
    assert young.finish()["correction/mismatch_k3"] == 0 and young.finish()["correction/ess"] == pytest.approx(1)
    bypass = padded(choose("dapo", {"mode": "bypass", "correction": "none", "clip_high": 0.2}), b)
    torch.testing.assert_close(padded(choose("a3po", {}), b)[1], bypass[1], rtol=0, atol=1e-13)
    b.staleness[:] = 3
    between = b.mu + (b.logp - b.mu) * 2 / 3
    b.old = between
    exact = padded(choose("a3po", {"proximal": "exact"}), b)
    torch.testing.assert_close(padded(choose("a3po", {}), b)[1], exact[1], rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match="staleness"):
        policy_loss(
            choose("a3po", {}), logprobs=b.logp, behaviour_logprobs=b.mu, advantages=b.logp, mask=b.mask,
            group_ids=b.groups, denominators=Denominators(1, 1, 1),
        )  # fmt: skip


def test_missing_columns_are_named() -> None:
    b = Batch.of(11)
    d = Denominators.count(b.mask.reshape(-1), b.ids, b.groups)
    plain = {"logprobs": b.logp, "behaviour_logprobs": b.mu, "advantages": b.logp, "mask": b.mask}
    for c, missing in (
        (choose("grpo", {}), "ref_logprobs"),
        (choose("dapo", {"entropy_coef": 0.1}), "entropy"),
        (choose("m2po", {}), "step_keep"),
    ):
        with pytest.raises(ValueError, match=missing):
            policy_loss(c, group_ids=b.groups, denominators=d, **plain)
    with pytest.raises(ValueError, match="sequence_ids"):
        policy_loss(
            choose("dapo", {}), group_ids=b.groups, denominators=d, **{k: x.reshape(-1) for k, x in plain.items()}
        )


def test_value_loss_splits_masks_and_counts() -> None:
    c, b = choose("ppo", {}), Batch.of(12)
    d = Denominators.count(b.mask.reshape(-1), b.ids, b.groups)
    targets = torch.where(b.mask, b.ref, torch.nan)
    whole, _ = value_loss(c, values=b.logp, old_values=b.old, returns=targets, mask=b.mask, denominators=d)
    halves = [
        value_loss(c, values=b.logp[s], old_values=b.old[s], returns=targets[s], mask=b.mask[s], denominators=d)
        for s in (slice(0, 4), slice(4, None))
    ]
    torch.testing.assert_close(halves[0][0] + halves[1][0], whole, rtol=0, atol=1e-13)
    place = tuple(int(x) for x in b.mask.nonzero()[0])
    targets[place] = torch.nan
    leaf = b.logp.clone().requires_grad_()
    loss, metrics = value_loss(c, values=leaf, old_values=b.old, returns=targets, mask=b.mask, denominators=d)
    loss.backward()
    assert leaf.grad is not None and torch.isfinite(leaf.grad).all() and leaf.grad[place] == 0
    assert metrics.finish()["critic/nonfinite"] == 1
