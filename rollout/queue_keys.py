"""Per-run CURVE keys for a queue that is reached over TCP: two files of mode 0600 in one folder.

keys/server.key   {"public": "...", "secret": "..."}       stays with the server
keys/client.key   {"public": "...", "secret": "...", "server": "..."}    goes to every host that runs actors
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from rollout.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair in ZeroMQ's Z85 text form (40 characters each)."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r}, secret=...)"


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """What the server needs: its own pair and the one client key it lets in."""

    own: KeyPair
    client_public: bytes


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a client needs: the run's client pair and the server it expects."""

    own: KeyPair
    server_public: bytes


def create_keys(folder: Path) -> None:
    """Fresh keys for one run; existing ones are kept, so that a restarted server stays the one its clients know."""
    import zmq

    if (folder / "server.key").exists() and (folder / "client.key").exists():
        return
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    server, client = zmq.curve_keypair(), zmq.curve_keypair()
    _write(folder / "client.key", {"public": client[0], "secret": client[1], "server": server[0]})
    _write(folder / "server.key", {"public": server[0], "secret": server[1]})


def load_server_keys(folder: Path) -> ServerKeys:
    server, client = _read(folder / "server.key", 2), _read(folder / "client.key", 3)
    return ServerKeys(KeyPair(server["public"], server["secret"]), client["public"])


def load_client_keys(folder: Path) -> ClientKeys:
    client = _read(folder / "client.key", 3)
    return ClientKeys(KeyPair(client["public"], client["secret"]), client["server"])


def _write(path: Path, keys: dict[str, bytes]) -> None:
    draft = path.with_suffix(".draft")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        os.fchmod(file.fileno(), 0o600)
        json.dump({k: v.decode() for k, v in keys.items()}, file)
    os.replace(draft, path)


def _read(path: Path, n_keys: int) -> dict[str, bytes]:
    try:
        mode = path.stat().st_mode & 0o777
        values = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"cannot read the key file {path}: {error}") from error
    if mode & 0o077:
        raise ConfigError(f"the key file {path} has mode {mode:04o}: others can read it; run chmod 600 {path}")
    if not isinstance(values, dict) or len(values) != n_keys or any(len(str(v)) != 40 for v in values.values()):
        raise ConfigError(
            f"the key file {path} does not hold {n_keys} keys of 40 characters; delete it and create keys again"
        )
    return {k: str(v).encode() for k, v in values.items()}
