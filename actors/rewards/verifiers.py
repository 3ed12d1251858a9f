"""Verifiers: (answer, meta, settings) -> a number in [0, 1]. A wrong answer is 0; only a broken row may raise.

`meta` is the prompt's row; the reference answer is meta["answer"] unless `reference` names another column, and may be
a list, of which any is right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Meta = Mapping[str, Any]
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")


def exact(answer: str, meta: Meta, *, reference: str = "answer", ignore_case: bool = False) -> float:
    """1 when the answer, stripped, is the reference."""
    fold = str.casefold if ignore_case else str
    return float(any(fold(answer.strip()) == fold(r) for r in references(meta, reference)))


def contains(answer: str, meta: Meta, *, reference: str = "answer", ignore_case: bool = False) -> float:
    """1 when the reference occurs anywhere in the answer."""
    fold = str.casefold if ignore_case else str
    return float(any(fold(r) in fold(answer) for r in references(meta, reference)))


def regex(answer: str, meta: Meta, *, pattern: str, reference: str | None = None) -> float:
    """1 when the pattern is found; with `reference`, when its first group (or the whole match) is the reference.

    Of several matches the last one counts, as in "... so the answer is (42)".
    """
    found = list(re.finditer(pattern, answer))
    if not found or reference is None:
        return float(bool(found))
    said = found[-1].group(1 if found[-1].re.groups else 0) or ""
    return float(said.strip() in references(meta, reference))


def numeric(
    answer: str, meta: Meta, *, reference: str = "answer", tolerance: float = 1e-6, which: str = "last"
) -> float:
    """1 when the last (or first) number in the answer equals the reference within a relative tolerance."""
    said = NUMBER.findall(answer)
    if not said:
        return 0.0
    got = _number(said[0 if which == "first" else -1])
    wanted = [_number(r) for r in references(meta, reference)]
    return float(any(abs(got - w) <= tolerance * max(1.0, abs(w)) for w in wanted))


def math(answer: str, meta: Meta, *, reference: str = "answer") -> float:
    """1 when math-verify finds the answer equal to the reference (LaTeX or plain expressions)."""
    from math_verify import parse, verify

    # Its own timeouts use SIGALRM and cannot interrupt C code; our deadline kills the process instead.
    said = parse(answer, parsing_timeout=None)
    wanted = [parse(r, parsing_timeout=None) for r in _latex(meta, reference)]
    return float(any(verify(w, said, timeout_seconds=None) for w in wanted))


def reasoning_gym(answer: str, meta: Meta) -> float:
    """The task's own score of the answer (some tasks give part marks)."""
    from actors.reasoning_tasks import score_answer

    return score_answer(meta["reasoning_gym"], answer.strip())


def references(meta: Meta, column: str) -> list[str]:
    """The acceptable answers of a row, stripped."""
    value = meta[column]
    if value is None:
        raise KeyError(column)
    return [str(v).strip() for v in (value if isinstance(value, list | tuple) else [value])]


def _latex(meta: Meta, column: str) -> list[str]:
    """References as math-verify reads them best: LaTeX inside dollars, unless they are marked already."""
    return [r if "$" in r or "\\boxed" in r else f"${r}$" for r in references(meta, column)]


def _number(text: str) -> float:
    return float(text.replace(",", ""))


VERIFIERS: dict[str, Callable[..., float]] = {
    f.__name__: f for f in (exact, contains, regex, numeric, math, reasoning_gym)
}
PACKAGES = {"math": ("math_verify", "math-verify"), "reasoning_gym": ("reasoning_gym", "reasoning-gym")}
