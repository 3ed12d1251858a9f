"""Weights for stale and mismatched tokens by hand: caps, bands, sequence and geometric levels, off-policy sequence
masking, M2PO over the whole step, clip widths by age, A-3PO, and the mismatch metrics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner import corrections
from learner.segments import Segments

# Two answers: weights 0.5, 4 (product 2, geometric sqrt 2) and 0.25 (product and geometric 0.25); one masked token.
W = torch.tensor([0.5, 4.0, 0.25, 1e9], dtype=torch.float64)
SEQ = Segments(torch.tensor([0, 0, 1, 1]), 2, torch.tensor([1, 1, 1, 0]).bool())
LOG_W = torch.where(SEQ.mask, W.log(), torch.zeros(4, dtype=torch.float64))  # as objective.py hands it over


@pytest.mark.parametrize(
    ("kind", "low", "high", "weights"),
    [
        ("none", None, None, [1, 1, 1]),
        ("uncapped", None, None, [0.5, 4, 0.25]),
        ("tis", None, 2.0, [0.5, 2, 0.25]),
        ("tis", 0.4, 2.0, [0.5, 2, 0.4]),
        ("mis", 0.4, 5.0, [0.5, 4, 0]),
        ("mis", None, 2.0, [0.5, 0, 0.25]),
        ("mask", 0.4, 2.0, [1, 0, 0]),
        ("seq_tis", None, 1.5, [1.5, 1.5, 0.25]),
        ("seq_mis", 0.5, 3.0, [2, 2, 0]),
        ("seq_mask", None, 1.5, [0, 0, 1]),
        ("geo_tis", None, 1.2, [1.2, 1.2, 0.25]),
        ("geo_mis", 0.5, 2.0, [0.5, 4, 0]),  # survivors keep their token weights
        ("geo_mask", 0.5, 2.0, [1, 1, 0]),
    ],
)
def test_weights_by_hand(kind: str, low: float | None, high: float | None, weights: list[float]) -> None:
    got, keep = corrections.correct(kind, LOG_W, SEQ, low, high)
    assert got[:3].tolist() == pytest.approx(weights)
    assert [bool(k) for k in keep[:3]] == [w != 0 for w in weights]


def test_long_answers_do_not_overflow() -> None:
    seq = Segments(torch.zeros(1000, dtype=torch.long), 1, torch.ones(1000).bool())
    for sign in (1, -1):
        w = corrections.sequence_weight(torch.full((1000,), sign * 3.0), seq)
        assert torch.isfinite(w).all() and (w > 0).all()


def test_opsm_drops_negative_answers_that_drifted() -> None:
    """Mean log mu/pi: .5 and .5 and -.5; advantages -1, 1, -1: only the first goes."""
    seq = Segments(torch.tensor([0, 0, 1, 2]), 3, torch.ones(4).bool())
    mu, logp = torch.tensor([-1.0, -1.0, -1.0, -1.5]), torch.tensor([-1.0, -2.0, -1.5, -1.0])
    keep, drift = corrections.opsm(logp, mu, torch.tensor([-1.0, -1.0, 1.0, -1.0]), seq, 0.4)
    assert keep.tolist() == [False, True, True]
    assert drift.tolist() == pytest.approx([0.5, 0.5, -0.5])


def greedy_m2po(squares: list[float], tau: float) -> set[int]:
    """Drop the largest until the mean of the rest is at most tau."""
    order = sorted(range(len(squares)), key=lambda i: squares[i])
    while order and sum(squares[i] for i in order) > tau * len(order):
        order.pop()
    return set(order)


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=30, unique_by=lambda x: round(abs(x), 4)), st.floats(0.001, 1.0))
def test_m2po_is_the_greedy_rule(log_w: list[float], tau: float) -> None:
    x = torch.tensor(log_w, dtype=torch.float64)
    want = greedy_m2po([v * v for v in log_w], tau)
    mean_gap = min(
        (abs(sum(sorted(v * v for v in log_w)[: n + 1]) - tau * (n + 1)) for n in range(len(log_w))), default=1
    )
    if mean_gap > 1e-9:  # exactly at the bound the last bit decides
        keep = corrections.m2po(x, torch.ones(len(x)).bool(), tau)
        assert {i for i, k in enumerate(keep.tolist()) if k} == want


def test_m2po_chooses_over_all_ranks_and_never_a_masked_token() -> None:
    x = torch.tensor([0.1, 0.2, 1.0, 1.5], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    alone = corrections.m2po(x, mask, 0.04)
    assert alone.tolist() == [True, True, False, False]

    def with_another_rank(part: Tensor) -> Tensor:
        """The other rank holds 97 tokens of weight 1: there is room for the large one."""
        return part + torch.tensor([0.0, 97.0], dtype=torch.float64)

    assert corrections.m2po(x, mask, 0.04, with_another_rank).tolist() == [True, True, True, False]
    assert not corrections.m2po(x, torch.zeros(4).bool(), 0.04).any()


def test_clip_width_by_age() -> None:
    ages = torch.tensor([0, 1, 3, -5])
    assert corrections.staleness_width(0.2, ages, 0.5).tolist() == pytest.approx([0.2, 0.2 * math.sqrt(2), 0.4, 0.2])  # type: ignore[union-attr]
    assert corrections.staleness_width(0.2, ages, -1.0).tolist() == pytest.approx([0.2, 0.1, 0.05, 0.2])  # type: ignore[union-attr]


def test_loglinear_prox_lies_between_engine_and_learner() -> None:
    """Versions 5 against 2: two thirds of the way; against 4: none (mu is proximal); against 5: none."""
    now, mu = torch.zeros(3).double().requires_grad_(), torch.full((3,), -3.0).double()
    prox = corrections.loglinear_prox(now, mu, torch.tensor(5), torch.tensor([2, 4, 5]))
    assert prox.tolist() == pytest.approx([-1.0, -3.0, -3.0])
    assert not prox.requires_grad


@given(st.floats(-5, 5))
def test_mismatch_k3_is_never_negative(log_w: float) -> None:
    got = float(corrections.mismatch_k3(torch.tensor([log_w], dtype=torch.float64)))
    assert got == pytest.approx(math.exp(log_w) - 1 - log_w, abs=1e-9) and got >= 0
