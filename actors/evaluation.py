"""Held-out evaluation: greedy answers of the engines, judged by the run's own rewards. It is handed what it calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.types import Prompt, Scored, Verdict

NAME = "held_out"
Answer = tuple[str, list[int], list[int]]  # text, tokens, versions that made them


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One version's answers. `rows` has a line per prompt: what was asked, what came back, what it is worth."""

    version: int
    score: float
    failed: int
    other_versions: int
    rows: tuple[dict[str, Any], ...]

    def metrics(self) -> dict[str, float]:
        return {f"eval/{NAME}/reward": self.score}

    def event(self) -> dict[str, Any]:
        counts = {"prompts": len(self.rows), "failed": self.failed, "other_versions": self.other_versions}
        return {"version": self.version, "name": NAME, "score": self.score, **counts}


def evaluate(
    prompts: Sequence[Prompt],
    version: int,
    answer: Callable[[Sequence[Prompt]], Sequence[Answer]],
    judge: Callable[[Sequence[Prompt], Sequence[str]], Sequence[Verdict]],
) -> Evaluation:
    """Ask, judge, average. A failed verdict counts in `failed`, never as a zero; NaN where every verdict failed.

    `other_versions` counts answers with a token of another version: the learner publishes nothing while an evaluation
    runs, so anything but 0 is a defect.
    """
    answers = answer(prompts)
    verdicts = judge(prompts, [text for text, _, _ in answers])
    values = [v.value for v in verdicts if isinstance(v, Scored)]
    rows = tuple(
        {
            "prompt": p.text,
            "answer": text,
            "token_ids": tokens,
            "versions": made_by,
            "value": v.value if isinstance(v, Scored) else None,
        }
        for p, (text, tokens, made_by), v in zip(prompts, answers, verdicts, strict=True)
    )
    return Evaluation(
        version=version,
        score=sum(values) / len(values) if values else float("nan"),
        failed=len(rows) - len(values),
        other_versions=sum(row["versions"] != [version] for row in rows),
        rows=rows,
    )
