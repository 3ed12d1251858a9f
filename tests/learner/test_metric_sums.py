"""Metrics add up: parts of any split, summed in any order or by one all-reduce, finish as the metrics of the whole."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.metric_sums import MetricSums


def sums(x: Tensor, mask: Tensor) -> MetricSums:
    return MetricSums.of(
        mean={"m": (x, mask)}, total={"t": x[mask].sum()}, ess={"e": (x.exp(), mask)}, log_ratio={"r": (x, mask)}
    )


@given(st.lists(st.tuples(st.floats(-3, 3), st.booleans()), min_size=1, max_size=60), st.integers(0, 60))
def test_any_split_finishes_alike(rows: list[tuple[float, bool]], at: int) -> None:
    x, mask = torch.tensor([r[0] for r in rows], dtype=torch.float64), torch.tensor([r[1] for r in rows])
    whole = sums(x, mask).finish()
    parts = [sums(x[:at], mask[:at]), sums(x[at:], mask[at:])]
    summed = (parts[0] + parts[1]).finish()
    reduced = parts[0].reduced(lambda v: v + torch.cat([parts[1].parts[k] for k in sorted(parts[1].parts)])).finish()
    for other in (summed, reduced):
        assert other.keys() == whole.keys()
        assert all(math.isclose(whole[k], other[k], rel_tol=1e-9, abs_tol=1e-12) for k in whole)


def test_by_hand() -> None:
    x, mask = torch.tensor([0.0, math.log(3.0), 99.0]), torch.tensor([True, True, False])
    done = sums(x, mask).finish()
    assert done["m"] == pytest.approx(math.log(3) / 2)
    assert done["t"] == pytest.approx(math.log(3))
    assert done["e"] == pytest.approx((1 + 3) ** 2 / (2 * (1 + 9)))
    assert done["r_p01"] == pytest.approx(1.0, rel=0.06)
    assert done["r_p99"] == pytest.approx(3.0, rel=0.06)


def test_nothing_counted_is_zero_and_never_nan() -> None:
    nothing = torch.tensor([False, False])
    assert set(sums(torch.tensor([math.nan, math.inf]), nothing).finish().values()) == {0.0}
    assert MetricSums().reduced(lambda v: v).finish() == {}


def test_masked_nan_does_not_leak() -> None:
    done = sums(torch.tensor([math.nan, 0.5]), torch.tensor([False, True])).finish()
    assert done["m"] == pytest.approx(0.5) and done["e"] == pytest.approx(1.0)


def test_a_metric_that_only_some_parts_have_keeps_its_own_count() -> None:
    a = MetricSums.of(mean={"x": (torch.tensor([2.0]), torch.tensor([True]))})
    b = MetricSums.of(mean={"y": (torch.tensor([4.0]), torch.tensor([True]))})
    assert (a + b).finish() == {"x": 2.0, "y": 4.0}
