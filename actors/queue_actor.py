"""The queue actor: the process in which the ledger, the journal and the ZeroMQ server live. A thin shell."""

from __future__ import annotations

from pathlib import Path

import ray

from actors.role import Seat, Task, settled, take
from rollout.config import QueueConfig
from rollout.ledger_states import LedgerSettings


@ray.remote(max_restarts=0)
class QueueActor:
    """`start` recovers whatever the journal holds; from then on clients talk ZeroMQ, not Ray."""

    def __init__(self, task: Task, seat: Seat, settings: LedgerSettings, config: QueueConfig, bind: str) -> None:
        self.task, self.settings, self.config, self.bind = task, settings, config, bind
        take(seat, task)

    def start(self) -> str:
        """Returns the endpoint that was bound."""
        from rollout.queue_server import QueueServer

        self.server = QueueServer(
            self.settings,
            Path(self.task.run_dir) / "journal",
            bind=self.bind,
            durability=self.config.durability,
            max_bytes=self.config.max_bytes,
            retain=self.config.retain,
            events_path=Path(self.task.run_dir) / "events.jsonl",
            alone=True,  # a run starts its queue first, and once
        )
        self.server.start()
        settled()
        return self.server.endpoint

    def gauges(self) -> dict[str, object]:
        return self.server.gauges()

    def close(self) -> None:
        self.server.close()
