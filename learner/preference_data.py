"""Files to learn from: one JSON object a line, read as tokens or refused with the line that is wrong.

{"prompt": .., "chosen": .., "rejected": ..}   read_pairs     DPO, Bradley-Terry
{"prompt": .., "answer": ..}                   read_answers   SFT
{"prompt": .., "answer": .., "rating": 4}      read_answers   reward regression
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollout.errors import ConfigError
from rollout.types import Int32

Encode = Callable[[str], Sequence[int]]  # text -> token ids, without special tokens of its own
KEYS = ("prompt", "chosen", "rejected")


@dataclass(frozen=True, slots=True, eq=False)
class PairTokens:
    """PairTokens(prompt_ids=int32[9], chosen_ids=int32[4], rejected_ids=int32[6]), for DPO and Bradley-Terry."""

    prompt_ids: Int32
    chosen_ids: Int32
    rejected_ids: Int32


@dataclass(frozen=True, slots=True, eq=False)
class AnswerTokens:
    """AnswerTokens(prompt_ids=int32[9], answer_ids=int32[4], rating=4.0), for SFT and rating regression."""

    prompt_ids: Int32
    answer_ids: Int32
    rating: float = math.nan  # NaN: not rated


def read_pairs(path: Path, encode: Encode) -> Iterator[PairTokens]:
    """Every pair of a JSON lines file, in order; blank lines are skipped. Raises ConfigError naming the line."""
    for where, row in _rows(path, KEYS):
        yield _pair(where, row, encode)


def read_answers(path: Path, encode: Encode) -> Iterator[AnswerTokens]:
    """Every answer of a JSON lines file, in order, with its rating where it has one. Raises ConfigError likewise."""
    for where, row in _rows(path, ("prompt", "answer")):
        prompt, answer = (np.asarray(encode(row[key]), dtype=np.int32) for key in ("prompt", "answer"))
        if not len(answer):
            raise ConfigError(f"{where}: there is nothing to learn from an empty answer; give it at least one token")
        rating = row.get("rating")
        if rating is not None and (isinstance(rating, bool) or not isinstance(rating, int | float)):
            raise ConfigError(f"{where}: 'rating' must be a number, got {rating!r}")
        yield AnswerTokens(prompt, answer, math.nan if rating is None else float(rating))


def _rows(path: Path, keys: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, object) for each line; the named keys are texts."""
    found, wanted = 0, f"{', '.join(keys[:-1])} and {keys[-1]}"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where, found = f"{path}, line {number}", found + 1
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: expected an object with {wanted}, got {type(row).__name__}")
        for key in keys:
            if not isinstance(row.get(key), str):
                raise ConfigError(f"{where}: {key!r} must be a text, got {row.get(key)!r}")
        yield where, row
    if not found:
        raise ConfigError(f"{path}: nothing in it; expected one object with {wanted} a line")


def _pair(where: str, row: dict[str, Any], encode: Encode) -> PairTokens:
    prompt, chosen, rejected = (np.asarray(encode(row[key]), dtype=np.int32) for key in KEYS)
    if not len(chosen) or not len(rejected):
        raise ConfigError(f"{where}: an empty answer cannot be compared; give both answers at least one token")
    if np.array_equal(chosen, rejected):
        raise ConfigError(
            f"{where}: chosen and rejected are the same tokens, so there is nothing to learn; drop the line"
        )
    return PairTokens(prompt, chosen, rejected)
