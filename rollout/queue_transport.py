"""ZeroMQ, as the queue's two ends use it: addresses, keys, limits. The only socket code both share.

On one host the address is a private socket file; over TCP, a port the system chose, on the loopback interface unless
there are keys. A socket file's path must stay under 107 bytes, so it lies in the temporary folder and not in the run's.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import zmq
from zmq.utils import z85

from rollout.errors import ConfigError
from rollout.queue_keys import KeyPair

HIGH_WATER = 1024  # messages per connection; payload is bounded by bytes, in the server
EVENTS, POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # arithmetic with pyzmq's enums costs more than the call
COPY_BELOW = 64 << 10  # frames smaller than this are copied, which is faster


def private_ipc(folder: Path) -> str:
    """The socket address that belongs to `folder`: the same after a restart, another for every other folder."""
    name = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest()
    base = Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    if base.stat().st_uid != os.getuid():
        raise ConfigError(f"{base} belongs to another user; set TMPDIR to a folder of your own")
    return f"ipc://{base / name}"


def check_address(bind: str, keys: KeyPair | None) -> None:
    """Refuse what ZeroMQ would refuse obscurely, and open ports without keys."""
    kind, _, rest = bind.partition("://")
    if kind == "ipc" and len(rest.encode()) > 107:
        raise ConfigError(
            f"the socket path {rest} has {len(rest.encode())} bytes; at most 107 work: choose a shorter one"
        )
    if kind not in ("ipc", "tcp", "inproc"):
        raise ConfigError(f"queue address {bind!r}: use ipc://PATH or tcp://HOST:PORT (port 0 for any)")
    if kind == "tcp" and keys is None and rest.rpartition(":")[0] not in ("127.0.0.1", "localhost", "[::1]"):
        raise ConfigError(f"queue address {bind!r} is reachable from other hosts: create keys, or bind to 127.0.0.1")


def dealer(context: zmq.Context, endpoint: str, keys: KeyPair | None, server_public: bytes | None) -> zmq.Socket:
    """A client's socket, connected."""
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.set_hwm(HIGH_WATER)
    socket.copy_threshold = COPY_BELOW
    socket.reconnect_ivl, socket.reconnect_ivl_max = 20, 500
    if keys is not None:
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        socket.curve_serverkey = server_public
    socket.connect(endpoint)
    return socket


def router(context: zmq.Context, bind: str, keys: KeyPair | None) -> tuple[zmq.Socket, str]:
    """The server's socket and the address it got."""
    check_address(bind, keys)
    socket = context.socket(zmq.ROUTER)
    socket.linger = 200
    socket.set_hwm(HIGH_WATER)
    socket.copy_threshold = COPY_BELOW
    socket.router_mandatory = True
    socket.router_handover = True
    if keys is not None:
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        socket.curve_server = True
        socket.zap_domain = b"headrace"
    if bind.startswith("tcp://") and bind.endswith(":0"):
        bind = bind[:-1] + "*"
    try:
        socket.bind(bind)
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"cannot bind the queue to {bind}: {error.strerror}") from error
    return socket, socket.last_endpoint.decode().rstrip("\0")


def readable(socket: zmq.Socket) -> bool:
    """Whether a message is waiting. Cheaper than an exception that says there is none."""
    return bool(int(socket.get(EVENTS)) & POLLIN)


class Gatekeeper:
    """Answers ZeroMQ's authentication requests: only holders of the run's client key come in."""

    def __init__(self, context: zmq.Context, allowed: bytes) -> None:
        self.allowed = z85.decode(allowed)
        self.refused = 0
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """One request that is waiting."""
        version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
        ok = mechanism == b"CURVE" and credentials == [self.allowed]
        self.refused += not ok
        status, text = (b"200", b"OK") if ok else (b"400", b"unknown key")
        self.socket.send_multipart([version, request, status, text, b"client" if ok else b"", b""])
