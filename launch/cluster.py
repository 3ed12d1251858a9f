"""The processes of a run: Ray actors on their cores, started in order, watched, and closed. The one door to Ray.

    start     queue -> (engines, rewards, learner ranks together) -> weight group and first weights
    begin     every loop: engines generate, rewards score, ranks learn
    poll      an engine that ended is started again (launch/crew.py); RoleDied names whoever else ended
    close     ask, wait a little, kill; Ray goes down with everything it started

Nothing here decides anything about the run: what each role is told comes from launch/casting.py.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from actors.rewards.descendants import kill_if_born
from actors.role import Task, thread_environment
from launch.answers import CALL_S, Answers, first_line
from launch.casting import Casting
from launch.config import RunConfig
from launch.crew import START_S, Crew, RoleDied
from launch.run_dir import RunDirectory
from launch.topology import Placement

__all__ = ["Cluster", "RoleDied"]

CLOSE_S = 20.0


@dataclass
class Role:
    """One actor: its place, its handle, and its loop once it runs."""

    placement: Placement
    handle: Any
    loop: Any = None
    starting: Any = None
    alone: Any = None  # an engine's own process, as its first word says it
    family: dict[int, int] = field(default_factory=dict)  # and with those it has started; when each was born

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
        self.answers: Answers  # from `__enter__` on
        self.version = 0  # of the weights that the run starts from
        self._asked: Any = None
        self._sockets = ""
        self.task = self._told()
        self.crew = self._engines()

    def __enter__(self) -> Cluster:
        import ray

        self._ray, self.answers = ray, Answers(ray)
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
        queue = self._add(self._all("queue")[0])
        self.task = replace(self.task, queue=self.answers.of(queue.handle.start.remote(), "the queue to start"))
        self.say("starting engines, rewards and the learner (vLLM and DeepSpeed import torch: most of a minute)")
        for role in ("rollout", "reward", "learner"):
            for placement in self._all(role):
                self._add(placement)
        ranks = self.of("learner")
        meeting = self.answers.of(ranks[0].handle.meet.remote(len(ranks)), "learner-0 to open a meeting point")
        starts = {r.name: r.handle.start.remote() for role in ("rollout", "reward") for r in self.of(role)}
        starts |= {r.name: r.handle.start.remote(meeting, self.resume) for r in ranks}
        *started, self.version = self.answers.of_all(starts, "start")
        for r, answer in zip(self.of("rollout"), started, strict=False):
            r.family = answer
        self.say("forming the weight group; every engine takes the learner's weights before it serves")
        engines = {r.name: r.handle for r in self.of("rollout")}
        rewards = [r.handle for r in self.of("reward")]
        self.answers.of_all({r.name: r.handle.connect.remote(engines, rewards) for r in ranks}, "connect")

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

    def _engines(self) -> Crew:
        names = [p.name for p in self._all("rollout")]
        return Crew(names, self.config.topology.rollout.restarts, self, self.task.events().append)

    def _add(self, placement: Placement) -> Role:
        cast = Casting(self.config, self.directory, self.context, f"ipc://{self._sockets}/queue", self._actor)
        role = self.roles[placement.name] = Role(placement, cast.make(self.task, placement))
        if placement.role == "rollout":
            role.alone = role.handle.processes.remote()
        return role

    def _actor(self, kind: Any, placement: Placement, *args: object, **environment: str) -> Any:
        """One process of the run, on its way up; `kind` is its actor class."""
        variables = thread_environment(placement.threads) | environment
        gpus = sum(placement.gpu_share for _ in placement.gpus)
        options = {"num_cpus": 0, "num_gpus": gpus, "runtime_env": {"env_vars": variables}}
        return kind.options(**options).remote(*args)

    # ---- watch ---------------------------------------------------------------------------------------------------

    def of(self, role: str) -> list[Role]:
        """The roles of one kind, by index."""
        return [r for r in self.roles.values() if r.placement.role == role]

    def poll(self, wait_s: float) -> bool:
        """Wait up to `wait_s` for a loop to end; True once every learner rank is done.

        An engine that ended is started again (launch/crew.py). Raises RoleDied for any other role, and when no engine
        is left.
        """
        loops = {r.loop: r for r in self.roles.values() if r.loop is not None}
        ended, _ = self._ray.wait(list(loops), num_returns=len(loops), timeout=wait_s, fetch_local=False)
        for reference in ended:
            role = loops[reference]
            if role.placement.role != "rollout":
                self._outcome(role)
            elif reason := self.outcome(reference):
                self.crew.lost(role.name, reason)
        if all(r.loop in ended for r in self.of("learner")):
            return True
        self._hear_learner()
        self.crew.look()
        return False

    def _hear_learner(self) -> None:
        """Engines that the weight plane has given up, as of the answer to the question of the poll before."""
        asked, self._asked = self._asked, None
        if asked is not None and self.outcome(asked) == "":
            for name, reason in self._ray.get(asked).items():
                self.crew.lost(name, f"quarantined: {reason}")
        elif asked is not None and self.outcome(asked) is None:
            self._asked = asked
            return
        self._asked = self.roles["learner-0"].handle.lost.remote()

    def _outcome(self, role: Role) -> Any:
        try:
            return self._ray.get(role.loop, timeout=CALL_S)
        except Exception as error:
            raise RoleDied(f"{role.name} died: {first_line(error)}; see logs/{role.name}.log") from error

    def gauges(self) -> dict[str, dict[str, Any]]:
        """What every role says of itself; a role that does not answer in time says so."""
        absent = {name: self.crew.gauges(name) for name in self.crew.absent}
        asked = {name: role.handle.gauges.remote() for name, role in self.roles.items() if name not in absent}
        self._ray.wait(list(asked.values()), num_returns=len(asked), timeout=5.0)
        found = {name: self._answer(reference) for name, reference in asked.items()}
        for name in self.crew.names:
            if name in found:
                self.crew.heard(name, "silent" not in found[name], self.config.weights.timeout_s)
        return found | absent

    def _answer(self, reference: Any) -> dict[str, Any]:
        from ray.exceptions import RayError

        try:
            return dict(self._ray.get(reference, timeout=0))
        except RayError as error:
            return {"silent": first_line(error)}

    # ---- an engine that comes and goes (launch.crew.Hands) ---------------------------------------------------------

    def bury(self, name: str) -> None:
        role = self.roles[name]
        role.loop = None
        self._kill(role)
        self.roles["learner-0"].handle.dismiss.remote(name)

    def restart(self, name: str) -> Any:
        role = self._add(self.roles[name].placement)
        role.starting = role.handle.start.remote()
        return role.starting

    def rejoin(self, name: str) -> Any:
        role = self.roles[name]
        role.family = self._ray.get(role.starting)
        return self.roles["learner-0"].handle.admit.remote(name, role.handle)

    def set_to_work(self, name: str) -> None:
        role = self.roles[name]
        role.loop = role.handle.run.remote()

    def outcome(self, reference: Any) -> str | None:
        return self.answers.outcome(reference)

    # ---- end -----------------------------------------------------------------------------------------------------

    def call(self, role: str, method: str, *args: object, timeout_s: float = START_S) -> list[Any]:
        """Call a method on every actor of a role; their answers by index."""
        asked = {r.name: getattr(r.handle, method).remote(*args) for r in self.of(role)}
        return self.answers.of_all(asked, method, timeout_s)

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
            self._kill(role)
        self.roles.clear()

    def _kill(self, role: Role) -> None:
        """An engine with the processes it has started: vLLM's own does not notice that its actor is gone."""
        if role.alone is not None and self.outcome(role.alone) == "":
            for pid, born in self._ray.get(role.alone).items():
                kill_if_born(pid, born)
        for pid, born in role.family.items():
            kill_if_born(pid, born)
        self._ray.kill(role.handle)

    def _all(self, role: str) -> list[Placement]:
        return [p for p in self.placements if p.role == role]
