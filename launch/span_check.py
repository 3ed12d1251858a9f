"""Holds what trajectories say about their tokens against what `events.jsonl` says about weight commits.

    check_spans(directory, bound) -> SpanCheck(groups=24, tokens=1530, wrong=())

Two witnesses that do not know each other: vLLM stamped the tokens inside the engine; the learner wrote down when an
engine had proven and committed a version. Every token must come from a committed version, a trajectory must not step
over a version that was committed in between, and no trained group may be staler than the bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from launch.run_dir import RunDirectory
from rollout.event_log import Row, read_lines
from rollout.journal import read_groups
from rollout.types import Group


@dataclass(frozen=True, slots=True)
class SpanCheck:
    """`wrong` names each contradiction; the journal is read as far back as it still reaches."""

    groups: int
    tokens: int
    wrong: tuple[str, ...]


def check_spans(directory: RunDirectory, bound: int) -> SpanCheck:
    """Read journal, events and the learner's log of one run. Nothing needs to be running."""
    committed = {e["version"] for e in directory.events() if e["event"] == "weights_committed"}
    groups = tokens = 0
    wrong: list[str] = []
    for group in read_groups(directory.journal):
        groups, tokens = groups + 1, tokens + group.n_tokens
        wrong += _contradictions(group, committed)
    wrong += _too_stale(read_lines(directory.trained_path), bound)
    return SpanCheck(groups, tokens, tuple(wrong))


def _contradictions(group: Group, committed: set[int]) -> Iterator[str]:
    for i, trajectory in enumerate(group.trajectories):
        where = f"ordinal {group.ordinal}, answer {i}"
        trajectory.check()
        made_by = [span.version for span in trajectory.versions]
        yield from (f"{where}: version {v} was never committed" for v in made_by if v not in committed)
        for before, after in pairwise(made_by):
            skipped = sorted(v for v in committed if before < v < after)
            if len(skipped) > 1:  # one may pass between two tokens of a short pause
                yield f"{where}: goes from version {before} to {after} over {skipped}"


def _too_stale(trained: Iterator[Row], bound: int) -> Sequence[str]:
    return [
        f"step {row['step']}: ordinal {ordinal} has a token of version {oldest}, bound is {bound}"
        for row in trained
        if "step" in row
        for ordinal, oldest in zip(row["ordinals"], row["oldest_versions"], strict=True)
        if row["step"] - oldest > bound
    ]
