"""The files of a journal: numbered segments of checksummed records.

    journal/00000001.segment = "HEADRACE-JOURNAL-1\\n" record record ...
    record = magic "HRec" | crc32 of what follows | meta length u32 | body length u64 | meta | body

The first record of each segment is a snapshot of everything before it, so recovery reads the newest segment only.
`meta` is msgpack; `body` is the raw arrays of one group, referred to by `Ref` and read back on demand.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from isal.isal_zlib import crc32

from rollout.errors import QueueError
from rollout.spare_files import open_shared
from rollout.wire import Buffer

TITLE = b"HEADRACE-JOURNAL-1\n"
HEAD = struct.Struct("<4sIIQ")
LENGTHS = struct.Struct("<IQ")  # the end of HEAD
LENGTHS_AT = HEAD.size - LENGTHS.size
MAGIC = b"HRec"
PLACED = 1 << 40  # numbers from here on name payload files (rollout/placed_payloads.py)


class Ref(NamedTuple):
    """Where a record lies: Ref(segment=3, offset=19, meta=118, body=4096)."""

    segment: int
    offset: int
    meta: int
    body: int

    @property
    def row(self) -> list[int]:
        return list(self)

    @property
    def body_at(self) -> int:
        return self.offset + HEAD.size + self.meta

    @property
    def end(self) -> int:
        return self.body_at + self.body


@dataclass(slots=True)
class Tail:
    """How a scan ended: bytes that are good, bytes after them, and why those are not."""

    good: int = 0
    dropped: int = 0
    why: str = ""


def segment_path(folder: Path, number: int) -> Path:
    return folder / (f"{number:08d}.segment" if number < PLACED else f"{number:x}.payload")


def segment_numbers(folder: Path) -> list[int]:
    return sorted(int(p.stem) for p in folder.glob("*.segment") if p.stem.isdigit())


def placed_numbers(folder: Path) -> list[int]:
    return [int(p.stem, 16) for p in folder.glob("*.payload")]


def checksum(pieces: Iterable[Buffer]) -> int:
    """Of everything in a record behind the checksum itself: both lengths, meta and body."""
    crc = 0
    for piece in pieces:
        crc = crc32(piece, crc)
    return crc


def record_head(meta: Buffer, body: Sequence[Buffer], check: bool = True) -> bytes:
    lengths = len(meta), sum(map(len, body))
    return HEAD.pack(MAGIC, checksum((LENGTHS.pack(*lengths), meta, *body)) if check else 0, *lengths)


def scan(folder: Path, number: int, tail: Tail, verify: bool = True) -> Iterator[tuple[memoryview, Ref]]:
    """(meta, ref) of each good record, in order; stops at the first torn one and leaves the account in `tail`.

    The metas are views of the mapped file: use them before the next one is asked for.
    """
    with open(segment_path(folder, number), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < len(TITLE) or file.read(len(TITLE)) != TITLE:
            tail.dropped, tail.why = size, "the title is missing"
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            at = tail.good = len(TITLE)
            while at < size:
                if size - at < HEAD.size:
                    tail.dropped, tail.why = size - at, "a record's head is cut off"
                    return
                magic, crc, meta, body = HEAD.unpack_from(view, at)
                start = at + HEAD.size
                end = start + meta + body
                if magic != MAGIC or end > size or (verify and _differs(view, at, end, crc)):
                    tail.dropped, tail.why = size - at, _why(magic, end - at, size - at)
                    return
                with view[start : start + meta] as front:
                    yield front, Ref(number, at, meta, body)
                at = tail.good = end


def _differs(view: memoryview, at: int, end: int, crc: int) -> bool:
    with view[at + LENGTHS_AT : end] as checked:
        return checksum((checked,)) != crc


def _why(magic: bytes, length: int, left: int) -> str:
    if magic != MAGIC:
        return "no record starts here"
    return f"a record of {length} bytes is cut off after {left}" if length > left else "a record's checksum is wrong"


def read_record(folder: Path, ref: Ref, check: bool = True) -> tuple[memoryview, memoryview]:
    """(meta, body) of one record. Raises QueueError if the disk no longer holds what was written."""
    fd = open_shared(segment_path(folder, ref.segment))
    try:
        data = memoryview(_pread_all(fd, ref.end - ref.offset, ref.offset))
    finally:
        os.close(fd)
    if len(data) == ref.end - ref.offset:
        _, crc, _, _ = HEAD.unpack_from(data)
        meta, body = data[HEAD.size : HEAD.size + ref.meta], data[HEAD.size + ref.meta :]
        if not check or checksum((data[LENGTHS_AT:],)) == crc:
            return meta, body
    raise QueueError(
        f"{segment_path(folder, ref.segment)} is damaged at byte {ref.offset}: a record fails its checksum"
    )


def _pread_all(fd: int, n: int, offset: int) -> bytes:
    pieces = []
    while n and (piece := os.pread(fd, n, offset)):
        pieces.append(piece)
        n, offset = n - len(piece), offset + len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
