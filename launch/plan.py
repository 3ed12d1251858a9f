"""`headrace plan T.yaml`: everything that is decided before anything starts, on one page or as JSON.

    plan = make_plan(config, local_inventory())      # ConfigError: it cannot run here, and what is missing
    print(plan.text())

Reads the topology, /proc and, where it exists, the model's header; starts nothing, imports neither torch nor Ray.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.models import check_model_dir
from launch.config import RunConfig
from launch.inventory import Inventory
from launch.topology import Placement, solve
from rollout.errors import ConfigError

MASTER_BYTES = 4 + 4 + 8 + 2  # of one parameter in the learner: fp32 master, gradient, two Adam moments, bf16 copy
PROCESS_GB = 1.2  # what an interpreter with torch and vLLM or DeepSpeed weighs before it holds a weight
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement and what follows from it. `warnings` are things that would stop a run later."""

    config: RunConfig
    inventory: Inventory
    placements: tuple[Placement, ...]
    parameters: int | None
    warnings: tuple[str, ...]

    def of(self, role: str) -> tuple[Placement, ...]:
        """The placements of one role, by index: `plan.of("rollout")[0].cores`."""
        return tuple(p for p in self.placements if p.role == role)

    def derived(self) -> dict[str, Any]:
        """What the topology implies, in the words of the README."""
        c = self.config
        return {
            "slots": c.slots,
            "samples_per_step": c.samples_per_step,
            "groups_to_train": c.groups_to_train,
            "groups_in_flight_per_engine": c.groups_in_flight,
            "max_staleness": c.staleness.bound,
            "weight_plane": c.plane,
            "weights_travel_as": "adapters" if c.adapters_travel else "whole models",
            "weight_bytes": self.travelling and self.travelling * DTYPE_BYTES[c.model.dtype],
            "evaluated_versions": list(c.evaluated_versions),
            "memory_gb": self.memory_gb(),
            "journal_gb": round(c.journal_bytes / 1e9, 3),
        }

    @property
    def travelling(self) -> int | None:
        """Parameters that a version consists of; None while the model is not there."""
        learner = self.config.topology.learner
        if not self.config.adapters_travel:
            return self.parameters
        return adapter_parameters(Path(self.config.model.path), learner.lora_rank, learner.lora_targets)

    def memory_gb(self) -> float | None:
        """A rough sum of host memory over all processes; None while the model is not there."""
        if self.parameters is None:
            return None
        topology = self.config.topology
        cpu_ranks = topology.learner.ranks if topology.learner.gpus == 0 else 0
        cpu_engines = topology.rollout.replicas if topology.rollout.gpus == 0 else 0
        cache = (topology.rollout.kv_cache_mb or 256) / 1024
        weights = self.parameters * DTYPE_BYTES[self.config.model.dtype] / 2**30
        learner = self.parameters * MASTER_BYTES / 2**30 if cpu_ranks else 0.0
        processes = topology.learner.ranks + topology.rollout.replicas
        return round(processes * PROCESS_GB + learner + cpu_engines * (weights + cache) + 1.0, 1)

    def json(self) -> str:
        """One JSON object; the keys are a contract."""
        return json.dumps(
            {
                "run": self.config.run.name,
                "hosts": [
                    {"name": h.name, "cores": list(h.cores), "gpus": h.gpus, "memory_gb": h.memory_gb}
                    for h in self.inventory.hosts
                ],
                "placements": [
                    {
                        "name": p.name,
                        "role": p.role,
                        "host": p.host,
                        "cores": list(p.cores),
                        "gpus": list(p.gpus),
                        "gpu_share": p.gpu_share,
                        "core_share": p.core_share,
                        "threads": p.threads,
                        "shares_with": p.shares_with,
                    }
                    for p in self.placements
                ],
                "derived": self.derived(),
                "warnings": list(self.warnings),
            },
            indent=2,
        )

    def text(self) -> str:
        """The page a person reads."""
        c, d = self.config, self.derived()
        lines = [f"Run {c.run.name}: {c.run.steps} steps of {c.model.path}", ""]
        lines += _table(("process", "host", "cores", "GPUs", ""), [_cells(p) for p in self.placements])
        p, g, s = c.algorithm.groups_per_step, c.sampling.group_size, c.staleness.bound
        lines += [
            "",
            f"  each step       {p} prompts x {g} answers = {d['samples_per_step']} answers of up to "
            f"{c.sampling.max_tokens} tokens",
            f"  slots           (bound {s} + 1) x {p} = {d['slots']} groups between lease and release",
            f"  staleness       no token older than {s} version{'' if s == 1 else 's'}, by construction",
            f"  weights         {d['weights_travel_as']} by {d['weight_plane']}"
            + (f", {_size(d['weight_bytes'])} each step" if d["weight_bytes"] else ""),
            f"  whole run       {d['groups_to_train']} groups trained"
            + (f"; held-out score at versions {_list(d['evaluated_versions'])}" if d["evaluated_versions"] else ""),
        ]
        if d["memory_gb"] is not None:
            lines.append(
                f"  host memory     about {d['memory_gb']} GB of {sum(h.memory_gb for h in self.inventory.hosts):g} GB"
            )
        retain = c.topology.queue.retain
        kept = "" if not retain else f"; keeps {retain} committed step{'' if retain == 1 else 's'}"
        lines.append(f"  journal         up to {_size(c.journal_bytes)} on disk{kept}")
        lines += ["", *(f"  ! {w}" for w in self.warnings)] if self.warnings else []
        return "\n".join(lines)


def make_plan(config: RunConfig, inventory: Inventory) -> Plan:
    """Solve the placement and look ahead. Raises ConfigError when the run cannot be placed."""
    placements = solve(config, inventory)
    parameters = parameters_of(Path(config.model.path))
    plan = Plan(config, inventory, placements, parameters, ())
    return Plan(config, inventory, placements, parameters, tuple(_warnings(plan)))


def parameters_of(model: Path) -> int | None:
    """Parameters by the headers of the safetensors files (no weights are read); None where there are none."""
    shapes = _shapes(model)
    return None if shapes is None else (sum(math.prod(shape) for shape in shapes.values()) or None)


def adapter_parameters(model: Path, rank: int, targets: Sequence[str]) -> int | None:
    """Parameters of adapters on `targets`, or on every linear layer but the output head; None without a model."""
    total = 0
    for name, shape in (_shapes(model) or {}).items():
        layer = name.removesuffix(".weight").rpartition(".")[2]
        linear = len(shape) == 2 and "embed" not in layer and layer != "lm_head"
        if layer in {t.rpartition(".")[2] for t in targets} if targets else linear:
            total += rank * sum(shape)
    return total or None


def _shapes(model: Path) -> dict[str, list[int]] | None:
    """Name -> shape of every tensor; None where a file is no safetensors file."""
    shapes: dict[str, list[int]] = {}
    for file in sorted(model.glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        except (OSError, ValueError, MemoryError, OverflowError):
            return None
        shapes |= {name: t["shape"] for name, t in header.items() if name != "__metadata__"}
    return shapes


def free_bytes(folder: Path) -> int:
    """Room on the disk on which `folder` is, or will be."""
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    return shutil.disk_usage(there).free


def _warnings(plan: Plan) -> list[str]:
    out: list[str] = []
    config = plan.config
    try:
        context = min(check_model_dir(config.model.path).context, config.model.max_context or 2**31)
        if config.sampling.max_tokens >= context:
            out.append(
                f"sampling.max_tokens {config.sampling.max_tokens} leaves no room for a prompt in {context} tokens"
            )
    except ConfigError as error:
        out.append(str(error))
    for name, path in (("path", config.prompts.path), ("held_out_path", config.prompts.held_out_path)):
        if path and not Path(path).is_file():
            out.append(f"prompts.{name}: {path} is not there; make the file, or mend the path")
    memory, there = plan.memory_gb(), sum(h.memory_gb for h in plan.inventory.hosts)
    if memory and there and memory > there:
        out.append(
            f"memory: about {memory} GB are needed and {there:g} GB are there; use a smaller model or fewer processes"
        )
    free = free_bytes(Path(config.run.dir))
    if config.journal_bytes > free:
        out.append(
            f"disk: the journal may take {_size(config.journal_bytes)} and {_size(free)} are free in {config.run.dir}; "
            "lower topology.queue.retain or checkpoint.every, or set run.dir to a larger disk"
        )
    return out


def _cells(p: Placement) -> tuple[str, ...]:
    gpus = ", ".join(map(str, p.gpus)) + (f" (share {p.gpu_share:g})" if 0 < p.gpu_share < 1 else "")
    cores = _ranges(p.cores) + (f" (share {p.core_share:g})" if p.core_share < 1 else "")
    own = "own, " if p.core_share == 1 else ""
    note = f"shared with {p.shares_with}" if p.shares_with else f"{own}{p.threads} thread{'s' if p.threads > 1 else ''}"
    return p.name, p.host, cores, gpus or "-", note


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[n]) for row in [head, *rows]) for n in range(len(head))]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]
    return [lines[0], "  " + "  ".join("-" * w for w in widths if w), *lines[1:]]


def _ranges(cores: tuple[int, ...]) -> str:
    """(0, 1, 2, 5) -> 0-2,5"""
    out: list[list[int]] = []
    for core in sorted(cores):
        if out and core == out[-1][1] + 1:
            out[-1][1] = core
        else:
            out.append([core, core])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in out) or "-"


def _list(versions: list[int]) -> str:
    shown = versions if len(versions) <= 6 else [*versions[:4], "...", versions[-1]]
    return ", ".join(map(str, shown))


def _size(n: float) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"
