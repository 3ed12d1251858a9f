"""Held-out evaluation: greedy answers of the engines, judged by the run's own rewards. It is handed what it calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollout.types import Prompt, Scored, Verdict

Answer = tuple[str, list[int], list[int]]  # text, tokens, versions that made them
Metrics = dict[str, float]


def evaluate(
    prompts: Sequence[Prompt],
    version: int,
    answer: Callable[[Sequence[Prompt]], Sequence[Answer]],
    judge: Callable[[Sequence[Prompt], Sequence[str]], Sequence[Verdict]],
) -> tuple[Metrics, dict[str, object]]:
    """Metrics of one version and the event that records them.

    A failed verdict counts in `failed`, never as a zero. `other_versions` counts answers with a token of another
    version: the learner publishes nothing while an evaluation runs, so anything but 0 is a defect.
    """
    answers = answer(prompts)
    verdicts = judge(prompts, [text for text, _, _ in answers])
    values = [v.value for v in verdicts if isinstance(v, Scored)]
    score = sum(values) / len(values) if values else float("nan")
    event: dict[str, object] = {
        "version": version,
        "name": "held_out",
        "score": score,
        "prompts": len(prompts),
        "failed": len(prompts) - len(values),
        "other_versions": sum(versions != [version] for _, _, versions in answers),
    }
    return {"eval/held_out/reward": score}, event
