"""Proves that the room of a payload file is used again, and never while somebody may still look at what is in it."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from rollout.journal import Stalled
from rollout.journal_segments import placed_numbers, segment_path
from rollout.queue_client import QueueClient
from rollout.queue_server import QueueServer
from rollout.spare_files import KEEP, Spares, open_shared
from tests.rollout.queue_samples import GOOD, group, settings

pytestmark = pytest.mark.timeout(60)
LONG = (3, 9_000)  # tokens: 81 kB a group


def made(folder: Path, name: str = "1.payload") -> Path:
    path = folder / name
    path.write_bytes(b"x" * 8192)
    return path


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_file_that_nobody_uses_is_claimed_once(tmp_path: Path) -> None:
    spares, path = Spares(tmp_path), made(tmp_path)
    inode = path.stat().st_ino
    spares.retire(path)
    assert names(tmp_path) == ["1.spare"]
    fd = spares.claim(tmp_path / "2.payload")
    assert fd is not None and os.fstat(fd).st_ino == inode and names(tmp_path) == ["2.payload"]
    assert spares.claim(tmp_path / "3.payload") is None
    os.close(fd)


def test_a_file_that_is_open_or_mapped_is_deleted_and_stays_readable(tmp_path: Path) -> None:
    spares, path = Spares(tmp_path), made(tmp_path)
    fd = open_shared(path)
    mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    array = np.frombuffer(mapped, np.uint8)
    os.close(fd)
    del mapped  # the array alone holds it
    spares.retire(path)
    assert names(tmp_path) == [] and (array == ord("x")).all()
    path = made(tmp_path)
    os.close(open_shared(path))
    del array
    gc.collect()
    spares.retire(path)
    assert names(tmp_path) == ["1.spare"]


def test_whoever_opens_a_file_that_is_retired_meanwhile_finds_it_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock = made(tmp_path), fcntl.flock

    def late(fd: int, how: int) -> None:
        if how == fcntl.LOCK_SH and path.exists():
            Spares(tmp_path).retire(path)
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        open_shared(path)
    assert names(tmp_path) == ["1.spare"] and len(os.listdir("/proc/self/fd")) == before


def test_spares_are_few_and_can_be_given_back(tmp_path: Path) -> None:
    spares = Spares(tmp_path)
    for n in range(KEEP + 3):
        spares.retire(made(tmp_path, f"{n}.payload"))
    assert len(names(tmp_path)) == KEEP
    spares.retire(tmp_path / "not there.payload")
    spares.drop()
    assert names(tmp_path) == []


def test_arrays_that_somebody_kept_are_never_written_over(tmp_path: Path) -> None:
    server = QueueServer(settings(), tmp_path / "journal", durability="os", segment_bytes=200_000)
    kept, wanted, inodes = [], [], {}
    with server, QueueClient(server.endpoint, "all") as client:
        for step in range(40):
            groups = [group(x.ordinal, x.attempt, step, LONG) for x in client.lease(2, wait_s=5.0)]
            client.submit(groups)
            client.score({g.ordinal: GOOD for g in groups})
            taken = client.take(step, wait_s=5.0)
            if step % 10 == 0:
                kept += [g.columns.behaviour_logprobs for g in taken]
                wanted += [g.columns.behaviour_logprobs.copy() for g in groups]
            client.trained(step, step + 1, live=True)
            client.commit(step)
            here = server.core.journal.folder
            inodes.update({n: segment_path(here, n).stat().st_ino for n in placed_numbers(here)})
        assert len(set(inodes.values())) < len(inodes) / 2  # most were used again
        assert all(a.tobytes() == b.tobytes() for a, b in zip(kept, wanted, strict=True))
        assert len(placed_numbers(here)) <= 4
        assert client.stats()["conserved"]
    assert not list((tmp_path / "journal").glob("*.spare"))  # a server that ends takes them with it


def test_a_full_disk_gets_the_room_of_the_spares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(28, "no space left")

    with QueueServer(settings(), tmp_path / "journal") as server:
        pass
    journal = server._open_journal()
    journal.begin({})
    journal.placed.spares.retire(made(tmp_path / "journal"))
    monkeypatch.setattr(journal.disk, "write", refuse)
    journal.append(b"x")
    with pytest.raises(Stalled):
        journal.flush()
    assert not list((tmp_path / "journal").glob("*.spare"))
    journal.close()
