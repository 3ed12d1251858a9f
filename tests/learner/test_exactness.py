"""Proves that an update does not depend on how its batch is cut: ranks, micro-batches, layout, ZeRO stage.

Real processes over gloo. The spanning subset runs here; the whole matrix, and every preset, in the soak.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from learner import exactness, presets
from learner.exactness import Case

ONLINE = sorted(name for name, c in presets.PRESETS.items() if c.objective == "policy")


@pytest.mark.timeout(600)
def test_the_spanning_subset_agrees(tiny_model: Path) -> None:
    cases = exactness.spanning("dapo")
    for axis in ("world", "accumulation", "layout", "zero_stage"):
        assert {getattr(c, axis) for c in cases} == {getattr(c, axis) for c in exactness.full("dapo")}
    assert {(c.world, c.loads[5:7]) for c in cases if c.loads} == {(2, "w1"), (4, "w2")}  # checkpoints that cross
    assert not [d for d in exactness.compare(tiny_model, cases, timeout_s=500) if not d.holds]


def test_the_comparison_sees_the_last_bits(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: rounding alone is seen once the tolerance is taken away."""
    case = Case(accumulation=2, layout="shared", zero_stage=1)
    monkeypatch.setattr(exactness, "TOLERANCE", 0.0)
    (difference,) = exactness.compare(tiny_model, [case], timeout_s=100)
    assert not difference.holds and 0 < difference.gradient < 1e-5


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_whole_matrix_agrees(tiny_model: Path) -> None:
    cases = exactness.full("dapo")
    assert len(cases) == 108
    assert not [d for d in exactness.compare(tiny_model, cases, timeout_s=3000) if not d.holds]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("preset", ONLINE)
def test_every_preset_agrees(tiny_model: Path, preset: str) -> None:
    assert not [d for d in exactness.compare(tiny_model, exactness.spanning(preset), timeout_s=3000) if not d.holds]
