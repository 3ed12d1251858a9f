"""Payload that never travels: a client on the server's host writes its groups into the journal's folder itself.

    client   PayloadWriter         one checksummed record in a payload file of its own -> (file, offset, lengths)
             submit                only its place and what a server must know of it (rollout/wire_brief.py) are sent
    server   PlacedFiles.holds     is the file there, and the last record in it as long as was said?
             sync, then the journal's own write and sync, then the answer: an acknowledged group is as durable as ever
             collect               files without live groups go or are written anew (rollout/spare_files.py), once their
                          client writes another one or none

    journal/400000009f2c51.payload = the format of a segment; its records are found by `Ref` only, never by scanning

If anything is wrong with a place (the disk is full, the file is gone), the client sends the group itself, as from afar.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rollout.journal_disk import Disk
from rollout.journal_records import group_record
from rollout.journal_segments import HEAD, MAGIC, PLACED, TITLE, Ref, placed_numbers, record_head, segment_path
from rollout.spare_files import Spares, open_shared
from rollout.wire import Buffer, Encoded, frame_bytes

IDLE_S = 60.0  # a file without live groups that nobody has written for so long has lost its client
ALIGN = 64  # bodies start at multiples of it, so that readers need not copy
GAPS = [bytes(n) for n in range(ALIGN)]


class PayloadWriter:
    """A client's end: one file at a time, appended to by nobody else. Any thread may call."""

    def __init__(self, folder: Path, file_bytes: int, checks: bool) -> None:
        self.folder, self.file_bytes, self.checks = folder, file_bytes, checks
        self._lock = threading.Lock()
        self._disk = Disk()
        self._spares = Spares(folder)
        self._fd = -1
        self._number = self._end = 0

    def place_all(self, groups: Sequence[Encoded]) -> list[Ref]:
        """Where each group lies now, or [] if the disk does not take them. One write per file."""
        records = [self._record(header, frames) for header, frames in groups]
        places: list[Ref] = []
        with self._lock:
            try:
                while len(places) < len(records):
                    places += self._write_some(records[len(places) :])
            except OSError:
                return []
        return places

    def _record(self, header: Buffer, frames: Sequence[Buffer]) -> tuple[Buffer, Buffer, Sequence[Buffer], int]:
        meta = group_record(header)
        return record_head(meta, frames, self.checks), meta, frames, frame_bytes(frames)

    def _write_some(self, records: Sequence[tuple[Buffer, Buffer, Sequence[Buffer], int]]) -> list[Ref]:
        if self._fd < 0 or self._end >= self.file_bytes:
            self._open_next()
        places: list[Ref] = []
        pieces: list[Buffer] = []
        end = self._end
        for head, meta, frames, body in records:
            if places and end >= self.file_bytes:
                break
            gap = -(end + HEAD.size + len(meta)) % ALIGN
            pieces += (GAPS[gap], head, meta, *frames)
            places.append(Ref(self._number, end + gap, len(meta), body))
            end += gap + HEAD.size + len(meta) + body
        self._disk.write(self._fd, pieces, self._end)
        self._end = end
        return places

    def _open_next(self) -> None:
        self._close()
        number = PLACED + secrets.randbits(40)
        path = segment_path(self.folder, number)
        fd = self._spares.claim(path)
        if fd is None:
            fd = open_shared(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._fd, self._number = fd, number
        os.ftruncate(fd, self.file_bytes)  # readers map the whole file once
        self._end = self._disk.write(fd, [TITLE], 0)

    def abandon(self) -> None:
        """The server cannot use this file: the next group begins another."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class PlacedFiles:
    """The server's end: which payload files there are, which of them the next flush must sync, which may go."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self.folder, self.disk = folder, disk
        self.spares = Spares(folder)
        self.nbytes = 0  # placed since the last `collect`
        self._fds: dict[int, int] = {}
        self._latest: dict[str, int] = {}  # client -> the file it writes
        self._known: set[int] = set()
        self._unsynced: set[int] = set()
        self._folder_unsynced = False

    def holds(self, places: Sequence[Ref]) -> bool:
        """Whether the files are there, and in each the last of these records, which was written after the others.

        What the others hold is checked by whoever reads them.
        """
        return all(self._holds(place) for place in {p.segment: p for p in places}.values())

    def _holds(self, place: Ref) -> bool:
        try:
            fd = self._open(place.segment)
            head, size = os.pread(fd, HEAD.size, place.offset), os.fstat(fd).st_size
        except OSError:
            return False
        if len(head) < HEAD.size or place.end > size:
            return False
        magic, _, meta, body = HEAD.unpack(head)
        return (magic, meta, body) == (MAGIC, place.meta, place.body)

    def _open(self, number: int) -> int:
        if number not in self._fds:
            self._fds[number] = os.open(segment_path(self.folder, number), os.O_RDONLY | os.O_CLOEXEC)
        return self._fds[number]

    def adopt(self, places: Sequence[Ref], client: str) -> None:
        """Records that `holds` has found become part of the journal."""
        numbers = {p.segment for p in places}
        self._folder_unsynced |= not numbers <= self._known
        self._known |= numbers
        self._unsynced |= numbers
        self._latest[client] = places[-1].segment
        self.nbytes += sum([p.end - p.offset for p in places])

    def sync(self, to_disk: bool) -> None:
        """What was adopted survives as much as was promised when this returns. Raises OSError; call it again."""
        for number in list(self._unsynced):
            if to_disk:
                self.disk.sync(self._open(number))
            self._unsynced.discard(number)
        if self._folder_unsynced and to_disk:
            self.disk.sync_folder(self.folder)
        self._folder_unsynced = False

    def collect(self, live: Counter[int], delete: bool) -> None:
        """Close the files that their clients have left; delete those that nobody needs."""
        self.nbytes = 0
        current = set(self._latest.values())
        for number in [n for n in self._fds if n not in current and n not in self._unsynced]:
            os.close(self._fds.pop(number))
        for number in placed_numbers(self.folder) if delete else ():
            left = number in self._known and number not in current
            if live[number] <= 0 and number not in self._unsynced and (left or self._idle(number)):
                self._delete(number)
                live.pop(number, None)

    def _idle(self, number: int) -> bool:
        try:
            return time.time() - segment_path(self.folder, number).stat().st_mtime > IDLE_S
        except FileNotFoundError:
            return True

    def _delete(self, number: int) -> None:
        self._known.discard(number)
        self._latest = {client: n for client, n in self._latest.items() if n != number}
        if number in self._fds:
            os.close(self._fds.pop(number))
        self.spares.retire(segment_path(self.folder, number))

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        self.spares.drop()
