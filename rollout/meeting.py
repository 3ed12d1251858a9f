"""Where the members of a weight group meet: a small key-value store over TCP, hosted by the learner.

    MeetingPoint            the server: a thread per member, nothing but bytes under names
    MeetingStore(...)       the client, as the Store that torch's process groups ask for

torch has a TCPStore of its own. We do not use it because it looks up the name of every peer it connects to, so that a
name server which loses one packet in twenty costs five seconds each time (seen), and because nobody who waits in it
can be told that the epoch was called off.
"""

from __future__ import annotations

import socket
import socketserver
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import torch.distributed as dist

from rollout.engine import Rendezvous
from rollout.errors import DeadlineError, WeightError

_POLL_S = 0.005
_CALLED_OFF = "called-off"
_HEAD = struct.Struct("<cHI")  # operation, length of the key, length of the value
_LONGEST = 1 << 20


def _exactly(connection: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        piece = connection.recv(n - len(data))
        if not piece:
            raise ConnectionError("the other end of the meeting point is gone")
        data += piece
    return data


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads, allow_reuse_address = True, True

    def __init__(self, host: str) -> None:
        super().__init__((host, 0), _Member)
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()


class _Member(socketserver.BaseRequestHandler):
    """One member's connection: S(et), G(et; empty head if missing), A(dd)."""

    def handle(self) -> None:
        server = cast(_Server, self.server)
        try:
            while True:
                op, n_key, n_value = _HEAD.unpack(_exactly(self.request, _HEAD.size))
                if n_value > _LONGEST:
                    return
                key, value = _exactly(self.request, n_key).decode(), _exactly(self.request, n_value)
                with server.lock:
                    answer = self._carry_out(server.values, op, key, value)
                head = b"-" if answer is None else b"+"
                self.request.sendall(_HEAD.pack(head, 0, len(answer or b"")) + (answer or b""))
        except (ConnectionError, OSError, UnicodeDecodeError):
            return  # the member left, or it is none of ours

    @staticmethod
    def _carry_out(values: dict[str, bytes], op: bytes, key: str, value: bytes) -> bytes | None:
        if op == b"S":
            values[key] = value
            return b""
        if op == b"A":
            values[key] = str(int(values.get(key, b"0")) + int(value)).encode()
        return values.get(key)


class MeetingPoint:
    """The server, on a port that the system picked; lives as long as the learner's sender."""

    def __init__(self, host: str = "127.0.0.1", timeout_s: float = 60.0) -> None:
        self.host, self.timeout_s = host, timeout_s
        self._server = _Server(host)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="weights-meeting", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def invite(self, epoch: int, members: Sequence[str]) -> dict[str, Rendezvous]:
        """The rendezvous of each member; rank 0 is the caller's own."""
        with self._server.lock:  # epochs before this one are over
            self._server.values = {k: v for k, v in self._server.values.items() if k.endswith(_CALLED_OFF)}
        world = len(members) + 1
        return {
            name: Rendezvous(epoch, self.host, self.port, rank, world, self.timeout_s)
            for rank, name in enumerate(members, start=1)
        }

    def own(self, epoch: int, n_members: int) -> Rendezvous:
        return Rendezvous(epoch, self.host, self.port, 0, n_members + 1, self.timeout_s)

    def put(self, epoch: int, key: str, value: bytes) -> None:
        """As a member's `set`, for the learner, whose server this is."""
        with self._server.lock:
            self._server.values[f"{epoch}/{key}"] = value

    def said(self, epoch: int, key: str) -> bytes | None:
        """What a member has put under `key`; None if it has not."""
        with self._server.lock:
            return self._server.values.get(f"{epoch}/{key}")

    def called_off(self, epoch: int) -> bool:
        return self.said(epoch, _CALLED_OFF) is not None

    def call_off(self, epoch: int) -> None:
        """Members that still wait for others to enter this epoch stop waiting."""
        with self._server.lock:
            self._server.values[f"{epoch}/{_CALLED_OFF}"] = b"1"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class MeetingStore(dist.Store):
    """One member's connection, for one epoch. Waiting ends with the value, at the deadline, or when called off."""

    def __init__(self, rdv: Rendezvous) -> None:
        super().__init__()
        self._rdv, self._deadline = rdv, time.monotonic() + rdv.timeout_s
        self._lock = threading.Lock()
        try:
            self._connection = socket.create_connection((rdv.host, rdv.port), timeout=rdv.timeout_s)
        except OSError as error:
            raise WeightError(f"no meeting point at {rdv.host}:{rdv.port} ({error}); the learner is gone") from error
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def address(self) -> str:
        """The address of this machine by which the others see it."""
        return str(self._connection.getsockname()[0])

    def _ask(self, op: bytes, key: str, value: bytes = b"") -> bytes | None:
        name = f"{self._rdv.epoch}/{key}".encode()
        with self._lock:
            self._connection.sendall(_HEAD.pack(op, len(name), len(value)) + name + value)
            head, _, n = _HEAD.unpack(_exactly(self._connection, _HEAD.size))
            answer = _exactly(self._connection, n)
        return answer if head == b"+" else None

    def get(self, key: str) -> bytes:
        while (value := self.look(key)) is None:
            self.refuse_if_called_off()
            if time.monotonic() > self._deadline:
                raise DeadlineError(f"{key} of weight group epoch {self._rdv.epoch}", self._rdv.timeout_s)
            time.sleep(_POLL_S)
        return value

    def look(self, key: str) -> bytes | None:
        """What is there under `key` now."""
        return self._ask(b"G", key)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(b"S", key, value.encode() if isinstance(value, str) else bytes(value))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(b"A", key, str(amount).encode()) or b"0")

    def check(self, keys: list[str]) -> bool:
        return all(self._ask(b"G", key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def called_off(self) -> bool:
        return self._ask(b"G", _CALLED_OFF) is not None

    def refuse_if_called_off(self) -> None:
        """Raises WeightError when nobody needs to wait for this epoch any more."""
        if self.called_off():
            raise WeightError(f"weight group epoch {self._rdv.epoch} was called off; wait for the next invitation")

    def close(self) -> None:
        self._connection.close()


def free_port(host: str) -> int:
    """A port that is free now, for libraries that cannot bind one themselves and say which it was."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
