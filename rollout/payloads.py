"""The groups themselves, unopened: in memory while they wait, on disk (in the journal) until they are settled.

submitted -> held in memory, counted against `max_bytes` -> trained: memory let go -> settled: forgotten
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollout.journal import Journal
from rollout.journal_segments import Ref
from rollout.wire import Buffer, frame_bytes, read_header


@dataclass(slots=True)
class Payload:
    """One group: its header and frames if they are in memory, and where the journal has them."""

    ref: Ref
    header: Buffer | None
    frames: Sequence[Buffer] | None
    nbytes: int
    tokens_end: int | None  # None: not yet read from the header


class Payloads:
    """Everything stored, by ordinal."""

    def __init__(self, journal: Journal, max_bytes: int) -> None:
        self.journal, self.max_bytes = journal, max_bytes
        self.held: dict[int, Payload] = {}
        self.bytes_in_memory = 0

    def put(self, ordinal: int, ref: Ref, header: Buffer, frames: Sequence[Buffer], tokens_end: int) -> None:
        self.held[ordinal] = Payload(ref, header, frames, frame_bytes(frames), tokens_end)
        self.bytes_in_memory += self.held[ordinal].nbytes

    def put_on_disk(self, ordinal: int, ref: Ref) -> None:
        """A group that recovery found: it stays on disk until somebody asks for it."""
        self.held[ordinal] = Payload(ref, None, None, ref.body, None)
        self.journal.live[ref.segment] += 1

    def get(self, ordinal: int) -> tuple[Buffer, Sequence[Buffer]]:
        """(header, frames). Raises QueueError if the disk damaged it."""
        payload = self.held[ordinal]
        if payload.header is not None and payload.frames is not None:
            return payload.header, payload.frames
        header, body = self.journal.read(payload.ref)
        return header, (body,)

    def tokens_only(self, ordinal: int) -> tuple[Buffer, Sequence[Buffer]]:
        """The part a scorer reads: prompt and answer ids."""
        header, frames = self.get(ordinal)
        end = self.held[ordinal].tokens_end
        left = read_header(header).tokens_end if end is None else end
        part: list[Buffer] = []
        for frame in frames:
            if left <= 0:
                break
            part.append(memoryview(frame)[:left])
            left -= len(part[-1])
        return header, part

    def room_for(self, nbytes: int) -> bool:
        return self.bytes_in_memory + nbytes <= self.max_bytes or not self.bytes_in_memory

    def unload(self, ordinals: Iterable[int]) -> None:
        """Let the memory go and keep the disk's copy; without a journal memory is all there is, and stays."""
        if self.journal.durability == "memory":
            return
        for ordinal in ordinals:
            payload = self.held.get(ordinal)
            if payload and payload.frames is not None:
                self.bytes_in_memory -= payload.nbytes
                payload.header = payload.frames = None

    def forget(self, ordinals: Iterable[int]) -> None:
        """Settled: committed or dropped."""
        for ordinal in ordinals:
            payload = self.held.pop(ordinal, None)
            if payload:
                if payload.frames is not None:
                    self.bytes_in_memory -= payload.nbytes
                self.journal.forget(payload.ref)
