"""The journal: what the ledger says happened, on disk before anybody is told.

    append  any number of records, in memory          flush   one write and one fsync for all of them (group commit)
    roll    a new segment once the old one is full     forget  a group is settled; segments without live groups go
    recover the newest snapshot and what follows it, up to the first torn record

    durability   an acknowledged submit survives
    memory       nothing: the files lie in memory and hold payload only (a restarted learner is still served)
    os           the death of any process
    fsync        a power cut

A full disk or an I/O error raises Stalled and loses nothing: the batch stays, and `flush` is called again. What follows
the last good write is cut off or, where the disk refuses even that, left behind in a segment that ends there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollout.errors import QueueError
from rollout.journal_disk import Disk
from rollout.journal_groups import read_groups
from rollout.journal_history import History
from rollout.journal_memory import memory_folder
from rollout.journal_records import header_in
from rollout.journal_segments import (
    PLACED,
    TITLE,
    Ref,
    Tail,
    placed_numbers,
    read_record,
    record_head,
    scan,
    segment_numbers,
    segment_path,
)
from rollout.placed_payloads import PlacedFiles
from rollout.retention import Retain
from rollout.wire import Buffer, frame_bytes, pack, unpack

__all__ = ["SEGMENT", "Durability", "Journal", "MemoryJournal", "Stalled", "Torn", "memory_folder", "read_groups"]

Durability = Literal["memory", "os", "fsync"]
SEGMENT = 16 << 20  # small, so that memory of deleted ones is used again while it is warm


class Stalled(Exception):
    """The disk takes nothing at the moment. Carries the operating system's words."""


@dataclass(frozen=True, slots=True)
class Torn:
    """What recovery left behind: Torn(segment=3, dropped=118, why="a record's checksum is wrong")."""

    segment: int
    dropped: int
    why: str


class Journal:
    """One folder, one writer. `snapshot` gives the value that opens each new segment."""

    def __init__(
        self,
        folder: Path,
        durability: Durability = "fsync",
        segment_bytes: int = SEGMENT,
        retain: Retain = 0,
        disk: Disk | None = None,
    ) -> None:
        self.folder, self.durability, self.segment_bytes, self.retain = folder, durability, segment_bytes, retain
        self.disk = disk or Disk()
        self.placed = PlacedFiles(folder, self.disk)
        self.checks = durability != "memory"
        self.history = History(folder, to_disk=durability == "fsync") if self.checks and retain != "all" else None
        self.torn: list[Torn] = []
        self.live: Counter[int] = Counter()  # segment -> groups that are still needed
        self.syncs = self.bytes_written = 0
        self._fd = -1
        self._number = self._end = 0
        self._batch: list[Buffer] = []
        self._batch_bytes = 0
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = self._lock_folder()

    def _lock_folder(self) -> int:
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise QueueError(f"{self.folder} is in use by process {owner}; a journal has one writer") from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        return fd

    # ---- start

    def recover(self) -> Iterator[tuple[Any, Ref]]:
        """(meta, ref) of everything since the newest good snapshot, which comes first; nothing in a new folder."""
        numbers = segment_numbers(self.folder)
        if self.durability == "memory":
            for number in (*numbers, *placed_numbers(self.folder)):
                segment_path(self.folder, number).unlink()
            return
        start = next((n for n in reversed(numbers) if self._opens_with_snapshot(n)), None)
        if numbers and start is None:
            raise QueueError(
                f"no segment in {self.folder} opens with a readable snapshot: the journal cannot be recovered"
            )
        for number in (n for n in numbers if start is not None and n >= start):
            tail = Tail()
            for meta, ref in scan(self.folder, number, tail):
                yield unpack(meta, "journal"), ref
            self._number, self._end = number, tail.good
            if tail.dropped:
                self._cut(tail)
                break

    def _opens_with_snapshot(self, number: int) -> bool:
        for meta, _ in scan(self.folder, number, Tail()):
            value = unpack(meta, "journal")
            return isinstance(value, list) and value[:1] == ["snapshot"]
        return False

    def _cut(self, tail: Tail) -> None:
        """Keep what is good, set later segments aside, and remember how much was lost."""
        later = [n for n in segment_numbers(self.folder) if n > self._number]
        for number in later:
            path = segment_path(self.folder, number)
            self.torn.append(Torn(number, path.stat().st_size, "it follows a torn segment"))
            path.rename(path.with_suffix(".torn"))
        self.torn.insert(0, Torn(self._number, tail.dropped, tail.why))
        os.truncate(segment_path(self.folder, self._number), tail.good)

    def begin(self, snapshot: Any) -> None:
        """Ready to append, in a fresh segment that opens with `snapshot`. Raises Stalled."""
        last = max([self._number, *segment_numbers(self.folder)])
        self._open_segment(last + 1, snapshot)

    # ---- work

    def append(self, meta: Buffer, body: Sequence[Buffer] = ()) -> Ref:
        """Queue one record; it is on disk when `flush` returns."""
        head = record_head(meta, body, self.checks)
        ref = Ref(self._number, self._end + self._batch_bytes, len(meta), frame_bytes(body))
        self._batch += (head, meta, *body)
        self._batch_bytes += ref.end - ref.offset
        if ref.body:
            self.live[ref.segment] += 1
        return ref

    def append_facts(self, rows: Sequence[list[Any]]) -> None:
        """Queue the record of what the ledger stated."""
        self.append(pack(["facts", rows]))
        if self.history:
            self.history.note(self._number, rows)

    def append_placed(self, meta: Buffer, places: Sequence[Ref], client: str) -> Ref:
        """Queue the record of groups whose arrays `client` has written already; all stay while they are needed."""
        self.placed.adopt(places, client)
        ref = self.append(meta)
        self.live[ref.segment] += len(places)
        self.live.update([p.segment for p in places])
        return ref

    def flush(self) -> None:
        """Write the batch and make it as durable as promised. Raises Stalled and keeps the batch."""
        if not self._batch:
            return
        try:
            self.placed.sync(self.durability == "fsync")  # first: a record never speaks of arrays that are not there
            end = self.disk.write(self._fd, self._batch, self._end)
            if self.durability == "fsync":
                self.disk.sync(self._fd)
                self.syncs += 1
        except OSError as error:
            self.placed.spares.drop()  # the disk may be full, and they are only there to be quick
            raise Stalled(f"{segment_path(self.folder, self._number)}: {error.strerror or error}") from error
        self.bytes_written += end - self._end
        self._end = end
        self._batch, self._batch_bytes = [], 0

    @property
    def full(self) -> bool:
        """Time to roll: call `roll` right after a flush, while the ledger says what the journal says."""
        return self._end + self.placed.nbytes >= self.segment_bytes and not self._batch

    def roll(self, snapshot: Any) -> bool:
        """Open the next segment and delete those that nobody needs. False if the disk refused; try again later."""
        try:
            self._open_segment(self._number + 1, snapshot)
        except Stalled:
            return False
        self.collect()
        return True

    def _open_segment(self, number: int, snapshot: Any) -> None:
        """Write it under another name first: a segment that exists opens with a whole snapshot."""
        path = segment_path(self.folder, number)
        draft = path.with_suffix(".draft")
        meta = pack(["snapshot", snapshot])
        fd = -1
        try:
            draft.unlink(missing_ok=True)
            fd = self.disk.open(draft)
            end = self.disk.write(fd, [TITLE, record_head(meta, ()), meta], 0)
            if self.durability == "fsync":
                self.disk.sync(fd)
            draft.rename(path)
            if self.durability == "fsync":
                self.disk.sync_folder(self.folder)
        except OSError as error:
            if fd >= 0:
                self.disk.close(fd)
            for name in (draft, path):
                name.unlink(missing_ok=True)
            raise Stalled(f"{path}: {error.strerror or error}") from error
        if self._fd >= 0:
            self.disk.close(self._fd)
        self._fd, self._number, self._end = fd, number, end
        if self.history:
            self.history.opened(number)

    def forget(self, ref: Ref, told: int) -> None:
        """The group is settled: its payload, and the record in segment `told`, will never be read again."""
        self.live[ref.segment] -= 1
        self.live[told] -= told != ref.segment

    def collect(self) -> None:
        """Delete the segments before the present one that hold no live group; what became of theirs is kept aside."""
        self.placed.collect(self.live, delete=self.retain != "all")
        if self.retain == "all":
            return
        below = self._number
        if self.retain:  # in order: offline readers want what was said about a group, too
            below = min((n for n, groups in self.live.items() if groups > 0 and n < PLACED), default=below)
        for number in segment_numbers(self.folder):
            if number < below and self.live[number] <= 0:
                try:
                    if self.history:
                        self.history.archive(number)
                except OSError:
                    return  # no room for the archive: the segment stays for now
                segment_path(self.folder, number).unlink()
                self.live.pop(number, None)

    def read(self, ref: Ref) -> tuple[bytes, memoryview]:
        """(group header, body) of a group record. Raises QueueError if it is damaged."""
        meta, body = read_record(self.folder, ref, self.checks)
        return header_in(meta), body

    def close(self) -> None:
        if self._fd >= 0:
            self.disk.close(self._fd)
        self.placed.close()
        os.close(self._lock)
        self._fd = -1
        if self.durability == "memory":
            shutil.rmtree(self.folder, ignore_errors=True)


class MemoryJournal(Journal):
    """durability "memory" where no memory file system has room: takes everything, writes nothing."""

    def __init__(self) -> None:  # no folder, no lock
        self.live, self.torn = Counter(), []
        self.durability, self.syncs, self.bytes_written, self.folder = "memory", 0, 0, Path("/nowhere")
        self.history = None
        self.checks, self.segment_bytes, self.placed = False, SEGMENT, PlacedFiles(self.folder, Disk())
        self.retain = 0

    def recover(self) -> Iterator[tuple[Any, Ref]]:
        return iter(())

    def begin(self, snapshot: Any) -> None: ...

    def append(self, meta: Buffer, body: Sequence[Buffer] = ()) -> Ref:
        return Ref(0, 0, len(meta), frame_bytes(body))

    def flush(self) -> None: ...

    @property
    def full(self) -> bool:
        return False

    def forget(self, ref: Ref, told: int) -> None: ...

    def collect(self) -> None: ...

    def close(self) -> None: ...
