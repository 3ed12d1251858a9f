"""What it takes to have learnt, and the table of docs/algorithms.md that says who did. Pure; rows come from a file.

docs/learning.jsonl         one line per cell, as measured: curves and ages, no judgement
docs/learning_pairs.jsonl   one line per journal read back
TARGET                      the judgement, in one place
render(cells, offline)      the section of the page; a test holds page and files together
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from learner.presets import PRESETS
from rollout.errors import ConfigError
from rollout.event_log import read_lines, replace_file

BEGIN, END = "<!-- learning: begin -->", "<!-- learning: end -->"
STALENESS = (0, 1, 2, 4)
STEPS = 32
LEARNING_RATE = 6e-3
# Once every answer is right, PPO's advantages are the critic's errors alone, and whitening makes them of size one: at
# 6e-3 a run (bound 1) that had reached 1.00 fell to 0.82 in its last steps.
LEARNING_RATES = {"ppo": 3e-3}

# The coefficient of a KL penalty in the reward is in units of reward per nat, and one token is worth 1/8 here. With the
# papers' 0.05 and 0.03 the best policy there is earns 0.58 and 0.88 (`best_with_kl`): it is not asked to learn more.
CHANGES: dict[str, dict[str, float]] = {
    "ppo": {"kl_coef": 0.01},
    "rloo": {"kl_coef": 0.01},
    "rloo_sequence": {"kl_coef": 0.01},
}


@dataclass(frozen=True, slots=True)
class Target:
    """Both must hold: greedy answers to prompts never trained on, and what the policy really samples."""

    held_out: float = 0.9  # after the last step
    rise: float = 0.6  # of the same, above what it was before the first step
    sampled: float = 0.8  # mean reward of the groups trained on, last three steps
    last: int = 3

    def steps_to(self, cell: Cell) -> int | None:
        """The first step that trained on answers worth `sampled`; None where the target is not reached."""
        if not self.reached(cell):
            return None
        return next(n for n, value in enumerate(cell.reward, start=1) if value >= self.sampled)

    def reached(self, cell: Cell) -> bool:
        end = cell.held_out_end
        return (
            end >= self.held_out and end - cell.held_out_start >= self.rise and self.sampled_end(cell) >= self.sampled
        )

    def sampled_end(self, cell: Cell) -> float:
        return _mean(cell.reward[-self.last :])


TARGET = Target()


def best_with_kl(kl_coef: float, tokens: int = 8, vocabulary: int = 259, letters: int = 26) -> float:
    """The expected reward of the best policy when each answer pays kl_coef * log(pi / ref), ref uniform.

    The maximiser is pi ~ ref * exp(reward / kl_coef), and a token is worth 1 / tokens if it is one of the letters.
    """
    odds = letters * math.exp(1 / (tokens * kl_coef)) / (vocabulary - letters)
    return odds / (1 + odds)


@dataclass(frozen=True, slots=True)
class Cell:
    """One run as measured. `held_out` and `reward` are curves: versions 0, 2, ..., steps; steps 1, 2, ..., steps."""

    preset: str
    staleness: int  # the bound of the run
    seed: int
    steps: int
    learning_rate: float
    overrides: Mapping[str, Any]
    held_out: Sequence[float]
    reward: Sequence[float]
    margin: Sequence[float]  # of preference presets, per step; empty for the others
    staleness_mean: float
    staleness_max: int
    trained: int  # groups
    dropped: Mapping[str, int]
    books: bool  # the audit found every ordinal trained once or dropped, and every token of a committed version
    seconds: float  # of the run, between its first and its last step

    @property
    def held_out_start(self) -> float:
        return self.held_out[0]

    @property
    def held_out_end(self) -> float:
        return self.held_out[-1]

    @property
    def key(self) -> tuple[object, ...]:
        """What was run, without what came of it: cells of one key need not be run again."""
        return self.preset, self.staleness, self.seed, self.steps, self.learning_rate, json.dumps(dict(self.overrides))

    def line(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class FromJournal:
    """FromJournal("dpo", "tiny", 48, held_out_pairs=16, steps=24, margin=(0, 1.4), accuracy=1.0, reward=(0.11, 1.0))"""

    preset: str
    run: str  # the name of the run that left the journal
    pairs: int
    held_out_pairs: int
    steps: int
    margin: Sequence[float]  # on the held-out pairs; before and after
    accuracy: float  # share of the held-out pairs with a positive margin, after
    reward: Sequence[float]  # of greedy answers to held-out prompts; before and after

    @property
    def reached(self) -> bool:
        return self.margin[1] > self.margin[0] and self.reward[1] >= self.reward[0] + TARGET.rise


def online() -> list[str]:
    """Every preset that trains in the loop: policies on scored answers, then preferences on pairs of the groups."""
    return sorted(PRESETS, key=lambda name: PRESETS[name].objective != "policy")


def read(path: Path) -> list[Cell]:
    return [Cell(**row) for row in read_lines(path)]


def read_pairs(path: Path) -> list[FromJournal]:
    return [FromJournal(**row) for row in read_lines(path)]


def render(cells: Iterable[Cell], offline: Iterable[FromJournal] = ()) -> str:
    """The section between the marks: who learns at which staleness, then how margins rise where pairs are learnt."""
    by_place = {(c.preset, c.staleness): c for c in cells}
    if not by_place:
        raise ConfigError("nothing to render: run `headrace bench learning` first")
    ordered = [n for n in online() if any(name == n for name, _ in by_place)]
    head = ["preset", "changed", *(f"staleness {s}" for s in STALENESS)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name in ordered:
        row = [by_place.get((name, s)) for s in STALENESS]
        lines.append(f"| `{name}` | {_changed(row)} | " + " | ".join(map(_shown, row)) + " |")
    preferences = _preferences([c for c in by_place.values() if c.margin], offline)
    return "\n".join([_summary(list(by_place.values())), "", *lines, *preferences])


def _preferences(cells: Iterable[Cell], offline: Iterable[FromJournal]) -> list[str]:
    lines = [
        f"| `{c.preset}` | the groups of each step, staleness {c.staleness} | {_mean(c.margin[:4]):z.2f} → "
        f"{_mean(c.margin[-16:]):z.2f} | {c.held_out_start:.2f} → {c.held_out_end:.2f} |"
        for c in sorted(cells, key=lambda c: (online().index(c.preset), c.staleness))
    ]
    lines += [
        f"| `{j.preset}` | the journal of the run `{j.run}`: {j.pairs} pairs, {j.steps} steps | {j.margin[0]:.2f} → "
        f"{j.margin[1]:.2f} ({j.accuracy:.0%} of {j.held_out_pairs} held-out pairs) | "
        f"{j.reward[0]:.2f} → {j.reward[1]:.2f} |"
        for j in offline
    ]
    head = ["", "| preset | pairs from | margin | held-out reward |", "|---|---|---|---|"]
    return [*head, *lines] if lines else []


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _summary(cells: Sequence[Cell]) -> str:
    reached = sum(TARGET.reached(c) for c in cells)
    starts = sorted({f"{c.held_out_start:.2f}" for c in cells})
    return (
        f"{reached} of {len(cells)} cells reach the target: held-out reward at least {TARGET.held_out:g} and "
        f"{TARGET.rise:g} above the start (it was {' / '.join(starts)}), sampled reward of the last {TARGET.last} "
        f"steps at least {TARGET.sampled:g}. A cell shows held-out reward at the end, sampled reward at the end, the "
        "first step that trained on answers worth the target, and the staleness of its groups, mean / largest."
    )


def _changed(row: Sequence[Cell | None]) -> str:
    cell = next(c for c in row if c is not None)
    rate = {"learning_rate": cell.learning_rate} if cell.learning_rate != LEARNING_RATE else {}
    return ", ".join(f"{key}: {value:g}" for key, value in (rate | dict(cell.overrides)).items()) or "–"


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return "not run"
    step = TARGET.steps_to(cell)
    when = f"step {step}" if step else "**not reached**"
    ages = f"{cell.staleness_mean:.1f} / {cell.staleness_max}"
    return f"{cell.held_out_end:.2f}, {TARGET.sampled_end(cell):.2f}, {when}, {ages}"


def between_marks(page: str) -> str:
    """The section of a page. Raises ConfigError where the marks are missing."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ConfigError(f"the page must have {BEGIN} ... {END} once")
    return page.split(BEGIN)[1].split(END)[0].strip()


def write_page(page: Path, cells: Iterable[Cell], offline: Iterable[FromJournal]) -> None:
    """Put the section into the page, whole or not at all."""
    text = page.read_text(encoding="utf-8")
    between_marks(text)
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    replace_file(page, f"{before}{BEGIN}\n{render(cells, offline)}\n{END}{after}")
