"""Proves that bytes from outside can do no harm: a million mutated messages (here a part of them) raise nothing but
WireError, and a live server answers ten thousand of them and keeps serving, with its memory flat."""

from __future__ import annotations

import random
import resource
from pathlib import Path

import pytest
import zmq

from rollout import queue_said as said
from rollout.errors import HeadraceError, WireError
from rollout.journal_segments import PLACED, Ref
from rollout.queue_client import QueueClient
from rollout.queue_protocol import Request, pack_blobs, read_reply, request_frames
from rollout.queue_server import QueueServer
from rollout.wire import decode_group, encode_briefly, encode_group, read_header
from tests.rollout.queue_samples import GOOD, group, settings
from tests.rollout.test_wire import full_group

NASTY = [0, 0xFF, 0x7F, 0x80, 0xC0, 0xC1, 0xC7, 0xD9, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0xCB, 0xCF, 0xD3]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, moved, cut or doubled."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(6):
            case 0 | 1 if at < len(out):
                out[at] = rng.choice(NASTY) if rng.random() < 0.7 else rng.randrange(256)
            case 2:
                del out[at : at + rng.randrange(1, 9)]
            case 3:
                out[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 4:
                out[at:at] = out[at : at + rng.randrange(1, 64)]
            case _:
                del out[at:]
    return bytes(out)


@pytest.mark.parametrize("rounds", [30_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_mutated_groups_raise_wire_errors_and_nothing_else(rounds: int) -> None:
    rng = random.Random(rounds)
    samples = [(h, b"".join(f)) for h, f in (encode_group(full_group()), encode_group(group(3)))]
    refused = 0
    for n in range(rounds):
        header, body = samples[n % 2]
        try:
            if n % 3:
                decode_group(mutate(header, rng), [body])
            else:
                decode_group(header, [mutate(body, rng)])
        except WireError as error:
            refused += 1
            assert error.field and error.detail
    assert refused > rounds / 3
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    assert peak_mb < 2048


def requests() -> list[list[bytes]]:
    counts, blobs = pack_blobs([encode_group(group(0))])
    made, place = encode_briefly(group(0))[1], Ref(PLACED + 1, 64, 90, 84)
    judged = said.scored({0: GOOD})
    calls = {
        "lease": {"n": 1, "wait": 0.0},
        "submit": {"groups": counts},
        "room": {"bytes": 5, "ordinals": [0], "wait": 0.0},
        "give_back": {"leases": [[0, 0]], "reason": "x", "failed": True},
        "beat": {"leases": [[0, 0]], "scoring": [0], "outstanding": [1]},
        "lease_scoring": {"n": 1, "full": False, "local": False, "wait": 0.0},
        "score": {
            **judged,
            "then": {"op": "lease_scoring", "n": 1, "full": False, "local": False, "wait": 0.0},
        },
        "take": {"step": 0, "rank": 0, "world": 1, "local": False, "wait": 0.0},
        "trained": {"step": 0, "version": 1, "skipped": []},
        "release": {"version": 1},
        "commit": {"step": 0},
        "restarted": {"version": 1, "key": "k"},
        "drop": {"ordinals": [0], "reason": "x"},
        "stats": {},
    }
    placed = {**said.placed([made], [group(0)], [place])[0], "judged": judged}
    asked = [*calls.items(), ("submit", placed)]
    return [
        [bytes(f) for f in request_frames(op, "fuzz", 7, "stranger", args, blobs if "groups" in args else [])]
        for op, args in asked
    ]


def test_a_live_server_survives_ten_thousand_mutated_messages(tmp_path: Path) -> None:
    rng, base = random.Random(1), requests()
    with QueueServer(settings(), tmp_path / "journal", durability="os") as server:
        with QueueClient(server.endpoint, "friend", patience_s=20.0) as friend:
            friend.lease(1, wait_s=5.0)
            context = zmq.Context()
            socket = context.socket(zmq.DEALER)
            socket.connect(server.endpoint)
            before, answers, errors = memory_mb(), 0, set()
            for n in range(10_000):
                frames = list(base[n % len(base)])
                which = rng.randrange(len(frames))
                frames[which] = mutate(frames[which], rng)
                if rng.random() < 0.1:
                    frames += [rng.randbytes(20)] * rng.randrange(5)
                socket.send_multipart(frames)
                while socket.poll(0 if n < 9_999 else 500):
                    answer = read_reply(socket.recv_multipart())[2]
                    answers += 1
                    if isinstance(answer, HeadraceError):
                        errors.add(type(answer).__name__)
            socket.close(linger=0)
            context.term()
            stats = friend.stats()
        assert answers > 5_000 and "WireError" in errors
        assert stats["conserved"] and stats["server"]["refused"] > 2_000
        assert memory_mb() - before < 200
        assert server.gauges()["counts"]["issued_total"] >= 1


def memory_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6


@pytest.mark.parametrize("frames", [[], [b""], [b"\x80"], [b"\x90"], [b"\x81\xa2op\xa4take"]])
def test_headless_requests_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        Request(frames)


def test_a_header_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(WireError, match="over the limit"):
        read_header(b"\x00" * ((64 << 20) + 1))
