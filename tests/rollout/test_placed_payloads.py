"""Proves that groups which a client writes into the journal's folder itself are kept like any other."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from rollout import queue_said as said
from rollout.errors import LedgerError, WireError
from rollout.journal import read_groups
from rollout.journal_disk import Disk
from rollout.journal_records import header_in
from rollout.journal_segments import PLACED, Ref, placed_numbers, read_record, segment_path
from rollout.placed_payloads import PayloadWriter
from rollout.queue_client import QueueClient
from rollout.queue_server import QueueServer
from rollout.wire import decode_group, encode_briefly, encode_group
from tests.rollout.queue_samples import FLAT, GOOD, group, same, settings

pytestmark = pytest.mark.timeout(60)
LONG = (3, 30_000)  # tokens: over the size from which groups are placed


def submit(client: QueueClient, n: int, version: int = 0) -> list[int]:
    leases = client.lease(n, wait_s=5.0)
    groups = [group(x.ordinal, x.attempt, version, LONG) for x in leases]
    assert set(client.submit(groups).values()) == {"accepted"}
    return [x.ordinal for x in leases]


def files(folder: Path) -> list[Path]:
    return [segment_path(folder, n) for n in placed_numbers(folder)]


def test_a_placed_group_survives_a_restart_and_is_read_offline(tmp_path: Path) -> None:
    with QueueServer(settings(), tmp_path) as server, QueueClient(server.endpoint, "all") as client:
        submit(client, 2)
        client.score({0: GOOD, 1: GOOD})
    assert len(files(tmp_path)) == 1
    assert [same(g, group(g.ordinal, lengths=LONG).with_verdicts(GOOD)) for g in read_groups(tmp_path)] == [True] * 2
    with QueueServer(settings(), tmp_path) as server, QueueClient(server.endpoint, "all") as client:
        client._local = False  # sent, and so read through its checksum
        assert [g.ordinal for g in client.take(0, wait_s=5.0)] == [0, 1]


def test_a_damaged_one_is_dropped_by_name_at_the_restart(tmp_path: Path) -> None:
    with QueueServer(settings(), tmp_path) as server, QueueClient(server.endpoint, "all") as client:
        submit(client, 1)
    (path,) = files(tmp_path)
    with open(path, "r+b") as file:
        file.seek(100_000)
        file.write(b"\xff" * 8)
    with QueueServer(settings(), tmp_path) as server, QueueClient(server.endpoint, "all") as client:
        assert server.core.ledger.dropped == {"journal_damaged": 1}
        assert client.stats()["conserved"]


def test_a_client_whose_file_is_gone_sends_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place_all = PayloadWriter.place_all

    def place_and_lose(self: PayloadWriter, *args: object) -> list[Ref]:
        found = place_all(self, *args)  # type: ignore[arg-type]
        files(tmp_path)[0].unlink()
        return found

    monkeypatch.setattr(PayloadWriter, "place_all", place_and_lose)
    with QueueServer(settings(), tmp_path) as server, QueueClient(server.endpoint, "all") as client:
        submit(client, 1)
        client.score({0: GOOD})
    assert same(next(read_groups(tmp_path)), group(0, lengths=LONG).with_verdicts(GOOD))


def test_a_full_disk_makes_the_client_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(PayloadWriter, "_open_next", refuse)
    with QueueServer(settings(), tmp_path) as server, QueueClient(server.endpoint, "all") as client:
        submit(client, 2)
    assert not files(tmp_path) and len(list(read_groups(tmp_path))) == 2


def test_groups_of_one_message_fill_one_file_after_the_other(tmp_path: Path) -> None:
    writer = PayloadWriter(tmp_path, file_bytes=150_000, checks=True)
    groups = [group(n, lengths=(n + 1, 9_000)) for n in range(8)]
    places = writer.place_all([encode_group(g) for g in groups])
    writer.abandon()
    assert len({place.segment for place in places}) == 4
    for place, made in zip(places, groups, strict=True):
        assert place.body_at % 64 == 0
        meta, body = read_record(tmp_path, place)
        assert same(decode_group(header_in(meta), (body,)), made)


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_files_go_when_their_groups_are_settled_and_the_client_writes_another(tmp_path: Path, durability: str) -> None:
    made = QueueServer(settings(), tmp_path, durability=durability, segment_bytes=300_000)  # type: ignore[arg-type]
    with made as server, QueueClient(server.endpoint, "all") as client:
        for step in range(12):
            client.score({o: GOOD for o in submit(client, 2, step)})
            assert len(client.take(step, wait_s=5.0)) == 2
            client.trained(step, step + 1, live=True)
            client.commit(step)
        assert len(files(tmp_path)) <= 2 and len(server.core.journal.placed._fds) <= 2
        assert client.stats()["conserved"]


def test_arrays_are_durable_before_the_record_that_speaks_of_them(tmp_path: Path) -> None:
    order: list[str] = []

    class Watched(Disk):
        def sync(self, fd: int) -> None:
            order.append(Path(f"/proc/self/fd/{fd}").resolve().suffix)
            super().sync(fd)

        def sync_folder(self, folder: Path) -> None:
            order.append("folder")
            super().sync_folder(folder)

    with QueueServer(settings(), tmp_path, disk=Watched()) as server, QueueClient(server.endpoint, "all") as client:
        client.lease(1, wait_s=5.0)
        order.clear()
        client.submit([group(0, lengths=LONG)])
    assert order[:3] == [".payload", "folder", ".segment"]


def test_judged_groups_need_no_scorer(tmp_path: Path) -> None:
    with QueueServer(settings(), tmp_path) as server, QueueClient(server.endpoint, "all") as client:
        leases = client.lease(3, wait_s=5.0)
        made = [group(x.ordinal, x.attempt, 0, LONG) for x in leases]
        client.submit([made[0].with_verdicts(GOOD), made[1], made[2].with_verdicts(FLAT)])
        assert len(files(tmp_path)) == 1
        assert [g.ordinal for g in client.lease_scoring(9, wait_s=5.0)] == [1]
        client.score({1: GOOD})
        assert server.core.ledger.dropped == {"zero_signal": 1}
        taken = client.take(0, wait_s=5.0)
    assert all(same(got, sent.with_verdicts(GOOD)) for got, sent in zip(taken, made[:2], strict=True))


def test_a_place_with_the_group_of_another_ordinal_is_noticed_by_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place_all = PayloadWriter.place_all
    monkeypatch.setattr(PayloadWriter, "place_all", lambda self, groups: place_all(self, groups)[::-1])
    with QueueServer(settings(), tmp_path) as server, QueueClient(server.endpoint, "all") as client:
        submit(client, 2)
        assert client.lease_scoring(2, wait_s=5.0) == []
        assert server.core.ledger.dropped == {"unreadable": 2} and client.stats()["conserved"]


WRONG: list[tuple[str, dict[str, object], str]] = [
    ("briefs", {"ordinal": [0.5]}, r"briefs\.ordinal"),
    ("briefs", {"attempt": [0, 0]}, r"briefs\.attempt"),
    ("briefs", {"n_tokens": [-1]}, r"briefs\.n_tokens"),
    ("briefs", {"tokens_end": [1 << 40]}, r"briefs\.tokens_end"),
    ("briefs", {"oldest_version": None}, r"briefs\.oldest_version"),
    ("briefs", {"answers": [3]}, "3 trajectories, group_size is 2"),
    ("places", {0: [1]}, "is no place of a group"),  # a segment of the server's own
    ("places", {1: ["x"]}, r"places\.offset"),
    ("places", {3: [8]}, "is no place of a group"),  # shorter than its tokens
    ("places", {3: []}, r"places\.body"),
    ("judged", {"ordinals": [0], "verdicts": ["each", []]}, r"judged\.verdicts"),
    ("judged", {"ordinals": [0], "verdicts": ["scored", 1, [1.0], {}]}, "1 verdicts for 2 trajectories"),
    ("judged", {"ordinals": [0], "verdicts": ["scored", 2, [1.0, float("nan")], {}]}, "not a finite number"),
]


@pytest.mark.parametrize(("field", "change", "match"), WRONG)
def test_what_is_said_of_placed_groups_is_checked_and_changes_nothing(
    tmp_path: Path, field: str, change: dict[str, object], match: str
) -> None:
    with QueueServer(settings(), tmp_path) as server, QueueClient(server.endpoint, "all") as client:
        client.lease(1, wait_s=5.0)
        args, _ = said.placed([encode_briefly(group(0))[1]], [group(0)], [Ref(PLACED + 1, 64, 90, 84)])
        if field == "places":
            args["places"] = [change.get(i, column) for i, column in enumerate(args["places"])]
        else:
            args[field] = {**args.get(field, {}), **change}
        with pytest.raises((WireError, LedgerError), match=match):
            client._drive(client._do("submit", **args))
        stats = client.stats()
    assert stats["counts"]["leased"] == 1 and stats["conserved"]


def test_a_file_that_does_not_exist_is_answered_with_a_wish_to_have_the_group_sent(tmp_path: Path) -> None:
    with QueueServer(settings(), tmp_path) as server, QueueClient(server.endpoint, "all") as client:
        client.lease(1, wait_s=5.0)
        args, _ = said.placed([encode_briefly(group(0))[1]], [group(0)], [Ref(PLACED + 1, 64, 90, 84)])
        answer = client._drive(client._insist("submit", args))
        assert answer.ok == {"unplaced": True} and client.stats()["counts"]["leased"] == 1
