"""The learner actor: one DeepSpeed rank. A thin shell around LearnerEngine, WeightSync and LearningLoop.

    meet      rank 0 opens the store where the ranks find each other
    start     load the model, or the newest whole checkpoint when resuming
    connect   rank 0 forms the weight group and makes every engine serve the learner's version
    run       the learning loop, to the end
    admit     an engine that came back, or a new one: it serves the present version when this returns
    export    the final weights as a Hugging Face directory

All of these but `admit` run on ONE thread (`_work`): torch keeps its gradient mode and its OpenMP team per thread.
`gauges` answers beside them. No method is a coroutine: Ray would run all of them on one event loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray

from actors.evaluation import evaluate
from actors.fleet import Fleet, RemoteEngine, canary_texts
from actors.learning_loop import Effects, LearningLoop, Metrics, Schedule
from actors.publisher import Publisher
from actors.role import Seat, Task, settled, take
from actors.weight_planes import Plane
from learner.config import AlgorithmConfig, LearnerConfig
from learner.presets import Setting, resolve
from rollout.audit import audit
from rollout.config import WeightsConfig
from rollout.errors import EngineError
from rollout.event_log import JsonLines, MetricsLog, replace_file
from rollout.trained_log import TrainedLog
from rollout.types import Prompt

CANARIES = 4
MEETING_S = 600.0


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """What a learner rank is told beside its task and its seat."""

    rank: int
    world: int
    algorithm: AlgorithmConfig
    setting: Setting
    component_weights: tuple[tuple[str, float], ...]
    learner: LearnerConfig
    weights: WeightsConfig
    plane: Plane
    schedule: Schedule
    keep_last: int


@ray.remote(max_restarts=0, max_concurrency=16)
class LearnerActor:
    """See the map above."""

    def __init__(self, task: Task, seat: Seat, spec: LearnerSpec) -> None:
        self.task, self.seat, self.spec = task, seat, spec
        self.run_dir = Path(task.run_dir)
        self._work = ThreadPoolExecutor(1, thread_name_prefix="learn")
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="evaluate")
        self._loop: LearningLoop | None = None
        take(seat, task)

    # ---- start ---------------------------------------------------------------------------------------------------

    def meet(self, world: int) -> tuple[str, int]:
        """Rank 0 hosts the ranks' store on a port that the system picks."""
        import torch.distributed as dist

        host = ray.util.get_node_ip_address()
        if world == 1:
            return host, 0
        self._store = dist.TCPStore(host, 0, world, True, timedelta(seconds=MEETING_S), wait_for_workers=False)
        return host, int(self._store.port)

    def start(self, meeting: tuple[str, int], resume: bool) -> int:
        return self._work.submit(self._start, meeting, resume).result()

    def _start(self, meeting: tuple[str, int], resume: bool) -> int:
        from learner import checkpoint
        from learner.engine import LearnerEngine
        from rollout.queue_client import QueueClient

        spec = self.spec
        self._enter_world(meeting)
        self.engine = LearnerEngine(
            self.task.model.path,
            resolve(spec.algorithm, spec.setting),
            spec.algorithm,
            spec.learner,
            self.seat.device,
            self.task.seed,
            temperature=self.task.sampling.temperature,
            serving_dtype=self.task.model.dtype,
            total_steps=spec.schedule.steps,
            max_tokens=self.task.sampling.max_tokens,
            component_weights=dict(spec.component_weights),
        )
        self.queue = QueueClient(self.task.queue, self.seat.name)
        self.prompts = self.task.prompt_source()
        self.event = self.task.events().append
        self.trained = TrainedLog(self.run_dir / "trained.jsonl", spec.rank)
        if resume:
            path, passed_over = checkpoint.latest(self.run_dir / "checkpoints")
            for reason in passed_over:
                self.event("checkpoint_passed_over", reason=reason)
            if path is not None:
                self.engine.load_checkpoint(path)
            self._forget_after(self.engine.version)
        settled()
        return self.engine.version

    def _forget_after(self, version: int) -> None:
        """Steps after the checkpoint are made again, from the same groups in the same order."""
        self.trained.resumed(version)
        if self.spec.rank == 0:
            self.queue.restarted(version)
            MetricsLog(self.run_dir / "metrics.jsonl").rewind(version + 1)

    def _enter_world(self, meeting: tuple[str, int]) -> None:
        import torch.distributed as dist

        spec, (host, port) = self.spec, meeting
        if spec.world == 1:
            return
        if spec.rank:
            self._store = dist.TCPStore(host, port, spec.world, False, timedelta(seconds=MEETING_S))
        backend = "nccl" if self.seat.device == "cuda" else "gloo"
        patience = timedelta(seconds=MEETING_S)
        dist.init_process_group(backend, store=self._store, rank=spec.rank, world_size=spec.world, timeout=patience)

    def connect(self, engines: Mapping[str, Any], rewards: Sequence[Any]) -> Metrics:
        """Every engine serves the learner's present version, proven, when this returns."""
        self._rewards = list(rewards)
        return self._work.submit(self._connect, engines).result()

    def _connect(self, engines: Mapping[str, Any]) -> Metrics:
        spec = self.spec
        canaries = canary_texts([self.prompts.prompt_for(i).token_ids for i in range(CANARIES)])
        self.publisher = Publisher(self.engine, spec.plane, spec.weights, spec.rank, spec.world, self.event, canaries)
        self.fleet = Fleet(_answers)
        for name, actor in engines.items():
            self.publisher.admit(name, RemoteEngine(actor))
            self.fleet.join(name, actor)
        self._audit()
        return self.publisher.begin(self.engine.version).result()

    def admit(self, name: str, actor: Any) -> Metrics:
        """Make `actor` serve the present version under `name`. Raises why it must not; then it takes no part."""
        found = self.publisher.bring(name, RemoteEngine(actor)).result()
        self.fleet.join(name, actor)
        return found

    def dismiss(self, name: str) -> None:
        """`name` is gone."""
        self.fleet.leave(name)
        self.publisher.dismiss(name)

    def lost(self) -> dict[str, str]:
        """Engines that no weights go to any more, with the reason."""
        return self.publisher.lost() if self._loop else {}

    # ---- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """The learning loop; returns the version reached."""
        spec = self.spec
        publisher = self.publisher
        effects = Effects(
            publisher.updated,
            publisher.begin,
            publisher.blocked_s,
            self._evaluate,
            self._checkpoint,
            self._observe,
        )
        self._loop = LearningLoop(
            self.queue,
            self.engine,
            spec.schedule,
            effects,
            trained=self.trained,
            metrics=JsonLines(self.run_dir / "metrics.jsonl"),
            rank=spec.rank,
            world=spec.world,
        )
        return self._work.submit(self._loop.run).result()

    def _evaluate(self, version: int) -> Future[Metrics]:
        if self.spec.rank:
            nothing: Future[Metrics] = Future()
            nothing.set_result({})
            return nothing
        return self._beside.submit(self._evaluate_now, version)

    def _evaluate_now(self, version: int) -> Metrics:
        try:
            found = evaluate(self.prompts.held_out(), version, self.fleet.answer, self._judge)
        except EngineError as error:
            self.event("evaluation_abandoned", version=version, reason=str(error))
            return {}
        answers = "".join(json.dumps(row) + "\n" for row in found.rows)
        replace_file(self.run_dir / "evaluations" / f"v{version:08d}.jsonl", answers)
        self.event("evaluation", **found.event())
        return found.metrics()

    def _judge(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Any]:
        return ray.get(self._rewards[0].judge.remote(list(prompts), list(texts)))

    def _checkpoint(self, version: int) -> None:
        from learner import checkpoint

        root = self.run_dir / "checkpoints"
        self.engine.save_checkpoint(checkpoint.path_of(root, version))
        if self.spec.rank == 0:
            checkpoint.prune(root, self.spec.keep_last)
            self.event("checkpoint", version=version)
            self._audit()

    def _audit(self) -> None:
        """Measure the books now: the journal against what this learner wrote down."""
        found = audit(self.run_dir / "journal", self.run_dir / "trained.jsonl")
        self._books = {"ledger/lost": float(len(found.lost)), "ledger/duplicated": float(len(found.duplicated))}

    def _observe(self) -> Metrics:
        """Rollout throughput and idleness since the last step, and the books of the queue."""
        if self.spec.rank:
            return {}
        if self.engine.skipped_ordinals:
            self.event("step_skipped", version=self.engine.version, ordinals=self.engine.skipped_ordinals)
        stats = self.queue.stats()
        return self.fleet.rates() | self._books | {"groups/dropped": float(sum(stats["dropped_by_reason"].values()))}

    # ---- end -----------------------------------------------------------------------------------------------------

    def drain(self, reason: str) -> None:
        """No new ordinal from here on; what is not trained ends as dropped with this reason."""
        if self.spec.rank == 0:
            self._work.submit(self.queue.drain, reason).result()

    def export(self, out: str) -> None:
        self._work.submit(self.engine.export_hf, out).result()

    def gauges(self) -> dict[str, Any]:
        return self._loop.gauges() if self._loop else {"phase": "starting"}

    def close(self) -> None:
        self._beside.shutdown(wait=False, cancel_futures=True)
        self._work.shutdown(wait=False, cancel_futures=True)


def _answers(asked: Mapping[str, Any], within_s: float) -> dict[str, Any]:
    """What each engine answered, or the error of one that did not, or is dead."""
    from ray.exceptions import RayError

    found: dict[str, Any] = {}
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=within_s)
    for name, reference in asked.items():
        try:
            found[name] = ray.get(reference, timeout=0)
        except RayError as error:
            found[name] = error
    return found
