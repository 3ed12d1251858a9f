"""(prompt, chosen, rejected) files: one JSON object a line, read as tokens or refused with the line that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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


def read_pairs(path: Path, encode: Encode) -> Iterator[PairTokens]:
    """Every pair of a JSON lines file, in order; blank lines are skipped. Raises ConfigError naming the line."""
    found = 0
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            found += 1
            yield _pair(f"{path}, line {number}", line, encode)
    if not found:
        raise ConfigError(f"{path}: no pairs in it; expected one {{prompt, chosen, rejected}} object a line")


def _pair(where: str, line: str, encode: Encode) -> PairTokens:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object with prompt, chosen and rejected, got {type(row).__name__}")
    for key in KEYS:
        if not isinstance(row.get(key), str):
            raise ConfigError(f"{where}: {key!r} must be a text, got {row.get(key)!r}")
    prompt, chosen, rejected = (np.asarray(encode(row[key]), dtype=np.int32) for key in KEYS)
    if not len(chosen) or not len(rejected):
        raise ConfigError(f"{where}: an empty answer cannot be compared; give both answers at least one token")
    if np.array_equal(chosen, rejected):
        raise ConfigError(
            f"{where}: chosen and rejected are the same tokens, so there is nothing to learn; drop the line"
        )
    return PairTokens(prompt, chosen, rejected)
