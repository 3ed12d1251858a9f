"""Proves what the journal promises: what was flushed comes back, torn ends are cut, a full disk loses nothing,
segments go only when everything in them is settled, and recovery is fast however long the history."""

from __future__ import annotations

import errno
import gc
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollout.errors import QueueError
from rollout.journal import Journal, MemoryJournal, Stalled, read_groups
from rollout.journal_disk import Disk
from rollout.journal_records import group_record
from rollout.journal_segments import segment_numbers, segment_path
from rollout.ledger_facts import Dropped, Generated
from rollout.queue_core import QueueCore, Reply
from rollout.queue_protocol import Request, pack_blobs, request_frames
from rollout.queue_said import scored
from rollout.wire import Buffer, encode_group, pack
from rollout.wire_facts import fact_row
from rollout.wire_verdicts import verdicts_row
from tests.rollout.queue_samples import GOOD, group, same, settings

START = {"ledger": "as it was"}


def opened(folder: Path, disk: Disk | None = None, **options: object) -> Journal:
    journal = Journal(folder, disk=disk, **options)  # type: ignore[arg-type]
    journal.found = list(journal.recover())  # type: ignore[attr-defined]
    journal.begin(START)
    return journal


def values(journal: Journal) -> list[object]:
    return [value for value, _ in journal.found]  # type: ignore[attr-defined]


def test_what_was_flushed_comes_back_in_order(tmp_path: Path) -> None:
    first = opened(tmp_path)
    refs = [first.append(pack(["group", n, b"header"]), (b"abc", bytes([n]) * 1000)) for n in range(5)]
    first.append(pack(["facts", [1]]))
    first.flush()
    first.append(pack(["facts", ["never flushed"]]))
    first.close()
    again = opened(tmp_path)
    assert values(again) == [["snapshot", START], *(["group", n, b"header"] for n in range(5)), ["facts", [1]]]
    header, body = again.read(refs[3])
    assert header == b"header" and bytes(body) == b"abc" + b"\x03" * 1000


@pytest.mark.parametrize("cut", [1, 10, 19, 25, 40])
def test_a_record_cut_off_anywhere_is_dropped_and_counted(tmp_path: Path, cut: int) -> None:
    first = opened(tmp_path)
    first.append(pack(["facts", [1]]))
    first.flush()
    size = segment_path(tmp_path, 1).stat().st_size
    first.append(pack(["facts", ["x" * 40]]))
    first.flush()
    first.close()
    os.truncate(segment_path(tmp_path, 1), size + cut)
    again = opened(tmp_path)
    assert values(again)[1:] == [["facts", [1]]]
    assert [(t.segment, t.dropped) for t in again.torn] == [(1, cut)]
    assert segment_path(tmp_path, 1).stat().st_size == size


def test_a_single_flipped_bit_stops_recovery_there(tmp_path: Path) -> None:
    first = opened(tmp_path)
    for n in range(3):
        first.append(pack(["facts", [n]]), ())
    first.flush()
    first.close()
    path = segment_path(tmp_path, 1)
    data = bytearray(path.read_bytes())
    for position in range(len(data) - 25, len(data)):
        flipped = data.copy()
        flipped[position] ^= 4
        path.write_bytes(flipped)
        journal = Journal(tmp_path)
        assert [v for v, _ in journal.recover()][1:] in ([["facts", [0]], ["facts", [1]]], [["facts", [0]]])
        assert journal.torn
        journal.close()


def test_a_damaged_group_is_refused_when_it_is_read(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    ref = journal.append(pack(["group", 0, b""]), (b"z" * 100,))
    journal.flush()
    with open(segment_path(tmp_path, 1), "r+b") as file:
        file.seek(ref.end - 3)
        file.write(b"!")
    with pytest.raises(QueueError, match="damaged at byte"):
        journal.read(ref)


class BadDisk(Disk):
    """Refuses to write, or to sync, while `refuses` names an error; may write half of a batch first."""

    refuses: int | None = None
    at = "write"

    def write(self, fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        if self.refuses and self.at == "write":
            os.pwrite(fd, b"".join(pieces)[: sum(map(len, pieces)) // 2], offset)
            raise OSError(self.refuses, os.strerror(self.refuses))
        return super().write(fd, pieces, offset)

    def sync(self, fd: int) -> None:
        if self.refuses and self.at == "sync":
            raise OSError(self.refuses, os.strerror(self.refuses))
        super().sync(fd)


@pytest.mark.parametrize(("at", "code"), [("write", errno.ENOSPC), ("write", errno.EIO), ("sync", errno.EIO)])
def test_a_disk_that_refuses_for_a_while_loses_nothing(tmp_path: Path, at: str, code: int) -> None:
    disk = BadDisk()
    journal = opened(tmp_path, disk)
    journal.append(pack(["facts", [0]]))
    journal.flush()
    disk.refuses, disk.at = code, at
    journal.append(pack(["facts", [1]]))
    for _ in range(3):
        with pytest.raises(Stalled, match=os.strerror(code)):
            journal.flush()
    disk.refuses = None
    journal.append(pack(["facts", [2]]))
    journal.flush()
    journal.close()
    assert values(opened(tmp_path))[1:] == [["facts", [0]], ["facts", [1]], ["facts", [2]]]


def test_a_roll_that_fails_leaves_the_old_segment_in_use(tmp_path: Path) -> None:
    disk = BadDisk()
    journal = opened(tmp_path, disk, segment_bytes=1)
    assert journal.full
    disk.refuses = errno.ENOSPC
    assert not journal.roll(START) and segment_numbers(tmp_path) == [1]
    disk.refuses = None
    journal.append(pack(["facts", [["Draining", "x"]]]))
    journal.flush()
    assert journal.roll(START)


def test_segments_go_when_their_last_group_is_settled(tmp_path: Path) -> None:
    journal = opened(tmp_path, segment_bytes=1)
    refs = []
    for n in range(4):
        refs.append(journal.append(pack(["group", fact_row(Generated(n, 0, 1, 0)), b""]), (b"x",)))
        journal.append(pack(["facts", [fact_row(Dropped((n,), "stale"))]]))
        journal.flush()
        assert journal.roll(START)
    for n in (0, 1, 3):
        journal.forget(refs[n], refs[n].segment)
    journal.collect()
    assert segment_numbers(tmp_path) == [3, 5]
    journal.close()
    kept = opened(tmp_path / "kept", segment_bytes=1, retain="all")
    for _ in range(3):
        kept.append(pack(["facts", []]))
        kept.flush()
        kept.roll(START)
    assert segment_numbers(tmp_path / "kept") == [1, 2, 3, 4]


def test_memory_keeps_no_files(tmp_path: Path) -> None:
    core = QueueCore(settings(), MemoryJournal(), 1 << 30, lambda *_, **__: None, 0.0)
    assert ask(core, "lease", {"n": 1, "wait": 0.0})["leases"]
    core.flush()
    assert list(tmp_path.iterdir()) == []


def ask(core: QueueCore, op: str, args: dict[str, object], blobs: Sequence[Buffer] = ()) -> dict[str, object]:
    answer = core.handle(Request(request_frames(op, "c", core.ledger.issued, "a", args, blobs)), 0.0)
    assert isinstance(answer, Reply), answer
    return answer.ok


def fill(core: QueueCore, n: int) -> None:
    """n groups in slots, scored."""
    for row in ask(core, "lease", {"n": n, "wait": 0.0})["leases"]:  # type: ignore[attr-defined]
        counts, blobs = pack_blobs([encode_group(group(row[0]))])
        ask(core, "submit", {"groups": counts}, blobs)
        ask(core, "score", scored({row[0]: GOOD}))


def core_in(folder: Path, **options: object) -> QueueCore:
    shape = settings(groups_per_step=5000, bound=1)
    return QueueCore(shape, Journal(folder, "os", **options), 1 << 30, lambda *_, **__: None, 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("groups", [2_000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_ten_thousand_live_groups_are_back_in_two_seconds(tmp_path: Path, groups: int) -> None:
    """Here a fifth of them in that time, for machines are busy; a restarted server is a process without an old heap."""
    core = core_in(tmp_path)
    fill(core, groups)
    core.flush()
    core.journal.close()
    gc.collect()
    gc.freeze()
    started = time.process_time()
    again = core_in(tmp_path)
    seconds = time.process_time() - started
    gc.unfreeze()
    print(f"{groups:,} live groups in {seconds:.2f} s")
    assert seconds < 2.0
    assert len(again.ledger.untaken) == groups
    header, frames = again.payloads.get(1234)
    assert frames and header


def test_a_journal_reads_back_as_a_data_set(tmp_path: Path) -> None:
    core = QueueCore(settings(), Journal(tmp_path, "os"), 1 << 30, lambda *_, **__: None, 0.0)
    fill(core, 4)
    taken = core.ledger.take(0, 0.0)
    core.ledger.trained(0, 1)
    core.ledger.drop([3], "asked")
    core.record({})
    core.flush()
    everything = list(read_groups(tmp_path))
    assert [g.ordinal for g in everything] == [0, 1, 2, 3]
    assert same(everything[0], group(0).with_verdicts(GOOD))
    assert [g.ordinal for g in read_groups(tmp_path, fate="trained")] == list(taken)  # type: ignore[arg-type]
    assert [g.ordinal for g in read_groups(tmp_path, fate="dropped")] == [3]
    assert [g.ordinal for g in read_groups(tmp_path, fate="open", verdict="scored")] == [2]
    assert list(read_groups(tmp_path, versions=range(1, 9))) == []


def write_history(folder: Path, groups: int, per_record: int = 50) -> None:
    """A journal of `groups` settled small groups in one segment, as a long run without checkpoints leaves it."""
    journal = Journal(folder, "os")
    list(journal.recover())
    core = QueueCore.__new__(QueueCore)
    from rollout.ledger import Ledger
    from rollout.ledger_snapshot import snapshot

    shape = settings(groups_per_step=per_record)
    core.ledger = Ledger(shape)
    journal.begin({"ledger": snapshot(core.ledger), "payloads": [], "retained": []})
    header, frames = encode_group(group(0, lengths=(2, 2)))
    verdicts = verdicts_row(GOOD)
    for step, first in enumerate(range(0, groups, per_record)):
        ordinals = list(range(first, first + per_record))
        journal.append(pack(["facts", [["Leased", ordinals, [0] * per_record, "a", "k", step]]]))
        for o in ordinals:
            journal.append(group_record(header, Generated(o, 0, 4, step)), frames)
        rows = [["Judged", o, verdicts] for o in ordinals]
        ends = [["Taken", step, ordinals], ["Trained", step], ["Released", step + 1], ["Committed", step]]
        journal.append(pack(["facts", rows + ends]))
        if step % 200 == 0:
            journal.flush()
    journal.flush()
    journal.close()


@pytest.mark.parametrize(
    "groups", [50_000, pytest.param(1_000_000, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
)
def test_a_long_history_is_replayed_in_time_and_in_bounded_memory(tmp_path: Path, groups: int) -> None:
    """One million small groups in less than 20 s; here a twentieth of them in that time, for machines are busy."""
    import tracemalloc

    write_history(tmp_path, groups)
    started = time.process_time()
    core = QueueCore(settings(groups_per_step=50), Journal(tmp_path, "os"), 1 << 30, lambda *_, **__: None, 0.0)
    seconds = time.process_time() - started
    assert core.ledger.issued == groups and core.ledger.entries == {} and core.payloads.held == {}
    print(f"{groups:,} groups in {seconds:.1f} s")
    assert seconds < 20.0
    core.journal.close()
    if groups <= 50_000:
        tracemalloc.start()
        QueueCore(settings(groups_per_step=50), Journal(tmp_path, "os"), 1 << 30, lambda *_, **__: None, 0.0)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        tracemalloc.stop()
