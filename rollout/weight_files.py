"""Reading and writing safetensors as a stream, one tensor in memory at a time, on any file system that fsspec knows.

    8 bytes   length of the header, little-endian
    header    {"model.norm.weight": {"dtype": "BF16", "shape": [576], "data_offsets": [0, 1152]}, "__metadata__": {...}}
    data      the tensors, end to end

The safetensors library wants all tensors at once; a learner under ZeRO-3 and an engine next to its KV cache do not
have that much room. What is written here is read by every tool that reads safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from rollout.errors import WeightError

TO_CODE = {
    "bfloat16": "BF16",
    "float32": "F32",
    "float16": "F16",
    "float64": "F64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_LONGEST_HEADER = 100 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: `Entry("model.norm.weight", "bfloat16", (576,), 1152)`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def write(file: BinaryIO, entries: Iterable[Entry], data: Iterable[Any], metadata: Mapping[str, str]) -> int:
    """Write a whole file; `data` yields one bytes-like per entry, in order. Returns the bytes written."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for e in entries:
        header[e.name] = {"dtype": TO_CODE[e.dtype], "shape": list(e.shape), "data_offsets": [at, at + e.nbytes]}
        at += e.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for piece in data:
        file.write(piece)
    return 8 + len(text) + at


def read_header(file: BinaryIO) -> tuple[list[Entry], dict[str, str]]:
    """Entries in the order of their data, and the metadata; the file is left at the first tensor's first byte."""
    length = int.from_bytes(_exactly(file, 8), "little")
    if length > _LONGEST_HEADER:
        raise WeightError(f"a weights file claims a header of {length} bytes; it is damaged or no safetensors file")
    try:
        header = json.loads(_exactly(file, length))
        metadata = header.pop("__metadata__", {})
        names = {code: name for name, code in TO_CODE.items()}
        rows = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        entries = [
            Entry(n, names[row["dtype"]], tuple(row["shape"]), row["data_offsets"][1] - row["data_offsets"][0])
            for n, row in rows
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightError(f"a weights file has an unreadable header ({error}); it is damaged") from error
    return entries, metadata


def read_data(file: BinaryIO, entries: Iterable[Entry]) -> Iterator[tuple[Entry, bytes]]:
    """The bytes of each entry, in order, one at a time."""
    for e in entries:
        yield e, _exactly(file, e.nbytes)


def _exactly(file: BinaryIO, n: int) -> bytes:
    data = file.read(n)
    if len(data) != n:
        raise WeightError(f"a weights file ends {n - len(data)} bytes early; it was cut short")
    return data
