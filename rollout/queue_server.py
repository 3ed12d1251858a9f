"""The queue server: one thread, one ROUTER socket, one ledger.

    startup   lock the journal, recover, bind, publish the address
    loop      receive what has arrived -> handle each -> expire -> serve those who wait -> one flush -> answer all
    shutdown  stop receiving, flush, answer, tell nobody else: clients find out and wait for the next server

    consumes  requests        produces  replies        waits for  a request, a deadline        unblocked by  clients

Group commit: everything received in one turn shares one write and one fsync, and nobody is answered before it. If the
disk refuses, the loop stands still (clients wait, nothing is lost), says so, and goes on when there is space again.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from rollout.errors import HeadraceError, QueueError
from rollout.event_log import EventLog
from rollout.journal import SEGMENT, Durability, Journal, MemoryJournal, Stalled, memory_folder
from rollout.journal_disk import Disk
from rollout.ledger_states import LedgerSettings
from rollout.queue_core import QueueCore, Reply
from rollout.queue_figures import describe
from rollout.queue_keys import ServerKeys
from rollout.queue_parking import Parked, Parking, handle_second
from rollout.queue_protocol import WAIT_SLICE, Request, error_frames, reply_frames
from rollout.queue_transport import COPY_BELOW, Gatekeeper, private_ipc, readable, router
from rollout.retention import Retain
from rollout.served_clock import ServedClock
from rollout.wire import Buffer

log = logging.getLogger(__name__)
TICK = 0.25  # seconds between looks at deadlines
TURN = 512  # requests received before they are flushed and answered
TURN_BYTES = 64 << 20


class QueueServer:
    """server = QueueServer(LedgerSettings(8, 8), run_dir / "journal"); server.start(); ... server.close()"""

    core_type = QueueCore

    def __init__(
        self,
        settings: LedgerSettings,
        journal_dir: Path,
        bind: str = "ipc://auto",
        durability: Durability = "fsync",
        max_bytes: int = 2 << 30,
        keys: ServerKeys | None = None,
        events_path: Path | None = None,
        segment_bytes: int = SEGMENT,
        retain: Retain = 0,
        disk: Disk | None = None,
        alone: bool = False,
    ) -> None:
        """`alone`: no client of an earlier life of this journal is left, so their leases end at once."""
        self.settings, self.journal_dir, self.bind, self.durability = settings, Path(journal_dir), bind, durability
        self.max_bytes, self.keys, self.events_path = max_bytes, keys, events_path
        self.segment_bytes, self.retain, self.disk, self.alone = segment_bytes, retain, disk, alone
        self.endpoint = ""
        self.epoch = uuid.uuid4().hex[:12]
        self._parking = Parking()
        self._outbox: list[tuple[bytes, list[Buffer]]] = []
        self._last_tick = 0.0
        self._gauges: dict[str, Any] = {}
        self._counters = {"requests": 0, "refused": 0, "undeliverable": 0, "stalls": 0}
        self._stalled = ""
        self._closing = threading.Event()
        self._failure: BaseException | None = None

    # ---- life

    def start(self) -> QueueServer:
        """Recover and bind; serves when it returns. Raises ConfigError, QueueError."""
        self._events = EventLog(self.events_path) if self.events_path else None
        self._clock = ServedClock()
        journal = self._open_journal()
        try:
            self.core = self.core_type(self.settings, journal, self.max_bytes, self._event, self._clock.now)
            if self.alone:
                self.core.forget_clients()
            self._context = zmq.Context()
            self._gatekeeper = Gatekeeper(self._context, self.keys.client_public) if self.keys else None
            address = private_ipc(self.journal_dir) if self.bind == "ipc://auto" else self.bind
            self._socket, self.endpoint = router(self._context, address, self.keys.own if self.keys else None)
        except Stalled as error:
            journal.close()
            raise QueueError(f"the journal cannot be written: {error}") from error
        except HeadraceError:
            journal.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if self._gatekeeper:
            self._poller.register(self._gatekeeper.socket, zmq.POLLIN)
        self.journal_dir.mkdir(parents=True, exist_ok=True)
        (self.journal_dir / "endpoint").write_text(self.endpoint)
        if self.core.payloads.files:
            (self.core.journal.folder / "epoch").write_text(self.epoch)
        self._publish()
        self._thread = threading.Thread(target=self._main, name="queue-server", daemon=True)
        self._thread.start()
        return self

    def _open_journal(self) -> Journal:
        folder = self.journal_dir
        if self.durability == "memory":
            in_memory = memory_folder(self.journal_dir, room=2 * self.max_bytes)
            if in_memory is None:
                return MemoryJournal()
            folder = in_memory
        return Journal(folder, self.durability, self.segment_bytes, self.retain, self.disk)

    def close(self) -> None:
        """Finish the turn, flush, answer; then let everything go."""
        self._closing.set()
        self._thread.join()

    def gauges(self) -> dict[str, Any]:
        """The latest figures. Raises QueueError if the server has died."""
        if self._failure is not None:
            raise QueueError(f"the queue server died: {self._failure!r}") from self._failure
        return dict(self._gauges)

    def __enter__(self) -> QueueServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the loop

    def _main(self) -> None:
        try:
            while not self._closing.is_set():
                self._turn()
        except BaseException as error:
            self._failure = error
            log.exception("the queue server died")
            raise
        finally:
            self._socket.close()
            if self._gatekeeper:
                self._gatekeeper.socket.close()
            self._context.term()
            self.core.journal.close()

    def _turn(self) -> None:
        """See the map at the top."""
        more = self._wait()
        now = self._clock.advance()
        received = n = 0
        while more and n < TURN and received <= TURN_BYTES:
            received, n = received + self._receive(now), n + 1
            more = readable(self._socket)
        tick = now - self._last_tick >= TICK
        if tick:
            self._last_tick = now
            self.core.tick(now)
            self._publish()
        self._serve_parked(now, thorough=tick)
        self._flush()
        for route, frames in self._outbox:
            self._send(route, frames)
        self._outbox = []

    def _wait(self) -> bool:
        """Whether there is something to receive."""
        ready = dict(self._poller.poll(int(TICK * 1000)))
        if self._gatekeeper and self._gatekeeper.socket in ready:
            self._gatekeeper.answer()
        return self._socket in ready

    def _receive(self, now: float) -> int:
        """One message; returns its size. Anything wrong with it is answered, and changes nothing."""
        route, *parts = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
        frames = [p.buffer if len(p) >= COPY_BELOW else p.bytes for p in parts]
        self._counters["requests"] += 1
        seq = 0
        try:
            request = Request(frames)
            seq = request.seq
            self._answer(request, route.bytes, now)
        except HeadraceError as error:
            self._counters["refused"] += 1
            self._outbox.append((route.bytes, error_frames(seq, self.epoch, error)))
        return sum(map(len, frames))

    def _answer(self, request: Request, route: bytes, now: float) -> None:
        follow, key = request.follow(), (request.client, request.seq)
        answer = self.core.handle(request, now)
        before: dict[str, Any] | None = None
        if follow is not None and isinstance(answer, Reply) and answer.done:
            doubled = self._parking.parked.get(key)
            before = doubled.before if doubled and doubled.before else answer.ok
            request, answer = follow, handle_second(self.core, follow, now)
        if isinstance(answer, Reply):
            if request.op == "beat":
                answer.ok["unknown"] = self._parking.compare(request, route)
            elif request.op == "stats":
                answer.ok["stats"] |= {"waiting": self._parking.who_waits(), "server": dict(self._counters)}
            self._parking.parked.pop(key, None)
            self._reply(route, request.seq, answer, before)
        elif (wait := request.number("wait", 0.0, WAIT_SLICE)) > 0:
            self._parking.parked[key] = Parked(request, route, now + wait, answer.why, before)
        else:
            self._reply(route, request.seq, Reply({"waiting": answer.why}), before)

    def _reply(self, route: bytes, seq: int, answer: Reply, before: dict[str, Any] | None) -> None:
        ok = {**before, **answer.ok} if before else answer.ok
        self._outbox.append((route, reply_frames(seq, self.epoch, ok, answer.blobs)))

    def _serve_parked(self, now: float, thorough: bool) -> None:
        for parked, answer in self._parking.served(self.core, now, thorough):
            if isinstance(answer, Reply):
                self._reply(parked.route, parked.request.seq, answer, parked.before)
            else:
                self._outbox.append((parked.route, error_frames(parked.request.seq, self.epoch, answer)))

    def _flush(self) -> None:
        """Return once everything is durable, however long the disk refuses."""
        while True:
            try:
                self.core.flush()
            except Stalled as error:
                if not self._stalled:
                    self._counters["stalls"] += 1
                    log.error("the journal cannot be written, clients wait: %s", error)
                    self._event("alarm", what="journal_stalled", detail=str(error))
                self._stalled = str(error)
                self._publish()
                if self._closing.wait(0.2):
                    return
                continue
            if self._stalled:
                self._stalled = ""
                self._event("journal_resumed")
                self._publish()
            return

    def _send(self, route: bytes, frames: Sequence[Buffer]) -> None:
        """A client that is gone, or reads nothing, loses its reply; it asks again if it still cares."""
        if self._stalled:
            return
        try:
            self._socket.send_multipart([route, *frames], zmq.DONTWAIT, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._counters["undeliverable"] += 1

    def _event(self, event: str, **fields: Any) -> None:
        if self._events is None:
            return
        try:
            self._events.append(event, **fields)
        except OSError as error:  # the same full disk, most likely; the gauges say it too
            log.error("cannot write the event %s %s: %s", event, fields, error)

    def _publish(self) -> None:
        figures = {"waiting": self._parking.who_waits(), "server": dict(self._counters), "stalled": self._stalled}
        self._gauges = {**describe(self.core), **figures}
