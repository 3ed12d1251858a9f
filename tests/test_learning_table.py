"""Proves that the table of who learns is what was measured: the page is the files', every cell is there, and the rule
that says who reached the target can say no."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import learning_table
from benchmarks.learning_table import STALENESS, STEPS, TARGET, Cell, best_with_kl, online
from learner.presets import PRESETS
from rollout.errors import ConfigError

DOCS = Path(__file__).parents[1] / "docs"
RISING = [0.1, 0.1, 0.3, 0.6, 0.85, 0.9, 0.95, 1.0]
LEARNT = Cell(
    "dapo", 2, 0, 8, 6e-3, {}, held_out=[0.1, 0.5, 1.0], reward=RISING, margin=[], staleness_mean=1.9,
    staleness_max=2, trained=64, dropped={}, books=True, seconds=3.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def measured() -> list[Cell]:
    return learning_table.read(DOCS / "learning.jsonl")


def test_the_page_shows_what_was_measured(measured: list[Cell]) -> None:
    page = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    offline = learning_table.read_pairs(DOCS / "learning_pairs.jsonl")
    assert offline and all(j.reached for j in offline)
    assert learning_table.between_marks(page) == learning_table.render(measured, offline), (
        "run: python -m benchmarks.learning --render docs/algorithms.md"
    )


def test_every_preset_was_run_at_every_bound_and_every_run_reached_the_target(measured: list[Cell]) -> None:
    places = {(c.preset, c.staleness) for c in measured}
    assert places == {(p, s) for p in PRESETS for s in STALENESS} and len(places) == len(measured)
    assert [(c.preset, c.staleness) for c in measured if not TARGET.reached(c)] == []


def test_every_run_was_whole(measured: list[Cell]) -> None:
    for c in measured:
        assert c.books and c.steps == STEPS == len(c.reward) and c.trained == STEPS * 8, c
        assert c.staleness_max == c.staleness and c.staleness_mean >= 0.5 * c.staleness, c


def test_margins_rise_where_pairs_are_learnt(measured: list[Cell]) -> None:
    of_pairs = [c for c in measured if PRESETS[c.preset].objective == "preference"]
    assert {c.preset for c in of_pairs} == {"dpo", "dpo_ipo"}
    for c in of_pairs:
        # a step whose groups are alike has no pairs
        assert STEPS - 4 <= len(c.margin) <= STEPS and sum(c.margin[-16:]) / 16 > sum(c.margin[:4]) / 4 + 0.3, c


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
