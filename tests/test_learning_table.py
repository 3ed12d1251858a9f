"""Proves that the table of who learns judges: the rule that says who reached the target can say no."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import learning_table
from benchmarks.learning_table import TARGET, Cell, best_with_kl, online
from learner.presets import PRESETS
from rollout.errors import ConfigError

RISING = [0.1, 0.1, 0.3, 0.6, 0.85, 0.9, 0.95, 1.0]
LEARNT = Cell(
    "dapo", 2, 0, 8, 6e-3, {}, held_out=[0.1, 0.5, 1.0], reward=RISING, margin=[], staleness_mean=1.9,
    staleness_max=2, trained=64, dropped={}, books=True, seconds=3.0,
)  # fmt: skip


def test_learning_is_a_rise_on_held_out_prompts_and_in_what_is_sampled() -> None:
    assert TARGET.reached(LEARNT) and TARGET.steps_to(LEARNT) == 5
    lucky_start = replace(LEARNT, held_out=[0.5, 0.9, 1.0])
    forgot = replace(LEARNT, held_out=[0.1, 1.0, 0.8])
    greedy_only = replace(LEARNT, reward=[0.1] * 8)
    for cell in (lucky_start, forgot, greedy_only):
        assert not TARGET.reached(cell) and TARGET.steps_to(cell) is None
        assert "**not reached**" in learning_table.render([cell])


def test_a_row_shows_what_was_changed_and_what_was_not_run() -> None:
    changed = replace(LEARNT, preset="ppo", learning_rate=1e-2, overrides={"kl_coef": 0.001})
    (row,) = [line for line in learning_table.render([LEARNT, changed]).splitlines() if line.startswith("| `ppo`")]
    assert "learning_rate: 0.01, kl_coef: 0.001" in row and row.count("not run") == 3 and "1.9 / 2" in row


def test_a_cell_survives_its_file(tmp_path: Path) -> None:
    from rollout.event_log import JsonLines

    JsonLines(tmp_path / "cells.jsonl").append(LEARNT.line())
    assert learning_table.read(tmp_path / "cells.jsonl") == [LEARNT]
    assert learning_table.read(tmp_path / "none.jsonl") == []


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks\n")
    with pytest.raises(ConfigError, match="learning: begin"):
        learning_table.write_page(page, [LEARNT], [])
    assert page.read_text() == "no marks\n"


def test_policies_come_before_preferences() -> None:
    kinds = [PRESETS[n].objective for n in online()]
    assert set(online()) == set(PRESETS) and kinds == sorted(kinds)


def test_the_best_policy_under_a_kl_penalty_is_a_maximum() -> None:
    """p on letters, 1 - p on the rest, each uniform: reward p, penalty kl_coef * 8 tokens * KL(p against uniform)."""

    def worth(p: float, kl_coef: float) -> float:
        kl = p * math.log(p / (26 / 259)) + (1 - p) * math.log((1 - p) / (233 / 259))
        return p - kl_coef * 8 * kl

    for kl_coef in (0.05, 0.03):
        best = best_with_kl(kl_coef)
        assert worth(best, kl_coef) > max(worth(best - 0.01, kl_coef), worth(best + 0.01, kl_coef))
    assert best_with_kl(0.01) > 0.999
