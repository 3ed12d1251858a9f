"""One client's connection: a socket that is always attended to, so that heartbeats go out whatever the caller is doing.

    wait     a blocking caller attends to the socket itself until its answer is there: usually no thread switch
    thread   attends to it all the time for asyncio callers, and twice per heartbeat while no blocking caller does

    ask      a request from any thread or event loop -> a Future; sent at once, sent again until it is answered
    beat     every second while anything is open: which leases are still worked on, which requests are still unanswered;
             the server names those it does not know (lost on the way, or with a server that died), and they go again;
             a lease that it believes to be here and that is not named (its answer was lost or late) it gives to others
    silence  nothing heard for a while: a new socket, to the address that is published now; the next time twice as late,
             for answers to the old socket are lost, and not sooner than after four round trips: who is slow is not gone

    waits for  replies, asks        unblocked by  the server, callers        produces  answers, leases kept alive

Sending a request again is always safe: the server knows it by (client, seq) or by what it says.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from rollout.errors import HeadraceError, QueueError, WireError
from rollout.queue_keys import ClientKeys
from rollout.queue_protocol import Answer, Pending, read_reply, request_frames
from rollout.queue_transport import COPY_BELOW, dealer, readable
from rollout.wire import Buffer

log = logging.getLogger(__name__)
BEAT = 1.0  # seconds between heartbeats; three of them without an answer are silence
LONGEST = 30.0  # seconds of silence after which a new socket is tried in any case
BEATS_KEPT = 16  # heartbeats whose answers, however late, still say what to send again


class Connection:
    """`endpoint` is an address, or the path of a file that holds one (a restarted server may have another port)."""

    def __init__(self, endpoint: str, holder: str, keys: ClientKeys | None, beat_s: float = BEAT) -> None:
        self.endpoint, self.holder, self.keys = str(endpoint), holder, keys
        self.beat_s, self.silence_s = beat_s, 3 * beat_s
        self.client = uuid.uuid4().hex[:16]
        self.leases: dict[int, int] = {}  # ordinal -> attempt, being generated here
        self.scoring: set[int] = set()
        self.reconnects = self.resent = 0
        self._seq = 0
        self._leases_asked = False  # from then on the server may believe that something is leased to us
        self._lock = threading.RLock()
        self._asked: deque[Pending] = deque()
        self._abandoned: deque[Pending] = deque()
        self._open: dict[int, Pending] = {}
        self._closing = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._context = zmq.Context()
        self._heard = self._answered = self._beaten = time.monotonic()
        self._patience = self.silence_s  # how much silence there may be before the next new socket
        self._beats: dict[int, float] = {}  # heartbeat -> when it was sent; the latest few
        self._wheel = threading.Lock()  # whoever holds it may touch the socket and what is open
        self._attend = threading.Event()  # asyncio callers exist: the thread must not leave the socket
        self._connect()
        self._thread = threading.Thread(target=self._main, name=f"queue-client-{holder}", daemon=True)
        self._thread.start()

    @property
    def silent(self) -> bool:
        """Whether the server has not been heard for as long as makes us look for it elsewhere."""
        return time.monotonic() - self._answered > self.silence_s

    # ---- for callers, on any thread

    def ask(self, op: str, args: dict[str, Any], blobs: Sequence[Buffer] = ()) -> Pending:
        """Queue a request; its future gets the answer, or the server's typed error, while somebody attends."""
        with self._lock:
            if self._closing:
                raise QueueError(f"the queue client of {self.holder} is closed")
            self._seq += 1
            frames = request_frames(op, self.client, self._seq, self.holder, args, blobs)
            last = args["then"]["op"] if "then" in args else op
            self._leases_asked |= last in ("lease", "lease_scoring")
            pending = Pending(last, frames, Future(), self._seq)
            pending.future.set_running_or_notify_cancel()  # it cannot be cancelled, only abandoned
            self._asked.append(pending)
        return pending

    def ask_in_background(self, op: str, args: dict[str, Any], blobs: Sequence[Buffer] = ()) -> Pending:
        """The same for a caller that must not block: from the first such call on the thread never leaves the socket."""
        pending = self.ask(op, args, blobs)
        self._attend.set()
        self._wake()
        return pending

    def wait(self, pending: Pending, timeout: float) -> Answer:
        """The answer. Raises concurrent.futures.TimeoutError, or what the server raised."""
        deadline = time.monotonic() + timeout
        while not pending.future.done() and not self._closing:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if self._wheel.acquire(blocking=False):
                try:
                    self._take_asked()
                    while not pending.future.done() and not self._closing and (left := deadline - time.monotonic()) > 0:
                        self._turn(min(left, self.beat_s / 4))
                finally:
                    self._wheel.release()
            else:  # another thread attends: it will send and hear for us, and if it leaves we take over
                self._wake()
                wait_futures([pending.future], timeout=min(left, 0.02))
        return pending.future.result(0 if not self._closing else 1.0)

    def settle(self, pending: Pending, heard: bool) -> None:
        """Say whether the answer reached the caller. If it did not, the next beat disowns the leases in it."""
        if not heard:
            with self._lock:
                if not self._closing:
                    self._abandoned.append(pending)
                    self._wake()

    def close(self) -> None:
        """Requests without an answer fail with QueueError; leases run out on the server."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._attend.set()
            self._wake()
        self._thread.join()
        with self._lock:
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1

    def _wake(self) -> None:
        with self._lock, suppress(BlockingIOError):  # the pipe may be full of wake-ups already
            if self._wake_write >= 0:
                os.write(self._wake_write, b"!")

    # ---- whoever holds the wheel

    def _main(self) -> None:
        """The thread."""
        try:
            while not self._closing:
                attending = self._attend.wait(self.beat_s / 2)
                if not self._wheel.acquire(blocking=attending):
                    continue  # a blocking caller is at it
                try:
                    self._take_asked()
                    self._turn(self.beat_s / 4 if attending else 0.0)
                finally:
                    self._wheel.release()
        finally:
            with self._wheel:
                self._end()

    def _end(self) -> None:
        self._socket.close(linger=200)
        self._context.term()
        for pending in (*self._open.values(), *self._asked):
            if not pending.future.done():
                pending.future.set_exception(QueueError(f"the queue client of {self.holder} was closed"))

    def _published(self) -> str:
        """Where the server is said to be."""
        if "://" in self.endpoint:
            return self.endpoint
        try:
            return Path(self.endpoint).read_text().strip()
        except OSError:
            return "inproc://nobody-yet"  # the file is not there yet; silence brings us back here

    def _moved(self) -> bool:
        return self._published() != self._address

    def _connect(self) -> None:
        address = self._address = self._published()
        own, server = (self.keys.own, self.keys.server_public) if self.keys else (None, None)
        self._socket = dealer(self._context, address, own, server)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._heard = time.monotonic()

    def _turn(self, timeout: float) -> None:
        """Wait for something to arrive, and see to it and to the heartbeat."""
        busy = bool(self._open or self.leases or self.scoring)
        ready = dict(self._poller.poll(math.ceil(timeout * 1000)))
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
            self._take_asked()
        more = self._socket in ready
        while more:
            self._hear(self._socket.recv_multipart(zmq.DONTWAIT, copy=False))
            more = readable(self._socket)
        now = time.monotonic()
        if not busy:
            self._heard = now  # we have asked for nothing, so silence means nothing
        elif now - self._heard > self.silence_s and (now - self._heard > self._patience or self._moved()):
            self.reconnects += 1
            self._patience = min(2 * self._patience, max(LONGEST, self.silence_s))
            self._socket.close(linger=0)
            self._connect()
            self._beaten = -math.inf
        if (busy or self._leases_asked) and now - self._beaten > self._patience / 3:
            self._beat(now)

    def _take_asked(self) -> None:
        while self._asked:
            pending = self._asked.popleft()
            self._open[pending.seq] = pending
            self._send(pending)
        while self._abandoned:
            pending = self._abandoned.popleft()
            if self._open.pop(pending.seq, None) is None and pending.future.exception() is None:
                self._disown(pending.future.result().ok)  # the answer and the caller's patience ended together

    def _send(self, pending: Pending) -> None:
        pending.sent = time.monotonic()
        self._push(pending.frames)

    def _push(self, frames: Sequence[Buffer]) -> None:
        with suppress(zmq.Again):  # nobody takes it now: the next beat finds it missing and it goes again
            self._socket.send_multipart(frames, zmq.DONTWAIT, copy=False)

    def _beat(self, now: float) -> None:
        self._beaten = now
        with self._lock:  # what is asked later has a higher number, and this beat says nothing about it
            self._seq += 1
            seq = self._seq
            asks = [*self._open, *(p.seq for p in self._asked)]
        args = {"leases": list(self.leases.items()), "scoring": list(self.scoring), "outstanding": asks}
        self._push(request_frames("beat", self.client, seq, self.holder, args, ()))
        self._beats[seq] = now
        if len(self._beats) > BEATS_KEPT:
            del self._beats[next(iter(self._beats))]

    def _hear(self, parts: Sequence[zmq.Frame]) -> None:
        self._heard = self._answered = time.monotonic()
        frames = [p.buffer if len(p) >= COPY_BELOW else p.bytes for p in parts]
        try:
            seq, epoch, answer, blobs = read_reply(frames)
        except WireError as error:
            log.error("%s got a reply it cannot read, and ignores it: %s", self.holder, error)
            return
        sent = self._beats.pop(seq, None)
        if sent is not None:
            slow = 4 * (self._heard - sent)  # where answers take long, silence means less
            self._patience = max(self.silence_s, min(LONGEST, max(self._patience / 2, slow)))
            self._hear_beat(sent, answer)
            return
        pending = self._open.pop(seq, None)
        if pending is None:
            self._hear_stray(answer)
            return
        if isinstance(answer, HeadraceError):
            self._settle(pending, {})
            pending.future.set_exception(answer)
            return
        self._settle(pending, answer)
        pending.future.set_result(Answer(answer, blobs, epoch))

    def _settle(self, pending: Pending, ok: dict[str, Any]) -> None:
        """Keep the books of what this client holds."""
        if pending.op == "lease":
            self.leases.update((o, a) for o, a, _ in ok.get("leases", ()))
        elif pending.op == "lease_scoring":
            self.scoring.update(ok.get("ordinals", ()))

    def _hear_beat(self, sent: float, answer: dict[str, Any] | HeadraceError) -> None:
        if isinstance(answer, HeadraceError):
            log.error("%s: the queue refuses the heartbeat: %s", self.holder, answer)
            return
        for seq in answer.get("unknown", ()):
            pending = self._open.get(seq)
            if pending is not None and pending.sent < sent:
                self.resent += 1
                self._send(pending)

    def _hear_stray(self, answer: dict[str, Any] | HeadraceError) -> None:
        """An answer nobody waits for: a duplicate, or too late. Leases in it that are not ours must go to others."""
        if isinstance(answer, HeadraceError):
            return
        leases, scoring = answer.get("leases", ()), answer.get("ordinals", ())
        if any(self.leases.get(o) != a for o, a, _ in leases) or not self.scoring.issuperset(scoring):
            self._beaten = -math.inf  # the next beat says so, and it is sent at once

    def _disown(self, ok: dict[str, Any]) -> None:
        """Forget what `_settle` wrote down for a caller who never saw the answer."""
        self.scoring.difference_update(ok.get("ordinals", ()))
        for ordinal, attempt, _ in ok.get("leases", ()):
            if self.leases.get(ordinal) == attempt:
                del self.leases[ordinal]
        self._beaten = -math.inf
