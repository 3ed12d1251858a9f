"""Reading fields off untrusted maps: every accessor either returns what it promises or raises WireError with the path.

f = Fields({"step": 5, "ordinals": [17, 18]}, "request")
f.int("step", 0, 1 << 40)  -> 5        f.str("holder", 100)  -> WireError("request.holder", "missing")
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from rollout.errors import WireError

Int: TypeAlias = int  # inside the class, `int` and `str` are accessors
Str: TypeAlias = str
Buffer = bytes | bytearray | memoryview


class Fields:
    """One map from outside, and where it stood."""

    def __init__(self, value: Any, path: Str) -> None:
        if not isinstance(value, dict):
            raise WireError(path, f"a {type(value).__name__}, not a map")
        self.value, self.path = value, path

    @classmethod
    def of_row(cls, row: Any, path: Str, names: Sequence[Str]) -> Fields:
        """A list with one entry per name."""
        if not isinstance(row, list) or len(row) != len(names):
            raise WireError(path, f"not a list of {', '.join(names)}")
        return cls(dict(zip(names, row, strict=True)), path)

    def _fail(self, name: Str, detail: Str) -> WireError:
        return WireError(f"{self.path}.{name}", detail)

    def get(self, name: Str) -> Any:
        if name not in self.value:
            raise self._fail(name, "missing")
        return self.value[name]

    def schema(self, ours: Int) -> None:
        theirs = self.value.get("schema")
        if theirs != ours:
            raise self._fail("schema", f"{str(theirs)[:40]} is unknown; this side speaks {ours}")

    def int(self, name: Str, low: Int, high: Int) -> Int:
        value = self.get(name)
        if type(value) is not int:
            raise self._fail(name, f"a {type(value).__name__}, not an integer")
        if not low <= value <= high:
            raise self._fail(name, f"{value} is not within {low} and {high}")
        return value

    def number(self, name: Str, low: float, high: float) -> float:
        value = self.get(name)
        if type(value) not in (int, float) or not low <= value <= high:
            raise self._fail(name, f"{str(value)[:40]} is not a number within {low} and {high}")
        return float(value)

    def bool(self, name: Str) -> bool:
        value = self.get(name)
        if type(value) is not bool:
            raise self._fail(name, f"a {type(value).__name__}, not true or false")
        return value

    def str(self, name: Str, most: Int) -> Str:
        value = self.get(name)
        if not isinstance(value, str) or len(value) > most:
            raise self._fail(name, f"not a text of at most {most} characters")
        return value

    def map(self, name: Str, max_depth: Int = 16) -> dict[Str, Any]:
        value = self.get(name)
        if not isinstance(value, dict):
            raise self._fail(name, f"a {type(value).__name__}, not a map")
        _check_depth(value, f"{self.path}.{name}", max_depth)
        return value

    def list(self, name: Str, exactly: Int | None = None, most: Int = 1 << 24) -> list[Any]:
        value = self.get(name)
        if not isinstance(value, list):
            raise self._fail(name, f"a {type(value).__name__}, not a list")
        if exactly is not None and len(value) != exactly:
            raise self._fail(name, f"{len(value)} entries, {exactly} expected")
        if len(value) > most:
            raise self._fail(name, f"{len(value)} entries, over the limit of {most}")
        return value

    def ints(self, name: Str, low: Int, high: Int, exactly: Int | None = None, most: Int = 1 << 24) -> tuple[Int, ...]:
        values = self.list(name, exactly, most)
        if values and set(map(type, values)) == {int} and low <= min(values) and max(values) <= high:
            return tuple(values)
        for i, value in enumerate(values):
            if type(value) is not int or not low <= value <= high:
                raise self._fail(f"{name}[{i}]", f"{str(value)[:40]} is not an integer within {low} and {high}")
        return tuple(values)


def _check_depth(value: Any, path: str, left: int) -> None:
    if left == 0:
        raise WireError(path, "nested too deeply")
    children = value.values() if isinstance(value, dict) else value
    if not {dict, list}.isdisjoint(map(type, children)):
        for child in children:
            if isinstance(child, (dict, list)):
                _check_depth(child, path, left - 1)


def frame_bytes(frames: Iterable[Buffer]) -> int:
    return sum(map(len, frames))
