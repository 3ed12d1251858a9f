"""Proves the queue end to end over real sockets: nothing lost, nothing twice, over restarts of server and learner."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.audit import audit
from rollout.errors import ConfigError, DeadlineError, Drained, LedgerError, QueueError, WireError
from rollout.queue_client import AsyncQueueClient, QueueClient
from rollout.queue_keys import create_keys, load_client_keys, load_server_keys
from rollout.queue_protocol import Request
from rollout.queue_server import QueueServer
from rollout.trained_log import TrainedLog
from rollout.types import Group
from rollout.wire import pack
from tests.rollout.queue_samples import FLAT, GOOD, group, same, settings

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[QueueServer]:
    with QueueServer(settings(), tmp_path / "journal", events_path=tmp_path / "events.jsonl") as running:
        yield running


@pytest.fixture
def client(server: QueueServer) -> Iterator[QueueClient]:
    with QueueClient(server.endpoint, "all-roles", patience_s=20.0) as made:
        yield made


def fill(client: QueueClient, n: int, version: int = 0) -> list[int]:
    leases = client.lease(n, wait_s=5.0)
    client.submit([group(x.ordinal, x.attempt, version) for x in leases])
    client.score({x.ordinal: GOOD for x in leases})
    return [x.ordinal for x in leases]


@pytest.mark.parametrize("durability", ["memory", "os", "fsync"])
@pytest.mark.parametrize("where", ["read where it lies", "sent", "sent over tcp", "kept in the process"])
def test_a_group_comes_out_as_it_went_in(
    tmp_path: Path, durability: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "kept in the process":
        monkeypatch.setattr("rollout.queue_server.memory_folder", lambda *_, **__: None)
    bind = "tcp://127.0.0.1:0" if "tcp" in where else "ipc://auto"
    made_server = QueueServer(settings(), tmp_path / "journal", bind, durability)  # type: ignore[arg-type]
    with made_server as server, QueueClient(server.endpoint, "all-roles", patience_s=20.0) as client:
        if "sent" in where:
            client._local = False
        leases = client.lease(2, wait_s=5.0)
        made = [group(x.ordinal, x.attempt, lengths=(3, 100_000)) for x in leases]
        assert client.submit(made) == {0: "accepted", 1: "accepted"}
        for_scorer = client.lease_scoring(9, wait_s=5.0)
        assert [g.trajectories[1].token_ids.sum() for g in for_scorer] == [
            g.trajectories[1].token_ids.sum() for g in made
        ]
        client.score({0: GOOD, 1: GOOD})
        taken: list[Group] = client.take(0, wait_s=5.0)
        assert all(same(a, b.with_verdicts(GOOD)) for a, b in zip(taken, made, strict=True))
        client.trained(0, 1)
        client.release(1)
        client.restarted(0)
        assert all(same(a, b) for a, b in zip(client.take(0, wait_s=5.0), taken, strict=True))
    assert not list(Path("/dev/shm").glob(f"headrace-*/{made_server.core.journal.folder.name}/*.segment"))


def test_a_full_queue_pushes_back_and_lets_in_what_the_next_step_needs(tmp_path: Path) -> None:
    """Room for about one group: the others wait until the learner has trained, except those it waits for."""
    with (
        QueueServer(settings(), tmp_path / "journal", max_bytes=100_000) as server,
        QueueClient(server.endpoint, "producer") as producer,
        QueueClient(server.endpoint, "learner") as learner,
    ):
        leases = producer.lease(4, wait_s=5.0)
        big = [group(x.ordinal, x.attempt, lengths=(5_000, 5_000)) for x in leases]
        producer.submit(big[:2])
        submitting = threading.Thread(target=producer.submit, args=(big[2:],))
        submitting.start()
        while not any("room for" in w for w in learner.stats()["waiting"]):
            time.sleep(0.01)
        assert learner.stats()["counts"]["generated"] == 2
        learner.score({0: GOOD, 1: GOOD})
        learner.take(0, wait_s=5.0)
        submitting.join(20.0)
        assert learner.stats()["counts"]["generated"] == 2 and not submitting.is_alive()


def test_ranks_share_a_step(client: QueueClient) -> None:
    fill(client, 2)
    parts = [[g.ordinal for g in client.take(0, rank, 2, wait_s=5.0)] for rank in (0, 1, 0)]
    assert sorted(parts[0] + parts[1]) == [0, 1] and parts[0] == parts[2]


def test_a_whole_run_in_the_books(tmp_path: Path) -> None:
    log = TrainedLog(tmp_path / "trained.jsonl")
    made = QueueServer(settings(max_steps=5), tmp_path / "journal", events_path=tmp_path / "events.jsonl")
    with made as server, QueueClient(server.endpoint, "all-roles") as client:
        for step in range(5):
            for lease in (x for _ in range(3) for x in client.lease(4, wait_s=0.0)):
                client.submit([group(lease.ordinal, lease.attempt, step)])
                client.score({lease.ordinal: FLAT if lease.ordinal % 4 == 3 else GOOD})
            groups = client.take(step, wait_s=5.0)
            log.trained(step, step + 1, groups)
            client.trained(step, step + 1)
            client.release(step + 1)
            client.commit(step)
        stats = client.stats()
    assert stats["conserved"] and stats["ended"] and stats["staleness"]["max_ever"] <= 1
    report = audit(tmp_path / "journal", tmp_path / "trained.jsonl")
    assert report.clean and report.trained == 10 and report.in_flight == 0, report
    assert report.dropped["zero_signal"] >= 1
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert {"dropped"} <= {e["event"] for e in events}


def test_waiting_calls_are_woken_by_what_they_wait_for(client: QueueClient, server: QueueServer) -> None:
    taken: list[list[int]] = []
    with QueueClient(server.endpoint, "learner") as learner:
        waiter = threading.Thread(target=lambda: taken.append([g.ordinal for g in learner.take(0, wait_s=30.0)]))
        waiter.start()
        while not client.stats()["waiting"]:
            time.sleep(0.01)
        fill(client, 2)
        waiter.join(10.0)
    assert taken == [[0, 1]]


def test_a_wait_that_ends_says_what_was_missing(client: QueueClient) -> None:
    fill(client, 1)
    with pytest.raises(DeadlineError, match="step 0 has 1 of 2 scored groups"):
        client.take(0, wait_s=0.1)
    client.lease(9, wait_s=0.0)
    assert client.lease(1, wait_s=0.1) == []
    assert client.lease_scoring(1, wait_s=0.1) == []


def test_bad_calls_get_typed_errors_and_change_nothing(client: QueueClient, server: QueueServer) -> None:
    client.lease(1, wait_s=5.0)
    before = client.stats()["counts"]
    other = QueueClient(server.endpoint, "stranger")
    with other, pytest.raises(LedgerError, match="leased to all-roles, not to stranger"):
        other.submit([group(0)])
    with pytest.raises(LedgerError, match="ordinals up to 0 were issued"):
        client.submit([group(7)])
    with pytest.raises(LedgerError, match="3 trajectories, group_size is 2"):
        client.submit([group(0, lengths=(1, 2, 3))])
    with pytest.raises(LedgerError, match="up to 0 were issued"):
        client.submit([group(0), group(7)])
    with pytest.raises(WireError, match="twice"):
        client.submit([group(0), group(0)])
    with pytest.raises(LedgerError):
        client.score({0: GOOD})
    with pytest.raises(QueueError, match="the next one is step 0"):
        client.take(3, wait_s=0.0)
    with pytest.raises(QueueError):
        client.release(5)
    assert client.stats()["counts"] == before


def test_drained_reaches_every_role(client: QueueClient) -> None:
    client.drain("enough")
    for call in (
        lambda: client.lease(1, 5.0),
        lambda: client.lease_scoring(1, 5.0),
        lambda: client.take(0, wait_s=5.0),
    ):
        with pytest.raises(Drained, match="enough"):
            call()


@pytest.mark.parametrize("alone", [True, False])
def test_a_run_that_starts_again_does_not_wait_for_the_leases_of_the_dead(tmp_path: Path, alone: bool) -> None:
    with QueueServer(settings(), tmp_path / "journal") as made, QueueClient(made.endpoint, "dead") as dead:
        before = [(x.ordinal, x.attempt) for x in dead.lease(2, wait_s=5.0)]
    with QueueServer(settings(), tmp_path / "journal", alone=alone) as made, QueueClient(made.endpoint, "a") as client:
        found = [(x.ordinal, x.attempt) for x in client.lease(2, wait_s=5.0)]
        assert found == [(o, 1) for o, _ in before] if alone else [(2, 0), (3, 0)]
        assert client.stats()["conserved"]


def test_clients_go_on_when_the_server_comes_back(tmp_path: Path) -> None:
    """Leased, generated, scored, taken and trained groups, and a call that is waiting, all survive."""
    made = QueueServer(settings(), tmp_path / "journal").start()
    with QueueClient(made.endpoint, "a") as client, QueueClient(made.endpoint, "b") as learner:
        fill(client, 2)
        learner.take(0, wait_s=5.0)
        learner.trained(0, 1)
        learner.release(1)
        fill(client, 2, version=1)
        left = client.lease(1, wait_s=5.0)
        answer: list[Group] = []
        waiter = threading.Thread(target=lambda: answer.extend(learner.take(2, wait_s=50.0)))
        learner.take(1, wait_s=5.0)
        learner.trained(1, 2)
        learner.release(2)
        waiter.start()
        made.close()
        again = QueueServer(settings(), tmp_path / "journal").start()
        assert again.endpoint == made.endpoint
        client.submit([group(x.ordinal, x.attempt, 1) for x in left])
        client.score({x.ordinal: GOOD for x in left})
        fill(client, 1, version=2)
        waiter.join(30.0)
        assert [g.ordinal for g in answer] == [4, 5]
        learner.restarted(0)
        assert [[g.ordinal for g in learner.take(s, wait_s=5.0)] for s in range(3)] == [[0, 1], [2, 3], [4, 5]]
        again.close()


def test_two_servers_never_share_a_journal(server: QueueServer) -> None:
    with pytest.raises(QueueError, match="a journal has one writer"):
        QueueServer(settings(), server.journal_dir).start()


def test_three_runs_on_one_host_do_not_meet(tmp_path: Path) -> None:
    binds = ["ipc://auto", "ipc://auto", "tcp://127.0.0.1:0"]
    servers = [QueueServer(settings(), tmp_path / str(i), bind=b).start() for i, b in enumerate(binds)]
    assert len({s.endpoint for s in servers}) == 3
    for i, each in enumerate(servers):
        with QueueClient(each.endpoint, "a") as client:
            assert len(client.lease(i + 1, wait_s=5.0)) == i + 1
    assert [s.core.ledger.issued for s in servers] == [1, 2, 3]
    for each in servers:
        each.close()


def test_addresses_that_cannot_work_are_refused(tmp_path: Path) -> None:
    for bind, message in [
        ("tcp://0.0.0.0:0", "create keys, or bind to 127.0.0.1"),
        ("ipc:///" + "x" * 120, "at most 107"),
        ("http://x", "use ipc://PATH or tcp://HOST:PORT"),
    ]:
        with pytest.raises(ConfigError, match=message):
            QueueServer(settings(), tmp_path / "journal", bind=bind).start()


def test_keys_let_in_only_those_who_have_them(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        create_keys(tmp_path / name)
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "ours").iterdir()} == {0o600}
    ours = load_client_keys(tmp_path / "ours")
    with QueueServer(
        settings(), tmp_path / "journal", bind="tcp://127.0.0.1:0", keys=load_server_keys(tmp_path / "ours")
    ) as server:
        with QueueClient(server.endpoint, "friend", ours) as friend:
            assert len(friend.lease(1, wait_s=10.0)) == 1
        stranger = load_client_keys(tmp_path / "theirs")
        impostor = type(ours)(stranger.own, ours.server_public)
        for keys in (None, impostor, stranger):
            foe = QueueClient(server.endpoint, "foe", keys, patience_s=0.5)
            with foe, pytest.raises(DeadlineError):
                foe.stats()
        assert server.gauges()["server"]["refused"] == 0 and server.core.ledger.issued == 1


def test_key_files_that_others_can_read_are_refused(tmp_path: Path) -> None:
    create_keys(tmp_path)
    (tmp_path / "client.key").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_client_keys(tmp_path)


async def test_the_asyncio_client_does_the_same_without_blocking_its_loop(server: QueueServer) -> None:
    async with AsyncQueueClient(server.endpoint, "a") as client:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticker = asyncio.create_task(tick())
        leases = await client.lease(2, wait_s=5.0)
        await client.submit([group(x.ordinal, x.attempt) for x in leases])
        assert [g.ordinal for g in await client.lease_scoring(9, wait_s=5.0)] == [0, 1]
        await client.score({0: GOOD, 1: GOOD})
        assert [g.ordinal for g in await client.take(0, wait_s=5.0)] == [0, 1]
        assert await client.lease(9, wait_s=5.0) != []
        assert await client.lease(9, wait_s=0.2) == []
        with pytest.raises(LedgerError):
            await client.submit([group(99)])
        ticker.cancel()
        assert ticks > 10


async def test_leases_of_a_cancelled_call_go_back(server: QueueServer) -> None:
    async with AsyncQueueClient(server.endpoint, "a") as client:
        await client.lease(4, wait_s=5.0)
        waiting = asyncio.create_task(client.lease(1, wait_s=20.0))
        while not server.gauges()["waiting"]:  # noqa: ASYNC110 (another thread's state)
            await asyncio.sleep(0.05)
        waiting.cancel()
        await client.give_back([3], "test", failed=False)
        while (await client.stats())["counts"]["leased"] != 3:  # noqa: ASYNC110 (another process's state)
            await asyncio.sleep(0.05)
        assert (await client.stats())["counts"]["issued"] == 1


def test_two_calls_in_one_message(client: QueueClient, server: QueueServer) -> None:
    """Whoever goes round in circles hands in the last thing and gets the next one."""
    leases = client.lease(1, wait_s=5.0)
    more = client.submit_then_lease([group(x.ordinal, x.attempt) for x in leases], 9, wait_s=5.0)
    assert [x.ordinal for x in more] == [1, 2, 3] and set(client.connection.leases) == {1, 2, 3}
    (first,) = client.lease_scoring(9, wait_s=5.0)
    client.submit([group(1)])
    (second,) = client.score_then_lease({first.ordinal: GOOD}, 9, wait_s=5.0, full=True)
    assert same(second, group(1)) and client.connection.scoring == {1}
    assert client.score_then_lease({1: GOOD}, 9, wait_s=0.1) == [] and client.connection.scoring == set()
    assert [g.ordinal for g in client.take(0, wait_s=5.0)] == [0, 1]
    client.submit([group(2), group(3)])
    client.score({2: GOOD, 3: GOOD})
    assert [g.ordinal for g in client.trained_then_take(0, 1, live=True, wait_s=5.0)] == [2, 3]
    assert server.core.ledger.live == 1
    with pytest.raises(DeadlineError, match="step 2 has 0 of 2"):
        client.trained_then_take(1, 2, wait_s=0.1)
    assert server.core.ledger.version == 2 and client.stats()["conserved"]


def test_what_follows_waits_and_says_both(client: QueueClient, server: QueueServer) -> None:
    leases = client.lease(4, wait_s=5.0)
    got: list[list[int]] = []
    groups = [group(x.ordinal, x.attempt) for x in leases]

    def hand_in() -> None:
        got.append([x.ordinal for x in client.submit_then_lease(groups, 2, wait_s=30.0)])

    with QueueClient(server.endpoint, "others") as others:
        waiter = threading.Thread(target=hand_in)
        waiter.start()
        while not any("free slot" in w for w in others.stats()["waiting"]):
            time.sleep(0.01)
        assert others.stats()["counts"]["generated"] == 4, "stored although the answer is still to come"
        others.score({o: GOOD for o in range(4)})
        others.take(0, wait_s=5.0)
        others.trained(0, 1, live=True)
        waiter.join(10.0)
    assert got == [[4, 5]] and client.connection.leases == {4: 0, 5: 0}


def test_an_error_of_either_part_leaves_the_other_as_it_should_be(client: QueueClient, server: QueueServer) -> None:
    client.lease(2, wait_s=5.0)
    with pytest.raises(LedgerError, match="were issued"):
        client.submit_then_lease([group(7)], 9, wait_s=5.0)
    assert server.core.ledger.issued == 2, "the first part was refused, so nothing was leased"
    client.drain("enough")
    client.submit([group(1)])
    with pytest.raises(Drained, match="enough"):
        client.submit_then_lease([group(0)], 9, wait_s=5.0)
    assert client.stats()["counts"]["generated"] == 2 and not client.connection.leases
    first, second = client.lease_scoring(9, wait_s=5.0)
    with pytest.raises(Drained):
        client.score_then_lease({first.ordinal: GOOD, second.ordinal: GOOD}, 9, wait_s=5.0)
    assert not client.connection.scoring and client.stats()["counts"]["scored"] == 2


@pytest.mark.parametrize("then", [{"op": "commit", "step": 0, "wait": 1.0}, {"n": 1}, [], {"op": "lease", "n": 1}, 5])
def test_what_may_follow_is_checked_before_anything_is_done(then: object) -> None:
    request = Request([pack({"schema": 1, "op": "score", "client": "c", "seq": 1, "holder": "h", "then": then})])
    with pytest.raises(WireError, match=r"request\.then"):
        request.follow()


async def test_the_asyncio_client_does_two_calls_in_one_message(server: QueueServer) -> None:
    async with AsyncQueueClient(server.endpoint, "a") as client:
        leases = await client.lease(1, wait_s=5.0)
        more = await client.submit_then_lease([group(x.ordinal, x.attempt) for x in leases], 1, wait_s=5.0)
        assert [x.ordinal for x in more] == [1]
