"""reasoning_gym as a source of prompts: an index is a question, for ever the same one.

A task's own data set has a size (500 unless told otherwise) and some tasks cannot be asked beyond it, so the endless
stream is cut into blocks of 500, each a data set with its own seed derived from (stream seed, block).
What a scorer needs to rebuild the very same entry travels in the row:

    meta = {"answer": "12", "reasoning_gym": {"task": "chain_sum", "args": {...}, "seed": 834417, "index": 17}}
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from actors.prompt_files import Row
from rollout.errors import ConfigError

BLOCK = 500
DEFAULT_TEMPLATE = "Question: {prompt}\nAnswer:"


class ReasoningTask:
    """An endless stream of rows of one task; `seed` picks the stream."""

    def __init__(self, task: str, args: Mapping[str, Any], seed: int) -> None:
        check_task(task, args)
        self.task, self.args, self.seed = task, dict(args), seed

    def row(self, index: int) -> Row:
        block, at = divmod(index, BLOCK)
        source = {"task": self.task, "args": self.args, "seed": _block_seed(self.seed, block), "index": at}
        entry = entry_of(source)
        meta = {"answer": entry["answer"], "reasoning_gym": source}
        return Row(f"task {self.task}, index {index}", text=entry["question"], meta=meta)


def check_task(task: str, args: Mapping[str, Any]) -> None:
    """ConfigError when the task or one of its settings does not exist or is refused."""
    names = _factory().DATASETS
    if task not in names:
        near = difflib.get_close_matches(task, names, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else f"there are {len(names)}: {', '.join(sorted(names))}"
        raise ConfigError(f"prompts.task {task!r} is no reasoning_gym task; {hint}")
    for key in ("seed", "size"):
        if key in args:
            raise ConfigError(f"prompts.args.{key}: remove it; questions follow run.seed and never run out")
    known = list(names[task][1].__dataclass_fields__)
    for key in args:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise ConfigError(f"prompts.args.{key} is no setting of {task}; {hint}")
    try:
        entry_of({"task": task, "args": dict(args), "seed": 0, "index": 0})
    except (AssertionError, ValueError, TypeError, KeyError, IndexError) as error:
        raise ConfigError(f"prompts.args {dict(args)!r} is refused by task {task}: {error}") from error


def entry_of(source: Mapping[str, Any]) -> dict[str, Any]:
    """The reasoning_gym entry (question, answer, metadata) that `source` names."""
    return _dataset_of(source)[source["index"]]


def score_answer(source: Mapping[str, Any], answer: str) -> float:
    """The task's own score in [0, 1] for one answer to the entry that `source` names."""
    dataset = _dataset_of(source)
    return float(dataset.score_answer(answer, dataset[source["index"]]))


def _dataset_of(source: Mapping[str, Any]) -> Any:
    return _dataset(source["task"], _freeze(source["args"]), source["seed"])


@lru_cache(maxsize=32)
def _dataset(task: str, args: tuple[tuple[str, Any], ...], seed: int) -> Any:
    return _factory().create_dataset(task, seed=seed, size=BLOCK, **{key: _thaw(value) for key, value in args})


def _freeze(value: Any) -> Any:
    """Hashable twin of a YAML value."""
    if isinstance(value, Mapping):
        return tuple((key, _freeze(item)) for key, item in value.items())
    return ("list", *map(_freeze, value)) if isinstance(value, list | tuple) else value


def _thaw(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    return [_thaw(item) for item in value[1:]] if value[:1] == ("list",) else {k: _thaw(v) for k, v in value}


def _block_seed(seed: int, block: int) -> int:
    """31 bits: what numpy's and random's seeders all accept, with room for the index that tasks add."""
    digest = hashlib.blake2b(f"{seed}/{block}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % (1 << 31)


def _factory() -> Any:
    try:
        import reasoning_gym.factory
    except ImportError:
        raise ConfigError("prompts.source reasoning_gym needs the package; pip install reasoning-gym") from None
    return reasoning_gym.factory
