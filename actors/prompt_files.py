"""Prompt files -> rows. A row keeps its place in the file, so that an error can name it.

    {"prompt": "sorted([3, 1, 2]) =", "answer": "[1, 2, 3]"}            -> Row("p.jsonl line 1", text=..., meta=...)
    {"messages": [{"role": "user", "content": "7+5?"}], "answer": "12"} -> Row("p.jsonl line 2", messages=..., meta=...)

Every other column goes to `meta`, where rewards find it. `columns` renames: {prompt: question, answer: extra.solution}.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt as its source states it: plain text or chat messages, never both."""

    place: str  # "data/p.jsonl line 17", "data/p.parquet row 17", "task chain_sum, index 17"
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def content(self) -> bytes:
        """What makes two rows the same question, hashed: rows of equal content never land on both sides of a split."""
        said = self.text if self.messages is None else json.dumps(self.messages, sort_keys=True, default=str)
        return hashlib.blake2b((said or "").strip().encode(), digest_size=16).digest()


def read_rows(path: str | Path, source: str, columns: Mapping[str, str]) -> list[Row]:
    """All rows of a jsonl or parquet file. ConfigError names the file, the line and the remedy."""
    path = Path(path)
    if not path.is_file():
        why = "is a directory" if path.is_dir() else "does not exist"
        raise ConfigError(f"prompt file {path} {why}; set prompts.path to a {source} file")
    try:
        records = _read_jsonl(path) if source == "jsonl" else _read_parquet(path)
        rows = [_row(place, record, columns) for place, record in records]
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"prompt file {path} cannot be read: {why}; check its permissions") from error
    if not rows:
        raise ConfigError(f'prompt file {path} is empty; it needs lines like {{"prompt": "7 + 5 =", "answer": "12"}}')
    return rows


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with open(path, "rb") as f:
        for number, line in enumerate(f, start=1):
            if not line.strip():
                continue
            try:
                yield f"{path} line {number}", json.loads(line)
            except UnicodeDecodeError as error:
                at = f"{path} line {number}"
                raise ConfigError(f"{at} is not UTF-8 (byte {error.start}); save the file as UTF-8") from None
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"{path} line {number} is not JSON ({error.msg} at column {error.colno}): "
                    f"{line.decode(errors='replace').strip()[:60]!r}; each line must be one object"
                ) from None


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"reading {path} needs the package pyarrow; pip install pyarrow") from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", record
    except pyarrow.ArrowException as error:
        reason = " ".join(str(error).split())[:160]
        raise ConfigError(f"{path} is not a readable parquet file (after row {number}): {reason}") from error


def _row(place: str, record: Any, columns: Mapping[str, str]) -> Row:
    if not isinstance(record, dict):
        raise ConfigError(f"{place} is {type(record).__name__}, not an object with a prompt")
    record = dict(record)
    for ours, theirs in columns.items():
        record[ours] = _column(place, record, ours, theirs)
    prompt, messages = record.pop("prompt", None), record.pop("messages", None)
    if isinstance(prompt, list) and messages is None:  # chat rows under the name `prompt` are common
        prompt, messages = None, prompt
    if (prompt is None) == (messages is None):
        what = "neither prompt nor messages" if prompt is None else "both prompt and messages"
        raise ConfigError(
            f"{place} has {what} (columns: {', '.join(map(str, record)) or 'none'}); "
            "map yours with prompts.columns, e.g. {prompt: question}"
        )
    if messages is not None:
        return Row(place, messages=_messages(place, messages), meta=record)
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(f"{place}: prompt is {prompt!r}; it must be a text that is not blank")
    return Row(place, text=prompt, meta=record)


def _column(place: str, record: Mapping[str, Any], ours: str, theirs: str) -> Any:
    """The value at a dotted path: `extra.solution` reads record["extra"]["solution"]."""
    value: Any = record
    for part in [theirs] if theirs in record else theirs.split("."):
        if not isinstance(value, Mapping) or part not in value:
            has = ", ".join(map(str, record))
            raise ConfigError(f"{place} has no column {theirs!r} (prompts.columns.{ours}); it has {has}")
        value = value[part]
    return value


def _messages(place: str, messages: Any) -> tuple[Message, ...]:
    well_formed = isinstance(messages, list) and bool(messages)
    for at, message in enumerate(messages if well_formed else ()):
        well_formed = isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message
        if not well_formed:
            raise ConfigError(f"{place}: messages[{at}] is {message!r:.80}; it needs role and content")
    if not well_formed:
        raise ConfigError(f"{place}: messages is {messages!r:.80}; it must be a list of role/content objects")
    return tuple(messages)
