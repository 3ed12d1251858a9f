"""What there is to place roles on: hosts with cores, GPUs and memory. Reads /proc and /sys; no torch, no Ray.

    this_host() -> Host("box", cores=(0, 1), gpus=0, memory_gb=22.9)

Cores come in the order in which they should be given away: one of each physical core first, then their
hyper-threads, so that two roles share a physical core only when there is no other way.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError

from rollout.config import Section
from rollout.errors import ConfigError

CPUS = Path("/sys/devices/system/cpu")
NVIDIA = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True)
class Host:
    """One machine. `cores` are the logical CPUs that this process may use, best first."""

    name: str
    cores: tuple[int, ...]
    gpus: int = 0
    memory_gb: float = 0.0


@dataclass(frozen=True, slots=True)
class Inventory:
    """All hosts; the driver, the queue and the rewards live on the first."""

    hosts: tuple[Host, ...]

    @property
    def n_cores(self) -> int:
        return sum(len(h.cores) for h in self.hosts)

    @property
    def n_gpus(self) -> int:
        return sum(h.gpus for h in self.hosts)


def this_host() -> Host:
    """This machine, as much of it as this process may use (affinity, cgroup quota, CUDA_VISIBLE_DEVICES)."""
    return Host(platform.node() or "localhost", usable_cores(), visible_gpus(), round(memory_bytes() / 2**30, 1))


def local_inventory() -> Inventory:
    return Inventory((this_host(),))


def read_inventory(path: str | Path) -> Inventory:
    """Hosts from YAML or JSON: `[{name: a, cores: 64, gpus: 8, memory_gb: 512}, ...]`, for planning elsewhere."""
    file = Path(path)
    try:
        rows = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{file}: cannot be read as an inventory ({reason})") from None
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"{file}: must be a list of hosts, e.g. [{{name: a, cores: 64, gpus: 8}}]")
    return Inventory(tuple(_host(file, n, row) for n, row in enumerate(rows)))


class _HostRow(Section):
    """A host as it is written: `cores` is a count, or the ids that may be used."""

    name: str
    cores: PositiveInt | list[NonNegativeInt]
    gpus: NonNegativeInt = 0
    memory_gb: NonNegativeFloat = 0.0


def _host(file: Path, n: int, row: Any) -> Host:
    try:
        said = _HostRow.model_validate(row, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["host", str(n), *(str(part) for part in first["loc"][:1])])
        raise ConfigError(f"{file}: {where}: {first['msg']}; e.g. {{name: a, cores: 64, gpus: 8}}") from None
    cores = tuple(range(said.cores)) if isinstance(said.cores, int) else tuple(said.cores)
    if not cores:
        raise ConfigError(f"{file}: host.{n}.cores: is empty; give a count or a list of ids")
    return Host(said.name, cores, said.gpus, said.memory_gb)


def usable_cores() -> tuple[int, ...]:
    """Logical CPUs of this process in giving-away order, cut to the cgroup's quota."""
    cores = sorted(os.sched_getaffinity(0), key=lambda core: (_thread_of(core), core))
    quota = _cgroup_quota()
    return tuple(cores if quota is None else cores[: max(1, int(quota))])


def _thread_of(core: int) -> int:
    """0 for the first hyper-thread of a physical core, 1 for the second."""
    text = _read(CPUS / f"cpu{core}/topology/thread_siblings_list")
    siblings: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        siblings.extend(range(int(first), int(last or first) + 1))
    return siblings.index(core) if core in siblings else 0


def _cgroup_quota() -> float | None:
    limit, _, period = _read(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    if limit and limit != "max":
        return int(limit) / int(period or 100_000)
    quota, period = (
        _read(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")),
        _read(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")),
    )
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def visible_gpus() -> int:
    """NVIDIA GPUs the driver shows, cut to CUDA_VISIBLE_DEVICES."""
    try:
        present = len(list(NVIDIA.iterdir()))
    except OSError:
        present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return present
    return min(present, len([a for a in allowed.split(",") if a.strip() not in ("", "-1")]))


def memory_bytes() -> int:
    """Memory of this machine or, where smaller, of this control group."""
    total = 0
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = _read(Path("/sys/fs/cgroup") / name)
        if text.isdigit():
            total = min(total, int(text))
    return total


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
