"""The peers that benchmarks/queue.py compares with, each under an interpreter that has it.

python -m benchmarks.queue_peers ray | tq | tq_serial
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.queue_contenders import AHEAD, Order, columns, serve


def ray_queue() -> None:
    import ray
    from ray.util.queue import Queue

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    queue = Queue(maxsize=0)
    back = Queue(maxsize=0)

    @ray.remote(num_cpus=0)
    class Producer:
        def run(self, queue: Queue, back: Queue, order: Order) -> float:
            step = columns(order["samples"], order["tokens"])
            groups = [{k: c[i : i + 8] for k, c in step.items()} for i in range(0, order["samples"], 8)]
            started = time.monotonic()
            for n in range(order["steps"]):
                if n >= AHEAD:
                    back.get()
                for group in groups:
                    queue.put(group)
            return started

    producer = Producer.remote()

    def measure(order: Order) -> dict[str, Any]:
        started = producer.run.remote(queue, back, order)
        for _ in range(order["steps"]):
            for _ in range(order["samples"] // 8):
                queue.get()
            back.put(1)
        finished = time.monotonic()
        while not back.empty():
            back.get()
        return {"seconds": finished - ray.get(started)}

    serve(measure)


def transfer_queue() -> None:
    """What is ready, and what may follow, is told over bare ZeroMQ sockets, which costs next to nothing."""
    import ray
    import torch
    import transfer_queue as tq
    import zmq
    from tensordict import TensorDict

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    tq.init()
    folder = tempfile.mkdtemp(prefix="headrace-bench-")
    ready, back = zmq.Context.instance().socket(zmq.PULL), zmq.Context.instance().socket(zmq.PUSH)
    ready.bind(f"ipc://{folder}/ready")
    back.bind(f"ipc://{folder}/back")

    @ray.remote(num_cpus=0)
    class Producer:
        def __init__(self) -> None:
            import transfer_queue

            self.tq = transfer_queue
            self.tq.init()
            self.ready, self.back = zmq.Context.instance().socket(zmq.PUSH), zmq.Context.instance().socket(zmq.PULL)
            self.ready.connect(f"ipc://{folder}/ready")
            self.back.connect(f"ipc://{folder}/back")

        def run(self, order: Order, run: int) -> float:
            torch.set_num_threads(1)
            made = {k: torch.from_numpy(c) for k, c in columns(order["samples"], order["tokens"]).items()}
            step = TensorDict(made, batch_size=order["samples"])
            ahead = 1 if order.get("latency") else AHEAD
            started = time.monotonic()
            for n in range(order["steps"]):
                if n >= ahead:
                    self.back.recv()
                keys = [f"{run}.{n}.{i}" for i in range(order["samples"])]
                put = time.monotonic()
                self.tq.kv_batch_put(keys=keys, partition_id="train", fields=step)
                self.ready.send_json([put, keys])
            for _ in range(min(ahead, order["steps"])):
                self.back.recv()
            return started

    producer = Producer.remote()
    runs = 0

    def measure(order: Order) -> dict[str, Any]:
        nonlocal runs
        runs += 1
        started = producer.run.remote(order, runs)
        waits = []
        for _ in range(order["steps"]):
            put, keys = ready.recv_json()
            batch = tq.kv_batch_get(keys=keys, partition_id="train")
            waits.append((time.monotonic() - put) * 1e3)
            assert len(batch) == order["samples"]
            tq.kv_clear(keys=keys, partition_id="train")
            back.send(b"")
        finished = time.monotonic()
        p50, p99 = np.percentile(waits, (50, 99))
        return {"seconds": finished - ray.get(started), "p50": float(p50), "p99": float(p99)}

    serve(measure)


def transfer_queue_serial() -> None:
    """As in TransferQueue's own examples: one process puts, gets and clears, one batch after the other."""
    import ray
    import torch
    import transfer_queue as tq
    from tensordict import TensorDict

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    tq.init()
    torch.set_num_threads(1)
    runs = 0

    def measure(order: Order) -> dict[str, Any]:
        nonlocal runs
        runs += 1
        made = {k: torch.from_numpy(c) for k, c in columns(order["samples"], order["tokens"]).items()}
        step = TensorDict(made, batch_size=order["samples"])
        waits, started = [], time.monotonic()
        for n in range(order["steps"]):
            keys = [f"{runs}.{n}.{i}" for i in range(order["samples"])]
            put = time.monotonic()
            tq.kv_batch_put(keys=keys, partition_id="train", fields=step)
            batch = tq.kv_batch_get(keys=keys, partition_id="train")
            waits.append((time.monotonic() - put) * 1e3)
            assert len(batch) == order["samples"]
            tq.kv_clear(keys=keys, partition_id="train")
        p50, p99 = np.percentile(waits, (50, 99))
        return {"seconds": time.monotonic() - started, "p50": float(p50), "p99": float(p99)}

    serve(measure)


if __name__ == "__main__":
    {"ray": ray_queue, "tq": transfer_queue, "tq_serial": transfer_queue_serial}[sys.argv[1]]()
