"""Who plays which role: from a placement to the actor in its place, with everything that it is told.

    Casting(config, directory, 256, "ipc:///tmp/headrace-x/queue", hire).make(task, placement) -> a Ray handle

Nothing of this is decided later: an engine that is started again is told what the first one was told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.learning_loop import Schedule
from actors.role import Seat, Task
from actors.weight_planes import Plane
from launch.config import RunConfig
from launch.ledger_settings import algorithm_setting, ledger_settings
from launch.run_dir import RunDirectory
from launch.topology import Placement


@dataclass(frozen=True, slots=True)
class Casting:
    """`bind` is the address that the queue server listens on; `hire(kind, placement, *arguments, **environment)` starts
    an actor of a class in a place."""

    config: RunConfig
    directory: RunDirectory
    context: int
    bind: str
    hire: Callable[..., Any]

    def make(self, task: Task, placement: Placement) -> Any:
        """A new actor in this place; its heavy parts are loaded by its `start`."""
        seat = Seat(placement.name, placement.cores, "cuda" if placement.gpus else "cpu")
        return getattr(self, placement.role)(task, placement, seat)

    def queue(self, task: Task, placement: Placement, seat: Seat) -> Any:
        from actors.queue_actor import QueueActor

        ledger = ledger_settings(self.config)
        return self.hire(QueueActor, placement, task, seat, ledger, self.config.topology.queue, self.bind)

    def rollout(self, task: Task, placement: Placement, seat: Seat) -> Any:
        from actors.rollout_actor import RolloutActor
        from rollout.vllm_settings import VllmSettings, vllm_environment

        c = self.config
        kv_mb = c.topology.rollout.kv_cache_mb or (None if placement.gpus else 256)
        settings = VllmSettings(
            model_dir=str(Path(c.model.path).resolve()),
            dtype=c.model.dtype,
            max_model_len=self.context,
            device="cuda" if placement.gpus else "cpu",
            threads=placement.threads,
            cores=placement.cores or None,
            max_num_seqs=c.groups_in_flight * c.sampling.group_size,
            kv_cache_bytes=kv_mb and kv_mb << 20,
            gpu_share=placement.gpu_share or 1.0,
            tensor_parallel=max(1, len(placement.gpus)),
            kv_policy=c.weights.kv_policy,
            adapter_rank=c.topology.learner.lora_rank if c.adapters_travel else 0,
            plane=c.plane,
            store_url=self._store_url,
            bucket_bytes=c.weights.bucket_mb << 20,
            timeout_s=c.weights.timeout_s,
            seed=c.run.seed + placement.index,
            truncates=c.sampling.top_p < 1 or c.sampling.top_k > 0,
        )
        environment = vllm_environment(placement.threads)
        return self.hire(RolloutActor, placement, task, seat, settings, c.groups_in_flight, **environment)

    def reward(self, task: Task, placement: Placement, seat: Seat) -> Any:
        from actors.reward_actor import RewardActor

        return self.hire(RewardActor, placement, task, seat, self.config.rewards)

    def learner(self, task: Task, placement: Placement, seat: Seat) -> Any:
        from actors.learner_actor import LearnerActor, LearnerSpec
        from learner import heap

        c = self.config
        spec = LearnerSpec(
            rank=placement.index,
            world=c.topology.learner.ranks,
            algorithm=c.algorithm,
            setting=algorithm_setting(c),
            component_weights=tuple((r.component, r.weight) for r in c.rewards),
            learner=c.topology.learner,
            weights=c.weights,
            plane=Plane(c.plane, self._store_url, max(1, int(c.topology.rollout.gpus)), c.adapters_travel),
            schedule=Schedule(
                steps=c.run.steps,
                evaluate_at=frozenset(c.evaluated_versions),
                checkpoint_every=c.checkpoint.every,
                take_wait_s=c.topology.queue.group_deadline_s,
            ),
            keep_last=c.checkpoint.keep_last,
        )
        return self.hire(LearnerActor, placement, task, seat, spec, **heap.ENVIRONMENT)

    @property
    def _store_url(self) -> str:
        """Where the store plane keeps versions: as said, or in the run directory."""
        return self.config.weights.store_url or str(self.directory.path.resolve() / "weights")
