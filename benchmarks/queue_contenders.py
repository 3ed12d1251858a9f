"""The contenders of benchmarks/queue.py, each in processes of its own; runs under a peer's interpreter too.

python -m benchmarks.queue_contenders raw | ours DURABILITY | ray | tq
{"samples": 64, "tokens": 1024, "steps": 60}   ->   RESULT {"seconds": 0.81}
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

AHEAD = 3  # steps under way at a time, for everybody
Order = dict[str, Any]


def columns(samples: int, tokens: int) -> dict[str, np.ndarray]:
    """One step's arrays, [samples, tokens]."""
    rng = np.random.default_rng(0)
    return {
        "input_ids": rng.integers(0, 50_000, (samples, tokens), dtype=np.int32),
        "logprobs": rng.standard_normal((samples, tokens), dtype=np.float32),
        "mask": np.ones((samples, tokens), np.bool_),
    }


def settled() -> None:
    """What has been imported stays: no contender's collector looks through it again (our roles do the same)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, *gc.get_threshold()[1:])


def serve(measure: Callable[[Order], dict[str, Any]]) -> None:
    """Answer orders until stdin ends."""
    settled()
    for line in sys.stdin:
        print("RESULT " + json.dumps(measure(json.loads(line))), flush=True)


def until_closed(target: Callable[..., None], *args: Any) -> None:
    with suppress(EOFError):
        target(*args)


def spawn(target: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    """A process with a pipe to it."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=until_closed, args=(target, there, *args), daemon=True
    )
    process.start()
    return process, here


# ---- raw ZeroMQ


def raw_sender(pipe: Connection, address: str) -> None:
    import zmq

    socket = zmq.Context().socket(zmq.PUSH)
    socket.set_hwm(1000)
    socket.connect(address)
    settled()
    while True:
        order: Order = pipe.recv()
        step = columns(order["samples"], order["tokens"])
        messages = [
            [c[i : i + 8].reshape(-1).view(np.uint8) for c in step.values()] for i in range(0, order["samples"], 8)
        ]
        small = sum(m.nbytes for m in messages[0]) < 65536
        pipe.send(time.monotonic())
        for _ in range(order["steps"]):
            for message in messages:
                socket.send_multipart(message, copy=small)


def raw() -> None:
    import zmq

    folder = tempfile.mkdtemp(prefix="headrace-bench-")
    socket = zmq.Context().socket(zmq.PULL)
    socket.set_hwm(1000)
    socket.bind(f"ipc://{folder}/s")
    _, pipe = spawn(raw_sender, f"ipc://{folder}/s")

    def measure(order: Order) -> dict[str, Any]:
        pipe.send(order)
        started = pipe.recv()
        for _ in range(order["steps"] * order["samples"] // 8):
            frames = socket.recv_multipart(copy=False)
            assert sum(len(f) for f in frames) == 8 * order["tokens"] * 9
        return {"seconds": time.monotonic() - started}

    serve(measure)


# ---- ours


def our_server(pipe: Connection, durability: str) -> None:
    from pathlib import Path

    from rollout.ledger_states import LedgerSettings
    from rollout.queue_server import QueueServer

    settled()
    while True:
        order: Order = pipe.recv()
        began = time.process_time()
        folder = tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=order.get("dir"))
        bound = 0 if order.get("latency") else AHEAD - 1
        settings = LedgerSettings(order["samples"] // 8, 8, bound=bound, max_steps=order["steps"], zero_signal="train")
        with folder, QueueServer(settings, Path(folder.name) / "journal", durability=durability) as server:  # type: ignore[arg-type]
            pipe.send(server.endpoint)
            pipe.recv()
            pipe.send(time.process_time() - began)


def our_producer(pipe: Connection) -> None:
    from rollout.queue_client import Drained, QueueClient
    from rollout.types import Group, Status, Trajectory
    from rollout.versions import VersionSpan

    settled()
    while True:
        endpoint, order = pipe.recv()
        step = columns(order["samples"], order["tokens"])
        n, prompt = order["tokens"], np.arange(16, dtype=np.int32)
        spans = (VersionSpan(order["steps"], 0, n),)  # as fresh as can be: staleness is not what is measured
        rows = [
            Trajectory(step["input_ids"][i], step["mask"][i], step["logprobs"][i], spans, Status.FINISHED)
            for i in range(order["samples"])
        ]
        answers = [tuple(rows[k : k + 8]) for k in range(0, order["samples"], 8)]
        times: list[tuple[int, float]] = []
        began = time.process_time()
        with QueueClient(endpoint, "producer") as queue:
            pipe.send(time.monotonic())
            try:
                leases = queue.lease(order["samples"] // 8, wait_s=30.0)
                while True:
                    pairs = zip(leases, answers, strict=False)
                    groups = [Group(lease.ordinal, prompt, made, lease.attempt) for lease, made in pairs]
                    times += [(x.ordinal, time.monotonic()) for x in leases]
                    leases = queue.submit_then_lease(groups, order["samples"] // 8, wait_s=30.0)
            except Drained:
                pass
        pipe.send((times, time.process_time() - began))


def our_scorer(pipe: Connection) -> None:
    from rollout.queue_client import Drained, QueueClient
    from rollout.types import Scored

    verdicts = tuple(Scored(float(i % 2), {"exact": float(i % 2)}) for i in range(8))
    settled()
    while True:
        endpoint, order = pipe.recv()
        with QueueClient(endpoint, "scorer") as queue:
            pipe.send("ready")
            began = time.process_time()
            try:
                groups = queue.lease_scoring(order["samples"] // 8, wait_s=30.0)
                while True:
                    assert all(g.columns.token_ids.size == 8 * order["tokens"] for g in groups)
                    judged = {g.ordinal: verdicts for g in groups}
                    groups = queue.score_then_lease(judged, order["samples"] // 8, wait_s=30.0)
            except Drained:
                pass
        pipe.send(time.process_time() - began)


def ours(durability: str) -> None:
    from rollout.queue_client import QueueClient

    (_, server), (_, producer), (_, scorer) = spawn(our_server, durability), spawn(our_producer), spawn(our_scorer)

    def measure(order: Order) -> dict[str, Any]:
        server.send(order)
        endpoint = server.recv()
        taken: dict[int, float] = {}
        with QueueClient(endpoint, "consumer") as queue:
            queue.stats()
            scorer.send((endpoint, order))
            scorer.recv()
            producer.send((endpoint, order))
            started, began = producer.recv(), time.process_time()
            for step in range(order["steps"]):
                if step == 0:
                    groups = queue.take(step, wait_s=60.0)
                else:  # trained and released, in one message with the next take
                    groups = queue.trained_then_take(step - 1, step, live=True, wait_s=60.0)
                now = time.monotonic()
                taken.update((g.ordinal, now) for g in groups)
                everything = [g.columns for g in groups]
                assert sum(len(c.lengths) for c in everything) == order["samples"]
                assert sum(c.behaviour_logprobs.size for c in everything) == order["samples"] * order["tokens"]
                if step % 4 == 3:
                    queue.commit(step - 1)  # as after a checkpoint: what was trained is forgotten, like kv_clear
            queue.trained(order["steps"] - 1, order["steps"], live=True)
            seconds = time.monotonic() - started
            queue.commit(order["steps"] - 1)
            cpu = {"consumer": time.process_time() - began}
            times, cpu["producer"] = producer.recv()
            put, cpu["scorer"] = dict(times), scorer.recv()
        server.send("close")
        cpu["server"] = server.recv()
        waits = np.array([taken[o] - put[o] for o in taken]) * 1e3
        return {
            "seconds": seconds,
            "cpu": cpu,
            "p50": float(np.percentile(waits, 50)),
            "p99": float(np.percentile(waits, 99)),
        }

    serve(measure)


if __name__ == "__main__":
    {"raw": raw, "ours": ours}[sys.argv[1]](*sys.argv[2:])
