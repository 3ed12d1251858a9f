"""The processes of a run: Ray actors on their cores, started in order, watched, and closed. The one door to Ray.

    start     queue -> (engines, rewards, learner ranks together) -> weight group and first weights
    begin     every loop: engines generate, rewards score, ranks learn
    poll      gauges of every role; RoleDied names whoever ended that should not have
    close     ask, wait a little, kill; Ray goes down with everything it started

Nothing here decides anything about the run: what each role is told comes from its constructor.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from actors.learning_loop import Schedule
from actors.publisher import Plane
from actors.role import Seat, Task, thread_environment
from launch.config import RunConfig
from launch.ledger_settings import algorithm_setting, ledger_settings
from launch.run_dir import RunDirectory
from launch.topology import Placement
from rollout.errors import HeadraceError

START_S = 900.0  # the slowest honest start: a large model from a cold disk
CALL_S = 30.0
CLOSE_S = 20.0


class RoleDied(HeadraceError):
    """A role ended that should not have. `RoleDied: rollout-0 died while generating: ActorDiedError: ...`"""


def first_line(error: BaseException) -> str:
    """What really happened, on one line: Ray wraps what an actor raised in the traceback of its task."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return first_line(cause)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else '(no message)'}"


@dataclass
class Role:
    """One actor: its place, its handle, and its loop once it runs."""

    placement: Placement
    handle: Any
    loop: Any = None

    @property
    def name(self) -> str:
        return self.placement.name


@dataclass
class Cluster:
    """`with Cluster(config, plan.placements, directory, context=256) as cluster: cluster.start()`."""

    config: RunConfig
    placements: tuple[Placement, ...]
    directory: RunDirectory
    context: int
    resume: bool = False
    say: Callable[[str], None] = print
    roles: dict[str, Role] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ray: Any = None
        self.version = 0  # of the weights that the run starts from
        self._sockets = ""
        self.task = self._told()

    def __enter__(self) -> Cluster:
        import ray

        self._ray = ray
        self._sockets = tempfile.mkdtemp(prefix="headrace-")  # short: a socket path must stay under 107 bytes
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            num_cpus=max(8, 2 * len(self.placements)),  # cores are ours to give (launch/topology.py), not Ray's
            object_store_memory=128 << 20,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._ray.shutdown()
        shutil.rmtree(self._sockets, ignore_errors=True)

    # ---- start ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Everything up to the first weights in every engine. Raises RoleDied, or what a role refused to start with."""
        self.say("starting the queue")
        queue = self._add(self._one("queue"), self._queue)
        self.task = replace(self.task, queue=self._wait(queue.handle.start.remote(), "the queue to start"))
        self.say("starting engines, rewards and the learner (vLLM and DeepSpeed import torch: most of a minute)")
        for placement in self._all("rollout"):
            self._add(placement, self._rollout)
        for placement in self._all("reward"):
            self._add(placement, self._reward)
        for placement in self._all("learner"):
            self._add(placement, self._learner)
        ranks = self.of("learner")
        meeting = self._wait(ranks[0].handle.meet.remote(len(ranks)), "learner-0 to open a meeting point")
        starts = [(r, r.handle.start.remote()) for role in ("rollout", "reward") for r in self.of(role)]
        starts += [(r, r.handle.start.remote(meeting, self.resume)) for r in ranks]
        *_, self.version = self._all_of(starts, "start")
        self.say("forming the weight group; every engine takes the learner's weights before it serves")
        engines = {r.name: r.handle for r in self.of("rollout")}
        rewards = [r.handle for r in self.of("reward")]
        self._all_of([(r, r.handle.connect.remote(engines, rewards)) for r in ranks], "connect")

    def begin(self) -> None:
        """Let every loop run."""
        for role in ("rollout", "reward", "learner"):
            for r in self.of(role):
                r.loop = r.handle.run.remote()

    def _told(self) -> Task:
        """What every role is told; the queue's endpoint is added once it is known."""
        return Task(
            run_dir=str(self.directory.path.resolve()),
            seed=self.config.run.seed,
            model=self.config.model,
            prompts=self.config.prompts,
            sampling=self.config.sampling,
            context=self.context,
        )

    def _add(self, placement: Placement, make: Callable[[Placement, Seat], Any]) -> Role:
        device = "cuda" if placement.gpus else "cpu"
        role = Role(placement, make(placement, Seat(placement.name, placement.cores, device)))
        self.roles[placement.name] = role
        return role

    def _actor(self, kind: Any, placement: Placement, *args: object, **environment: str) -> Any:
        """One process of the run, on its way up; `kind` is its actor class."""
        variables = thread_environment(placement.threads) | environment
        gpus = sum(placement.gpu_share for _ in placement.gpus)
        options = {"num_cpus": 0, "num_gpus": gpus, "runtime_env": {"env_vars": variables}}
        return kind.options(**options).remote(*args)

    def _queue(self, placement: Placement, seat: Seat) -> Any:
        from actors.queue_actor import QueueActor

        bind = f"ipc://{self._sockets}/queue"
        ledger = ledger_settings(self.config)
        return self._actor(QueueActor, placement, self.task, seat, ledger, self.config.topology.queue, bind)

    def _rollout(self, placement: Placement, seat: Seat) -> Any:
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
        return self._actor(RolloutActor, placement, self.task, seat, settings, c.groups_in_flight, **environment)

    def _reward(self, placement: Placement, seat: Seat) -> Any:
        from actors.reward_actor import RewardActor

        return self._actor(RewardActor, placement, self.task, seat, self.config.rewards)

    def _learner(self, placement: Placement, seat: Seat) -> Any:
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
        return self._actor(LearnerActor, placement, self.task, seat, spec, **heap.ENVIRONMENT)

    @property
    def _store_url(self) -> str:
        """Where the store plane keeps versions: as said, or in the run directory."""
        return self.config.weights.store_url or str(self.directory.path.resolve() / "weights")

    # ---- watch ---------------------------------------------------------------------------------------------------

    def of(self, role: str) -> list[Role]:
        """The roles of one kind, by index."""
        return [r for r in self.roles.values() if r.placement.role == role]

    def poll(self, wait_s: float) -> bool:
        """Wait up to `wait_s` for a loop to end; True once every learner rank is done. Raises RoleDied."""
        loops = {r.loop: r for r in self.roles.values() if r.loop is not None}
        ended, _ = self._ray.wait(list(loops), num_returns=len(loops), timeout=wait_s, fetch_local=False)
        for reference in ended:
            self._outcome(loops[reference])
        return all(r.loop in ended for r in self.of("learner"))

    def _outcome(self, role: Role) -> Any:
        try:
            return self._ray.get(role.loop, timeout=CALL_S)
        except Exception as error:
            raise RoleDied(f"{role.name} died: {first_line(error)}; see logs/{role.name}.log") from error

    def gauges(self) -> dict[str, dict[str, Any]]:
        """What every role says of itself; a role that does not answer in time says so."""
        asked = {name: role.handle.gauges.remote() for name, role in self.roles.items()}
        self._ray.wait(list(asked.values()), num_returns=len(asked), timeout=5.0)
        return {name: self._answer(reference) for name, reference in asked.items()}

    def _answer(self, reference: Any) -> dict[str, Any]:
        from ray.exceptions import RayError

        try:
            return dict(self._ray.get(reference, timeout=0))
        except RayError as error:
            return {"silent": first_line(error)}

    # ---- end -----------------------------------------------------------------------------------------------------

    def call(self, role: str, method: str, *args: object, timeout_s: float = START_S) -> list[Any]:
        """Call a method on every actor of a role; their answers by index."""
        asked = [(r, getattr(r.handle, method).remote(*args)) for r in self.of(role)]
        return self._all_of(asked, method, timeout_s)

    def await_loops(self, roles: Iterable[str], timeout_s: float) -> list[str]:
        """Wait for loops that are about to end by themselves; the names of those that did not."""
        loops = {r.loop: r for role in roles for r in self.of(role) if r.loop is not None}
        _, running = self._ray.wait(list(loops), num_returns=len(loops), timeout=timeout_s)
        return [loops[reference].name for reference in running]

    def close(self) -> None:
        """Ask every role to close, wait a little, kill what is left. Never raises: it runs when things are broken."""
        asked = [role.handle.close.remote() for role in self.roles.values()]
        if asked:
            self._ray.wait(asked, num_returns=len(asked), timeout=CLOSE_S)
        for role in self.roles.values():
            self._ray.kill(role.handle)
        self.roles.clear()

    # ---- small change ----------------------------------------------------------------------------------------------

    def _all(self, role: str) -> list[Placement]:
        return [p for p in self.placements if p.role == role]

    def _one(self, role: str) -> Placement:
        return self._all(role)[0]

    def _wait(self, reference: Any, what: str) -> Any:
        started = time.monotonic()
        try:
            return self._ray.get(reference, timeout=START_S)
        except Exception as error:
            waited = time.monotonic() - started
            raise RoleDied(f"waited {waited:.0f} s for {what}: {first_line(error)}") from error

    def _all_of(self, asked: list[tuple[Role, Any]], doing: str, timeout_s: float = START_S) -> list[Any]:
        """Every answer, failing at the first refusal instead of waiting for the slowest role."""
        pending = {reference: role for role, reference in asked}
        deadline = time.monotonic() + timeout_s
        while pending:
            done, _ = self._ray.wait(list(pending), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                names = ", ".join(sorted(r.name for r in pending.values()))
                raise RoleDied(f"waited {timeout_s:.0f} s for {names} to {doing}; see logs/")
            role = pending.pop(done[0])
            try:
                self._ray.get(done[0])
            except Exception as error:
                why = first_line(error)
                raise RoleDied(f"{role.name} could not {doing}: {why}; see logs/{role.name}.log") from error
        return [self._ray.get(reference) for _, reference in asked]
