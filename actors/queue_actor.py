"""The queue actor: the process in which the ledger, the journal and the ZeroMQ server live. A thin shell."""

from __future__ import annotations

from pathlib import Path

import ray

from rollout.config import QueueConfig
from rollout.ledger import LedgerSettings


@ray.remote(max_restarts=0)
class QueueActor:
    """`start` recovers whatever the journal holds; from then on clients talk ZeroMQ, not Ray."""

    def __init__(self, settings: LedgerSettings, config: QueueConfig, run_dir: str, bind: str) -> None:
        self._settings, self._config, self._run_dir, self._bind = settings, config, Path(run_dir), bind

    def start(self) -> str:
        """Returns the endpoint that was bound."""
        from rollout.queue_server import QueueServer

        self.server = QueueServer(
            self._settings,
            self._run_dir / "journal",
            bind=self._bind,
            durability=self._config.durability,
            max_bytes=self._config.max_bytes,
            events_path=self._run_dir / "events.jsonl",
        )
        self.server.start()
        return self.server.endpoint

    def gauges(self) -> dict[str, object]:
        return self.server.gauges()

    def close(self) -> None:
        self.server.close()
