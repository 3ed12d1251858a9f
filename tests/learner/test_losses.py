"""Each kernel on one or two tokens worked by hand, gradients included; the shapes of clipping; KL estimators; and
identities between algorithms."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner import losses
from learner.segments import Segments

LOG_R = [math.log(x) for x in (0.5, 0.9, 1.1, 2.0, 4.0)]


def seq(*lengths: int) -> Segments:
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return Segments(ids, len(lengths), torch.ones(len(ids), dtype=torch.bool))


def slope(
    kernel: Callable[[Tensor], tuple[Tensor, Tensor]], logp: Tensor
) -> tuple[list[float], list[float], list[bool]]:
    """(loss, dloss_t/dlogp_t, clipped) of a token-level kernel."""
    leaf = logp.clone().requires_grad_()
    loss, clipped = kernel(leaf)
    loss.sum().backward()
    assert leaf.grad is not None
    return loss.tolist(), leaf.grad.tolist(), clipped.tolist()


def column(x: list[float]) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


BASE = column([-1.0] * 5)
UP, DOWN = torch.ones(5).double(), -torch.ones(5).double()


def test_ppo_clip_by_hand() -> None:
    """r = .5 .9 1.1 2 4: for A > 0 the upper clip cuts, for A < 0 the lower; the wrong side passes through."""
    logp = BASE + column(LOG_R)
    loss, grad, cut = slope(lambda x: losses.ppo_clip(x, BASE, UP, 0.2, 0.2), logp)
    assert loss == pytest.approx([-0.5, -0.9, -1.1, -1.2, -1.2])
    assert grad == pytest.approx([-0.5, -0.9, -1.1, 0, 0])
    assert cut == [False, False, False, True, True]
    loss, grad, cut = slope(lambda x: losses.ppo_clip(x, BASE, DOWN, 0.2, 0.2), logp)
    assert loss == pytest.approx([0.8, 0.9, 1.1, 2.0, 4.0])
    assert grad == pytest.approx([0, 0.9, 1.1, 2.0, 4.0])
    assert cut == [True, False, False, False, False]


def test_dual_clip_binds_for_negative_advantages_only() -> None:
    logp = BASE + column(LOG_R)
    loss, grad, _ = slope(lambda x: losses.ppo_clip(x, BASE, DOWN, 0.2, 0.2, 3.0), logp)
    assert loss == pytest.approx([0.8, 0.9, 1.1, 2.0, 3.0])
    assert grad == pytest.approx([0, 0.9, 1.1, 2.0, 0])
    plain = slope(lambda x: losses.ppo_clip(x, BASE, UP, 0.2, 0.2), logp)
    assert slope(lambda x: losses.ppo_clip(x, BASE, UP, 0.2, 0.2, 3.0), logp) == plain


def test_a_width_per_token() -> None:
    widths = column([0.6, 0.0, 0.0, 0.5, 5.0])
    _, _, cut = slope(lambda x: losses.ppo_clip(x, BASE, UP, widths, widths), BASE + column(LOG_R))
    assert cut == [False, False, True, True, False]


def test_cispo_keeps_every_gradient() -> None:
    loss, grad, cut = slope(lambda x: losses.cispo(x, BASE, UP, 0.8, 1.5), BASE + column(LOG_R))
    weights = [0.8, 0.9, 1.1, 1.5, 1.5]
    assert grad == pytest.approx([-w for w in weights])
    assert loss == pytest.approx([-w * (r - 1) for w, r in zip(weights, LOG_R, strict=True)])
    assert cut == [True, False, False, True, True]


def test_the_two_codings_of_aipo_differ_above_the_cap() -> None:
    logp = BASE + column(LOG_R)
    _, kept, _ = slope(lambda x: losses.aipo(x, BASE, UP, 1.5), logp)
    _, cut, _ = slope(lambda x: losses.aipo_surrogate(x, BASE, UP, 1.5), logp)
    assert kept == pytest.approx([-0.5, -0.9, -1.1, -1.5, -1.5])
    assert cut == pytest.approx([-0.5, -0.9, -1.1, 0, 0])


def test_sapo_has_ppos_gradient_at_ratio_one_and_fades_away_from_it() -> None:
    logp = BASE + column([0.0, *LOG_R[1:]])
    for A, tau in ((UP, 1.0), (DOWN, 1.05)):
        _, grad, _ = slope(lambda x, A=A: losses.sapo(x, BASE, A, 1.0, 1.05), logp)
        assert grad[0] == pytest.approx(-float(A[0]))
        s = 1 / (1 + math.exp(-tau * (4 - 1)))
        assert grad[4] == pytest.approx(-4 * s * (1 - s) * 4 * float(A[0]))


def test_trust_regions_by_hand() -> None:
    """pi - mu = .05 .25 -.25: dppo drops only in A's direction, ipo on both sides."""
    mu = column([0.5, 0.5, 0.5]).log()
    pi = column([0.55, 0.75, 0.25]).log()
    A = torch.ones(3).double()
    _, grad, dropped = slope(lambda x: losses.dppo(x, mu, A, 0.2, 0.2), pi)
    assert dropped == [False, True, False] and grad == pytest.approx([-1.1, 0, -0.5])
    _, grad, dropped = slope(lambda x: losses.dppo(x, mu, -A, 0.2, 0.2), pi)
    assert dropped == [False, False, True] and grad == pytest.approx([1.1, 1.5, 0])
    _, grad, dropped = slope(lambda x: losses.ipo(x, mu, A, 0.2, 0.2), pi)
    assert dropped == [False, True, True] and grad == pytest.approx([-1.1, 0, 0])


def test_gspo_shares_one_ratio_per_answer() -> None:
    """Log-ratios .2 and -.1 and .3: s = exp(.05) and exp(.3); gradient of L_i is spread 1/|y| each."""
    s = seq(2, 1)
    base = column([-1.0, -1.0, -1.0])
    leaf = (base + column([0.2, -0.1, 0.3])).requires_grad_()
    loss, _ = losses.gspo(leaf, base, torch.ones(3).double(), s, 1.0, 1.0)
    assert loss.tolist() == pytest.approx([-math.exp(0.05)] * 2 + [-math.exp(0.3)])
    s.mean(loss).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == pytest.approx([-math.exp(0.05) / 2] * 2 + [-math.exp(0.3)])


@given(st.integers(0, 10_000), st.sampled_from([(3e-4, 4e-4), (0.2, 0.28), (0.05, 0.02)]))
def test_gspo_token_equals_gspo_for_a_constant_advantage(seed: int, clip: tuple[float, float]) -> None:
    g = torch.Generator().manual_seed(seed)
    s = seq(3, 1, 4)
    base = -torch.rand(8, generator=g, dtype=torch.float64) - 0.1
    A = s.spread(torch.randn(3, generator=g, dtype=torch.float64))
    grads = []
    for kernel in (losses.gspo, losses.gspo_token):
        leaf = (base + torch.linspace(-0.3, 0.4, 8, dtype=torch.float64)).requires_grad_()
        s.mean(kernel(leaf, base, A, s, *clip)[0]).sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=1e-13)


@pytest.mark.parametrize("kernel", [losses.gspo, losses.gspo_token, losses.sequence_clip, losses.gmpo])
def test_answers_of_one_token_make_every_sequence_loss_a_token_loss(
    kernel: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    s = seq(1, 1, 1, 1, 1)
    logp = BASE + column(LOG_R)
    log_width = kernel is losses.gmpo
    low, high = (-math.log(0.8), math.log(1.2)) if log_width else (0.2, 0.2)
    for A in (UP, DOWN):
        got = slope(lambda x, A=A: kernel(x, BASE, A, s, low, high), logp)
        want = slope(lambda x, A=A: losses.ppo_clip(x, BASE, A, 0.2, 0.2), logp)
        assert got[0] == pytest.approx(want[0]) and got[1] == pytest.approx(want[1]) and got[2] == want[2]


def test_gmpo_clips_one_side_by_the_sign_of_the_advantage() -> None:
    s, base = seq(2), column([-1.0, -1.0])
    leaf = (base + column([1.0, -1.0])).requires_grad_()
    loss, clipped = losses.gmpo(leaf, base, torch.ones(2).double(), s, 0.4, 0.4)
    s.mean(loss).sum().backward()
    assert leaf.grad is not None
    assert loss.tolist() == pytest.approx([-math.exp((0.4 - 1.0) / 2)] * 2)
    assert clipped.tolist() == [True, False]
    assert leaf.grad.tolist() == pytest.approx([0, -math.exp(-0.3) / 2])


def test_opmd_is_still_where_the_log_ratio_is_the_advantage_over_tau() -> None:
    s, base = seq(2), column([-1.0, -1.0])
    leaf = (base + column([0.3, 0.2])).requires_grad_()
    loss, _ = losses.opmd(leaf, base, column([0.05, 0.05]), s, 0.1)
    s.mean(loss).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == pytest.approx([0, 0], abs=1e-12)


def test_on_policy_every_online_loss_has_reinforces_gradient() -> None:
    """pi = old = mu: -A for each token (weights 1), for every kernel that is a policy gradient."""
    s, A = seq(2, 3), column([0.7, 0.7, -0.4, -0.4, -0.4])
    kernels: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
        "ppo_clip": lambda x: losses.ppo_clip(x, BASE, A, 0.2, 0.2),
        "gspo_token": lambda x: losses.gspo_token(x, BASE, A, s, 3e-4, 4e-4),
        "cispo": lambda x: losses.cispo(x, BASE, A, 0, 5),
        "sapo": lambda x: losses.sapo(x, BASE, A, 1.0, 1.05),
        "dppo": lambda x: losses.dppo(x, BASE, A, 0.2, 0.2),
        "ipo": lambda x: losses.ipo(x, BASE, A, 0.3, 0.3),
        "aipo": lambda x: losses.aipo(x, BASE, A, 2),
        "aipo_surrogate": lambda x: losses.aipo_surrogate(x, BASE, A, 2),
        "importance": lambda x: losses.importance(x, BASE, A),
        "reinforce": lambda x: losses.reinforce(x, A),
    }
    for name, kernel in kernels.items():
        assert slope(kernel, BASE)[1] == pytest.approx((-A).tolist()), name


@given(st.floats(-3, 3))
def test_kl_estimators(d: float) -> None:
    logp, ref = column([d]), column([0.0])
    assert float(losses.kl(logp, ref, "k1")) == pytest.approx(d)
    assert float(losses.kl(logp, ref, "k2")) == pytest.approx(d * d / 2)
    assert float(losses.kl(logp, ref, "k3")) == pytest.approx(math.exp(-d) - 1 + d, abs=1e-12)
    assert float(losses.kl(logp, ref, "k3")) >= 0
    assert float(losses.kl(logp, ref, "k3_ratio", column([2.0]))) == pytest.approx(
        2 * (math.exp(-d) - 1 + d), abs=1e-12
    )


def test_kl_estimators_are_unbiased_or_not_as_stated() -> None:
    """Exact expectation over three outcomes: k1 and k3 give KL(pi || ref); k2's gradient is the reverse KL's."""
    z = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(column([-0.5, 0.4, 0.0]), 0)
    logp = torch.log_softmax(z, 0)
    true = (logp.exp() * (logp - ref)).sum()
    p = logp.exp().detach()
    for kind in ("k1", "k3"):
        assert float((p * losses.kl(logp, ref, kind)).sum().detach()) == pytest.approx(float(true.detach()), abs=1e-12)
    (want,) = torch.autograd.grad(true, z, retain_graph=True)
    for kind, right in (("k1", False), ("k2", True), ("k3", False)):
        (got,) = torch.autograd.grad((p * losses.kl(logp, ref, kind)).sum(), z, retain_graph=True)
        assert torch.allclose(got, want, atol=1e-12) is right
        if kind == "k1":
            assert torch.allclose(got, torch.zeros_like(got), atol=1e-12), "k1 in the loss pulls nowhere"
    r = (logp - logp.detach()).exp()
    (got,) = torch.autograd.grad((p * losses.kl(logp, ref, "k3_ratio", r)).sum(), z)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_unknown_estimators_are_refused() -> None:
    for kind in ("k4", "k3_ratio"):
        with pytest.raises(ValueError, match="k1, k2, k3"):
            losses.kl(BASE, BASE, kind)


def test_adaptive_kl_moves_at_most_a_fifth() -> None:
    assert losses.adaptive_kl(0.1, 99.0, 0.1, 100, 1000) == pytest.approx(0.1 * 1.02)
    assert losses.adaptive_kl(0.1, 0.0, 0.1, 100, 1000) == pytest.approx(0.1 * 0.98)
    assert losses.adaptive_kl(0.1, 0.1, 0.1, 100, 1000) == pytest.approx(0.1)


def test_value_clip_takes_the_larger_error() -> None:
    v, old, target = column([1.0, 0.0, 0.3]), column([0.0, 0.0, 0.2]), column([1.5, 1.5, 0.0])
    loss, clipped = losses.value_clip_loss(v, old, target, 0.2)
    assert loss.tolist() == pytest.approx([1.3**2, 1.5**2, 0.3**2])
    assert clipped.tolist() == [True, False, False]


def test_ratios_beyond_the_limit_are_clamped_and_have_no_gradient() -> None:
    leaf = column([500.0, -500.0]).requires_grad_()
    losses.ratio(leaf, column([0.0, 0.0])).sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [0, 0]
