"""The groups themselves, unopened: written to the journal once, and read there by whoever needs them.

    submitted -> counted against `max_bytes`, in memory until the journal has it -> trained: no longer counted
              -> settled (committed, dropped): forgotten

Clients on the same host read the journal's files themselves (`place`); for the others the server reads them (`get`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollout.journal import Journal, MemoryJournal
from rollout.journal_segments import Ref
from rollout.wire import Buffer, read_header


@dataclass(slots=True)
class Payload:
    """One group: where the journal has it, and what of it is in memory."""

    ref: Ref
    told: int  # the segment with the record that speaks of it: the same one, unless the client wrote the arrays
    nbytes: int
    header: Buffer | None = None  # as it came
    frames: Sequence[Buffer] | None = None
    tokens_end: int | None = None  # None: not yet read from the header
    counted: bool = False

    @property
    def placed(self) -> bool:
        return self.told != self.ref.segment


class Payloads:
    """Everything stored, by ordinal."""

    def __init__(self, journal: Journal, max_bytes: int) -> None:
        self.journal, self.max_bytes = journal, max_bytes
        self.held: dict[int, Payload] = {}
        self.bytes_waiting = 0  # of groups that no learner has trained yet
        self._fresh: list[Payload] = []  # not yet flushed
        self.files = not isinstance(journal, MemoryJournal)

    def put(self, ordinal: int, ref: Ref, tokens_end: int, header: Buffer, frames: Sequence[Buffer]) -> None:
        """A group that was sent. It stays in memory until the journal has it."""
        self.held[ordinal] = payload = Payload(ref, ref.segment, ref.body, header, frames, tokens_end, counted=True)
        self.bytes_waiting += ref.body
        if self.files:
            self._fresh.append(payload)

    def put_placed(self, ordinal: int, ref: Ref, tokens_end: int, told: int) -> None:
        """A group that lies in a payload file already."""
        self.held[ordinal] = Payload(ref, told, ref.body, None, None, tokens_end, counted=True)
        self.bytes_waiting += ref.body

    def put_on_disk(self, ordinal: int, ref: Ref, told: int) -> None:
        """A group that recovery found."""
        self.held[ordinal] = payload = Payload(ref, told, ref.body)
        self.journal.live[ref.segment] += 1
        self.journal.live[told] += payload.placed

    def flushed(self) -> None:
        """The journal has everything: memory need not."""
        for payload in self._fresh:
            payload.header = payload.frames = None
        self._fresh.clear()

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
        left, part = self._tokens_end(ordinal), []
        for frame in frames:
            if left <= 0:
                break
            part.append(memoryview(frame)[:left])
            left -= len(part[-1])
        return header, part

    def place(self, ordinal: int, full: bool) -> list[int]:
        """[segment, offset, meta bytes, body bytes]: where a client on this host finds header and arrays itself."""
        payload = self.held[ordinal]
        nbytes = payload.nbytes if full else self._tokens_end(ordinal)
        return [*payload.ref[:3], nbytes]

    def _tokens_end(self, ordinal: int) -> int:
        payload = self.held[ordinal]
        if payload.tokens_end is None:
            payload.tokens_end = read_header(self.get(ordinal)[0]).tokens_end
        return payload.tokens_end

    def room_for(self, nbytes: int) -> bool:
        return self.bytes_waiting + nbytes <= self.max_bytes or not self.bytes_waiting

    def trained(self, ordinals: Iterable[int]) -> None:
        """No longer counted; still readable, should the learner restart."""
        for ordinal in ordinals:
            if ordinal in self.held:
                self._discount(self.held[ordinal])

    def forget(self, ordinals: Iterable[int]) -> None:
        """Settled: committed or dropped."""
        for ordinal in ordinals:
            payload = self.held.pop(ordinal, None)
            if payload:
                self._discount(payload)
                self.journal.forget(payload.ref, payload.told)

    def _discount(self, payload: Payload) -> None:
        self.bytes_waiting -= payload.nbytes * payload.counted
        payload.counted = False
