"""What the soak does to the queue: torn records, and protections switched off one at a time (soak_power.py cuts power).

A soak that cannot fail proves nothing. `SABOTAGE` names the protections; each can be taken away, and the soak notices:

    fsync        answers go out before the disk has anything: a power cut loses acknowledged groups
    placed       the same for the arrays that clients have written into the journal's folder themselves
    idempotency  a request that arrives twice has its effect twice: ordinals are trained twice
    leases       leases never expire: what a dead worker held is never generated, and the run does not end
    crc          records are believed unread: a half-written group is trained on
"""

from __future__ import annotations

import os
import random
from pathlib import Path

from launch.soak_power import HastyDisk, LyingDisk, PowerCutDisk
from rollout import journal_segments
from rollout.journal_disk import Disk
from rollout.journal_records import group_record
from rollout.journal_segments import HEAD, MAGIC, Tail, scan, segment_numbers, segment_path
from rollout.ledger import Ledger
from rollout.ledger_facts import Generated, Leased
from rollout.queue_core import QueueCore
from rollout.wire import encode_group, frame_bytes, unpack

SABOTAGE = ("fsync", "placed", "idempotency", "leases", "crc")


class ForgetfulLedger(Ledger):
    """Takes every submit for a new one."""

    def check_submit(self, ordinal: int, attempt: int, holder: str) -> str:
        outcome = super().check_submit(ordinal, attempt, holder)
        if outcome != "accepted" and ordinal not in self.entries:
            self._record(Leased((ordinal,), (attempt,), holder, "again", self.live))
            return "accepted"
        return outcome


class PatientLedger(Ledger):
    """Lets nobody's lease expire."""

    def expire(self, now: float) -> None: ...


def disk(sabotage: str, durable: Path) -> Disk:
    """What the server writes to."""
    return {"fsync": LyingDisk, "placed": HastyDisk}.get(sabotage, PowerCutDisk)(durable)


def core_type(sabotage: str) -> type[QueueCore]:
    """The server's core with one protection taken away."""
    ledger: type[Ledger] = {"idempotency": ForgetfulLedger, "leases": PatientLedger}.get(sabotage, Ledger)

    class Core(QueueCore):
        ledger_type = ledger
        place_from = random.choice((0, QueueCore.place_from))  # small groups are placed too, or sent

    return Core


def believe_everything() -> None:
    """Without "crc": every checksum is 0, so every record that claims 0 is right."""
    journal_segments.checksum = lambda pieces: 0


def tear(folder: Path, choose: float) -> str:
    """Leave at the journal's end what a crash in the middle of a write leaves; `choose` in [0, 1) decides what."""
    number = segment_numbers(folder)[-1]
    path = segment_path(folder, number)
    leased = _leased(folder, number)
    if choose < 0.5 and leased:
        data, what = _half_written_group(*leased[int(choose * 2 * len(leased))]), "a group without its body"
    elif choose < 0.75:
        data, what = HEAD.pack(MAGIC, 1, 500, 40_000) + b"\x93\xa5group" * 30, "a record cut short"
    else:
        data, what = os.urandom(200), "noise"
    with open(path, "ab") as file:
        file.write(data)
    return what


def _leased(folder: Path, number: int) -> list[tuple[int, int]]:
    """(ordinal, attempt) that the newest segment says are leased."""
    leased: dict[int, int] = {}
    for meta, _ in scan(folder, number, Tail(), verify=False):
        match unpack(meta, "journal"):
            case ["snapshot", value]:
                leased = {row[0]: row[2] for row in value["ledger"]["entries"] if row[1] == "leased"}
            case ["group", [_, ordinal, *_], _]:
                leased.pop(ordinal, None)
            case ["placed", rows, _]:
                for _, ordinal, *_ in rows:
                    leased.pop(ordinal, None)
            case ["facts", rows]:
                for row in rows:
                    if row[0] == "Leased":
                        leased.update(zip(row[1], row[2], strict=True))
                    elif row[0] in ("Returned", "Dropped"):
                        for ordinal in row[1]:
                            leased.pop(ordinal, None)
    return sorted(leased.items())


def _half_written_group(ordinal: int, attempt: int) -> bytes:
    """The record of a group whose pages never reached the disk: lengths right, body zero, checksum never written."""
    from launch.soak_roles import expected_group

    group = expected_group(ordinal, attempt, 1)
    header, frames = encode_group(group)
    meta = group_record(header, Generated(ordinal, attempt, group.n_tokens, 1))
    return HEAD.pack(MAGIC, 0, len(meta), frame_bytes(frames)) + meta + bytes(frame_bytes(frames))
