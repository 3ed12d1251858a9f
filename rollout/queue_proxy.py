"""A bad network between clients and the queue server: it loses, doubles, delays and reorders messages, both ways.

    clients --> front (ROUTER) --> one DEALER per client --> the server      and back, in all `Weather`

For tests and the soak. Nothing here understands a message.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

MOST_CLIENTS = 64


@dataclass(frozen=True, slots=True)
class Weather:
    """Weather(lost=0.03, doubled=0.03, delayed=0.1, delay_s=0.2): shares of messages, and how late is late."""

    lost: float = 0.0
    doubled: float = 0.0
    delayed: float = 0.0
    delay_s: float = 0.2


class Proxy:
    """`run` until `stop()` says so, in the calling thread."""

    def __init__(self, front: str, server: str, weather: Weather, seed: int) -> None:
        self.weather, self._rng, self._server = weather, random.Random(seed), server
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.linger = 0
        self._front.bind(front)
        self._backs: dict[bytes, zmq.Socket] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._front, zmq.POLLIN)
        self._late: list[tuple[float, int, bytes, bool, list[bytes]]] = []
        self._count = itertools.count()

    def run(self, stop: Callable[[], bool] = lambda: False) -> None:
        while not stop():
            ready = dict(self._poller.poll(10))
            if self._front in ready:
                client, *frames = self._front.recv_multipart()
                self._pass(client, True, frames)
            for client, back in list(self._backs.items()):
                if back in ready:
                    self._pass(client, False, back.recv_multipart())
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, client, inward, frames = heapq.heappop(self._late)
                self._send(client, inward, frames)
        for socket in (self._front, *self._backs.values()):
            socket.close(linger=0)
        self._context.term()

    def _pass(self, client: bytes, inward: bool, frames: list[bytes]) -> None:
        """Once, twice, later or never."""
        luck, w = self._rng.random(), self.weather
        if luck < w.lost:
            return
        times = 2 if luck < w.lost + w.doubled else 1
        for _ in range(times):
            if self._rng.random() < w.delayed:
                due = time.monotonic() + self._rng.random() * w.delay_s
                heapq.heappush(self._late, (due, next(self._count), client, inward, frames))
            else:
                self._send(client, inward, frames)

    def _send(self, client: bytes, inward: bool, frames: list[bytes]) -> None:
        if not inward:
            self._front.send_multipart([client, *frames])
            return
        back = self._backs.pop(client, None) or self._connect()
        self._backs[client] = back  # the most recently heard one stands last
        back.send_multipart(frames)

    def _connect(self) -> zmq.Socket:
        """A client that reconnects is a new client to us; the one unheard for longest makes room for it."""
        if len(self._backs) >= MOST_CLIENTS:
            gone = self._backs.pop(next(iter(self._backs)))
            self._poller.unregister(gone)
            gone.close(linger=0)
        back = self._context.socket(zmq.DEALER)
        back.linger = 0
        back.connect(self._server)
        self._poller.register(back, zmq.POLLIN)
        return back
