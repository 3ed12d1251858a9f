"""The learner's end of the store plane: the same steps as `weight_sender`, but versions go to files, not to members.

invite, enter, close_group   nothing: a store has no members, so nobody can be missing
announce(version)            names, types, shapes; engines begin to wait for the version
send(manifest)               writes it (a delta where that is small) and seals it with digests
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from learner.weight_epochs import Layout, Sent, Source
from rollout.engine import Rendezvous
from rollout.versions import AdapterSpec, WeightManifest
from rollout.weight_store import WeightStore


class WeightPublisher:
    """Stands where a `WeightSender` stands; `last` says what the newest version cost in the store."""

    def __init__(self, source: Source, store: WeightStore, adapter: AdapterSpec | None = None) -> None:
        self._store, self._adapter = store, adapter
        self._layout = Layout(source, adapter)
        self.last_bytes = 0

    def invite(self, members: Sequence[str]) -> dict[str, Rendezvous]:
        return {name: Rendezvous(0, "", 0, i, len(members) + 1, 0.0) for i, name in enumerate(members, start=1)}

    def enter(self) -> None:
        """Nobody to wait for."""

    def announce(self, version: int) -> WeightManifest:
        self._store.retract(version)
        return self._layout.manifest(version)

    def send(self, manifest: WeightManifest) -> Sent:
        started = time.monotonic()
        published = self._store.publish(manifest.version, self._layout.tensors(manifest), self._adapter)
        self.last_bytes = published.nbytes
        return Sent(published.manifest, published.root, published.nbytes, time.monotonic() - started)

    def close_group(self) -> None:
        """Nothing to leave."""

    def close(self) -> None:
        """Nothing to leave."""
