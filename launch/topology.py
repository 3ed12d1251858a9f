"""Which role gets which cores and GPUs. Pure: a config and an inventory in, placements out, or what is missing.

    solve(config, Inventory((Host("box", cores=(0, 1)),))) ->
        learner-0  box  cores (1,)  gpus ()
        rollout-0  box  cores (0,)  gpus ()
        reward-0   box  cores (0,)  shared with rollout-0
        queue      box  cores (0,)  shared with rollout-0

The rules:
  1. learner ranks and engines own their cores and GPUs: unpinned threads of two roles on one core collapse both.
     One that asks for less than a core shares one with others that do, each with one thread: slow, but it fits.
  2. Whatever is hardest to fit is placed first (GPUs, then cores), each on the host where least is left over.
  3. Learner ranks stay together on one host as long as it has room.
  4. Where weights do not leave their GPU (plane ipc), the learner and the engine are placed on the same one.
  5. Rewards take cores that are left over on the first host; where none are, they share those of the engines, which
     are idle while the learner is behind. The queue and the driver always share: they mostly wait.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from launch.inventory import Host, Inventory
from rollout.errors import ConfigError

if TYPE_CHECKING:
    from launch.config import RunConfig

Role = Literal["learner", "rollout", "reward", "queue"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement("rollout", 0, "box", cores=(0,), gpus=(), gpu_share=0.0, shares_with=None)."""

    role: Role
    index: int
    host: str
    cores: tuple[int, ...]
    gpus: tuple[int, ...] = ()
    gpu_share: float = 0.0  # of each GPU in `gpus`; 1.0 is all of it
    core_share: float = 1.0  # of each core in `cores`
    shares_with: str | None = None  # the role whose cores these are

    @property
    def name(self) -> str:
        return "queue" if self.role == "queue" else f"{self.role}-{self.index}"

    @property
    def threads(self) -> int:
        """Threads this process should compute with."""
        return max(1, len(self.cores))


@dataclass(frozen=True, slots=True)
class Need:
    """What one process of a role asks for."""

    role: Role
    index: int
    cores: float  # a whole number, or the share of one core
    gpus: float


@dataclass(slots=True)
class _Free:
    """What is left of one host while placing."""

    host: Host
    cores: list[int]
    gpus: list[float] = field(default_factory=list)  # share left of each GPU
    parts: dict[int, float] = field(default_factory=dict)  # share left of each core that is given away in parts

    def take(self, need: Need) -> Placement | None:
        """Give the need its cores and GPUs, or change nothing and return None."""
        gpus = self._gpus_for(need.gpus)
        if gpus is None or not self._has_cores(need.cores):
            return None
        share = min(1.0, need.gpus)
        for gpu in gpus:
            self.gpus[gpu] = round(self.gpus[gpu] - share, 6)
        cores = self._cores_for(need)
        part = min(1.0, need.cores)
        return Placement(need.role, need.index, self.host.name, cores, tuple(gpus), share, part)

    def _has_cores(self, wanted: float) -> bool:
        return len(self.cores) >= max(1, wanted) or (wanted < 1 and self._part_for(wanted) is not None)

    def _part_for(self, wanted: float) -> int | None:
        """The fullest core that still has room for a part."""
        fitting = [core for core, left in self.parts.items() if left >= wanted - 1e-6]
        return min(fitting, key=lambda core: self.parts[core]) if fitting else None

    def _cores_for(self, need: Need) -> tuple[int, ...]:
        """Engines take from the front, others from the back, so that each role's cores lie together."""
        end = 0 if need.role == "rollout" else -1
        if need.cores >= 1:
            return tuple(sorted(self.cores.pop(end) for _ in range(int(need.cores))))
        core = self._part_for(need.cores)
        if core is None:
            core = self.cores.pop(end)
            self.parts[core] = 1.0
        self.parts[core] = round(self.parts[core] - need.cores, 6)
        return (core,)

    def _gpus_for(self, wanted: float) -> list[int] | None:
        if wanted == 0:
            return []
        if wanted < 1:  # the fullest GPU that still has room
            fitting = [g for g, left in enumerate(self.gpus) if left >= wanted - 1e-6]
            return [min(fitting, key=lambda g: self.gpus[g])] if fitting else None
        whole = [g for g, left in enumerate(self.gpus) if left == 1.0]
        return whole[: int(wanted)] if len(whole) >= int(wanted) else None


def needs(config: RunConfig) -> list[Need]:
    """The processes that own cores, hardest to fit first."""
    rollout, learner = config.topology.rollout, config.topology.learner
    ranks = [Need("learner", n, learner.cpus, learner.gpus) for n in range(learner.ranks)]
    engines = [Need("rollout", n, rollout.cpus, rollout.gpus) for n in range(rollout.replicas)]
    return sorted(ranks + engines, key=lambda need: (-need.gpus, -need.cores, need.role, need.index))


def solve(config: RunConfig, inventory: Inventory) -> tuple[Placement, ...]:
    """Every process of the run with its place. Raises ConfigError naming what is missing and how to need less."""
    free = [_Free(h, list(h.cores), [1.0] * h.gpus) for h in inventory.hosts]
    placed: list[Placement] = []
    fit = [f for f in free if config.plane != "ipc" or _has_room_for_all(f, needs(config))] or free
    for need in needs(config):
        at = next((p for f in _order(fit, need, placed) if (p := f.take(need)) is not None), None)
        if at is None:
            raise ConfigError(_refusal(config, inventory, need))
        placed.append(at)
    _refuse_parted(config, placed)
    placed.extend(_light_roles(config, free, placed))
    rank = {"learner": 0, "rollout": 1, "reward": 2, "queue": 3}
    return tuple(sorted(placed, key=lambda p: (rank[p.role], p.index)))


def _has_room_for_all(host: _Free, wanted: Sequence[Need]) -> bool:
    """Whether these can all be placed on one host (and fractions of a GPU that fit into one then lie on one)."""
    trial = copy.deepcopy(host)
    return all(trial.take(need) is not None for need in wanted)


def _refuse_parted(config: RunConfig, placed: Sequence[Placement]) -> None:
    """Weights that do not leave their GPU need learner and engine on the same one."""
    gpus = {(p.host, p.gpus): p for p in placed}
    if config.plane == "ipc" and len(gpus) > 1:
        where = ", ".join(f"{p.name} on {p.host} GPU {p.gpus[0]}" for p in gpus.values())
        remedy = "ask for fewer topology.learner.cpus or topology.rollout.cpus, or set weights.plane to gloo"
        raise ConfigError(f"weights.plane: ipc: needs learner and engine on one GPU, here {where}; {remedy}")


def _order(free: Sequence[_Free], need: Need, placed: Sequence[Placement]) -> list[_Free]:
    """Hosts to try: a learner rank beside the other ranks, then wherever least would be left over."""
    ranks = {p.host for p in placed if p.role == "learner"}
    beside = {f.host.name for f in free if need.role == "learner" and f.host.name in ranks}
    return sorted(free, key=lambda f: (f.host.name not in beside, sum(f.gpus), len(f.cores)))


def _light_roles(config: RunConfig, free: Sequence[_Free], placed: Sequence[Placement]) -> Iterable[Placement]:
    """Rewards and the queue, on the first host."""
    first = free[0]
    lender = next((p for p in placed if p.role == "rollout" and p.host == first.host.name), placed[0])
    for n in range(config.topology.reward.replicas):
        wanted = config.topology.reward.cpus
        if wanted and len(first.cores) >= wanted:
            cores = tuple(sorted(first.cores.pop(0) for _ in range(wanted)))
            yield Placement("reward", n, first.host.name, cores)
        else:
            yield _shared("reward", n, first, lender)
    yield _shared("queue", 0, first, lender)


def _shared(role: Role, index: int, first: _Free, lender: Placement) -> Placement:
    if first.cores:  # something is left over: it is nobody's, so nobody is disturbed
        return Placement(role, index, first.host.name, tuple(sorted(first.cores)), shares_with="small roles")
    cores = lender.cores if lender.host == first.host.name else first.host.cores
    return Placement(role, index, first.host.name, cores, shares_with=lender.name)


def _refusal(config: RunConfig, inventory: Inventory, need: Need) -> str:
    """One line: what is asked for, what there is, what is missing, and what to lower."""
    rollout, learner = config.topology.rollout, config.topology.learner
    cores = rollout.replicas * rollout.cpus + learner.ranks * learner.cpus
    gpus = rollout.replicas * rollout.gpus + learner.ranks * learner.gpus
    asks = (
        f"{_n(learner.ranks, 'learner rank')} x {_amount(learner.cpus, learner.gpus)}"
        f" + {_n(rollout.replicas, 'engine')} x {_amount(rollout.cpus, rollout.gpus)}"
    )
    there = f"{_hosts(inventory)} {_amount(inventory.n_cores, inventory.n_gpus)}"
    section = f"topology.{need.role}"
    if gpus > inventory.n_gpus:
        missing = _missing(gpus - inventory.n_gpus, "GPU")
        remedy = "lower topology.rollout.replicas or .gpus, or topology.learner.ranks"
        if inventory.n_gpus == 0:
            remedy = "to run on CPU set topology.rollout.gpus=0 and topology.learner.gpus=0"
    elif cores > inventory.n_cores:
        missing = _missing(cores - inventory.n_cores, "core")
        remedy = "lower topology.rollout.replicas or .cpus, or topology.learner.ranks or .cpus"
    else:
        missing = f"no single host has {_amount(need.cores, need.gpus)} left for {need.role}-{need.index}"
        remedy = f"lower {section}.cpus or {section}.gpus, or use fewer, smaller processes"
    return f"{section}: needs {asks}; {there}: {missing}; {remedy}"


def _hosts(inventory: Inventory) -> str:
    return "this host has" if len(inventory.hosts) == 1 else f"the {len(inventory.hosts)} hosts have"


def _amount(cores: float, gpus: float) -> str:
    return _n(cores, "core") + (f" and {_n(gpus, 'GPU')}" if gpus else "")


def _n(count: float, word: str) -> str:
    return f"{count:g} {word}{'' if count == 1 else 's'}"


def _missing(count: float, word: str) -> str:
    return f"{_n(count, word)} {'is' if count == 1 else 'are'} missing"
