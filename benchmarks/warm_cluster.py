"""A cluster whose processes live through many runs: Ray, imports and vLLM's start are paid once, a run costs seconds.

    with WarmCluster(...) as cluster:
        cluster.turn_to(config, directory)       every process forgets the run before; new queue, journal and learner
        cluster.start(); cluster.begin()         as in any run: the learner's version 0 is sent to the engines, proven
        ...
        cluster.rest()                           after the run has drained: the queue closes, the engines stay loaded

Only vLLM's engine is carried over, and it serves nothing before it has committed the new run's version 0. No cached KV
survives a run either, as long as prompt and answer together are shorter than one KV block (`VllmSettings.block_size`).
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from typing import Any

from launch.cluster import Cluster
from launch.config import RunConfig
from launch.run_dir import RunDirectory
from launch.topology import Placement
from rollout.vllm_settings import VllmSettings

CLOSE_S = 60.0


def begin_again(actor: Any, arguments: tuple[object, ...]) -> None:
    """In the actor's process: leave the run before, and be as an actor that was just made."""
    queue = getattr(actor, "queue", None)
    if queue is not None:
        queue.close()
        actor.queue = None
    actor.__init__(*arguments)


@dataclass
class WarmCluster(Cluster):
    """See above. `most_sequences`: answers that the largest of the runs generates at the same time."""

    most_sequences: int = 0
    _alive: dict[str, Any] = field(default_factory=dict)

    def __enter__(self) -> WarmCluster:
        super().__enter__()
        self._all_sockets = self._sockets
        return self

    def __exit__(self, *_: object) -> None:
        self._sockets = self._all_sockets
        super().__exit__(*_)

    def turn_to(self, config: RunConfig, directory: RunDirectory) -> None:
        """The next run, which `start` then starts. Model, prompts and places must be those of the first."""
        self.config, self.directory = config, directory
        self.task = self._told()
        self.crew = self._engines()
        self._sockets = tempfile.mkdtemp(dir=self._all_sockets)
        self.roles.clear()

    def bury(self, name: str) -> None:
        """An engine that is lost is not carried over: `_actor` makes another."""
        self._alive.pop(name, None)
        super().bury(name)

    def rest(self) -> None:
        """End everything of a drained run but the engines."""
        for role in ("queue", "reward", "learner"):
            self.call(role, "close", timeout_s=CLOSE_S)

    def _actor(self, kind: Any, placement: Placement, *args: object, **environment: str) -> Any:
        args = tuple(replace(a, max_num_seqs=self.most_sequences) if isinstance(a, VllmSettings) else a for a in args)
        kept = self._alive.get(placement.name)
        if kept is None:
            self._alive[placement.name] = kept = super()._actor(kind, placement, *args, **environment)
        else:
            self.answers.of(kept.__ray_call__.remote(begin_again, args), f"{placement.name} to begin again")
        return kept
