"""Proves that an update does not depend on how its batch is cut: ranks, micro-batches, layout, ZeRO stage.

Real processes over gloo. The spanning subset runs here; the whole matrix, for every preset, in the soak.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from learner import exactness, presets
from learner.exactness import Case


@pytest.mark.timeout(600)
def test_the_spanning_subset_agrees(tiny_model: Path) -> None:
    cases = exactness.spanning("dapo")
    for axis in ("world", "accumulation", "layout", "zero_stage"):
        assert {getattr(c, axis) for c in cases} == {getattr(c, axis) for c in exactness.full("dapo")}
    assert {(c.world, c.loads[5:7]) for c in cases if c.loads} == {(2, "w1"), (4, "w2")}  # checkpoints that cross
    # a critic with a bias of one element, which two ranks cannot share, and a checkpoint of it; pairs
    cases += [c for c in exactness.spanning("ppo") if c.world == 2 and c.zero_stage == 3]
    cases += [Case(2, 1, "shared", 2, "dpo"), Case(2, 2, "shared", 1, "ppo", mini_batches=2, epochs=2)]
    assert not [d for d in exactness.compare(tiny_model, cases, timeout_s=500) if not d.holds]


def test_the_comparison_sees_the_last_bits(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: rounding alone is seen once the tolerance is taken away."""
    case = Case(accumulation=2, layout="shared", zero_stage=1)
    monkeypatch.setattr(exactness, "TOLERANCE", 0.0)
    (difference,) = exactness.compare(tiny_model, [case], timeout_s=100)
    assert not difference.holds and 0 < difference.gradient < 1e-5


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_the_whole_matrix_agrees_for_every_preset(tiny_model: Path) -> None:
    cases = [case for preset in presets.PRESETS for case in (*exactness.full(preset), *exactness.spanning(preset))]
    cases += [replace(c, mini_batches=2, epochs=2) for p in ("ppo", "dapo") for c in exactness.full(p)]
    assert len({c for c in cases if c.preset == "gspo" and not c.loads}) == 108
    differences = exactness.compare(tiny_model, list(dict.fromkeys(cases)), timeout_s=7000)
    assert not [d for d in differences if not d.holds]
