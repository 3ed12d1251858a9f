"""The whole run as one frozen value. Importable without torch, Ray or vLLM.

    T.yaml + --set a.b=c  ->  yaml_reader (plain data, lines)  ->  RunConfig (types, ranges)  ->  contradictions

A value is said once; what follows from it is a derived property here (`slots`, `plane`, ...). Nothing is
ever filled in by a validator: what cannot work is refused with the field path, the value and the remedy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from actors.config import ModelConfig, PromptsConfig, RewardConfig
from launch.config_errors import first_problem
from launch.contradictions import BYTES_PER_TOKEN, contradictions, why_not_adapters, why_not_ipc
from launch.yaml_reader import Source, read
from learner.choices import Choices
from learner.config import AlgorithmConfig, LearnerConfig
from learner.presets import Setting, resolve
from rollout.config import QueueConfig, SamplingConfig, Section, StalenessConfig, WeightsConfig
from rollout.errors import ConfigError


class RunSection(Section):
    """What the run is called, how long it is, and where its files go."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="names the run directory")
    seed: int = Field(0, ge=0, lt=2**31, description="the only source of randomness that a run is told")
    steps: int = Field(24, ge=1, description="optimizer steps until the run ends")
    dir: str = Field("runs", min_length=1, description="folder under which run directories are made")


class RolloutPlacement(Section):
    """Engines that generate."""

    replicas: int = Field(1, ge=1, description="engines, each with its own copy of the weights")
    gpus: float = Field(0, ge=0, description="GPUs per engine; more than 1 is tensor parallel, a fraction shares a GPU")
    cpus: float = Field(1, gt=0, description="cores (and threads) per engine; less than 1 shares a core")
    groups_in_flight: int | None = Field(
        None, ge=1, description="groups one engine generates at the same time; null: all slots, shared by the replicas"
    )
    restarts: int = Field(
        3,
        ge=0,
        description="times one engine is started again when it dies or is quarantined; the run goes on meanwhile",
    )
    kv_cache_mb: int | None = Field(
        None, ge=16, description="KV cache per engine; null: 256 MB on CPU, vLLM's choice on GPU"
    )


class RewardPlacement(Section):
    """Actors that score."""

    replicas: int = Field(1, ge=1, description="reward actors, each with its own worker processes")
    cpus: int = Field(1, ge=0, description="cores per reward actor; 0 lets it use what the other roles leave idle")


class TopologyConfig(Section):
    """How many of each role, and what each of them gets."""

    rollout: RolloutPlacement = RolloutPlacement()
    reward: RewardPlacement = RewardPlacement()
    learner: LearnerConfig = LearnerConfig()
    queue: QueueConfig = QueueConfig()


class EvaluateConfig(Section):
    """Greedy answers to the held-out prompts, scored by the same rewards."""

    every: int = Field(
        8, ge=0, description="steps between evaluations (also before the first and after the last); 0: never"
    )


class CheckpointConfig(Section):
    """What a resumed run starts from."""

    every: int = Field(
        8, ge=0, description="steps between checkpoints (the last step always makes one); 0: only the last"
    )
    keep_last: int = Field(3, ge=1, description="older checkpoints are deleted")


class ObserveConfig(Section):
    """Who else may watch. metrics.jsonl and events.jsonl are always written."""

    prometheus_port: int | None = Field(
        None, ge=0, le=65535, description="null: no exporter; 0: any free port, published in <run dir>/prometheus.json"
    )
    tensorboard: bool = Field(False, description="also write <run dir>/tensorboard")


class RunConfig(Section):
    """A topology file, checked. `load("T.yaml", ["run.steps=8"])` makes one."""

    run: RunSection = RunSection()
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="cpu refuses roles that ask for GPUs, cuda a run where none does, auto takes what they ask for",
    )
    model: ModelConfig
    prompts: PromptsConfig
    sampling: SamplingConfig = SamplingConfig()
    rewards: tuple[RewardConfig, ...] = Field(min_length=1, description="what an answer is worth: a weighted sum")
    algorithm: AlgorithmConfig = AlgorithmConfig()
    staleness: StalenessConfig = StalenessConfig()
    topology: TopologyConfig = TopologyConfig()
    weights: WeightsConfig = WeightsConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()

    # ---- what follows from the values above; never said in a topology

    @property
    def slots(self) -> int:
        """Groups that may live between lease and release: (S + 1) * P. Their number is what bounds staleness."""
        return (self.staleness.bound + 1) * self.algorithm.groups_per_step

    @property
    def samples_per_step(self) -> int:
        """Answers that one optimizer step learns from: P * G."""
        return self.algorithm.groups_per_step * self.sampling.group_size

    @property
    def groups_to_train(self) -> int:
        """Groups that the whole run trains on: steps * P."""
        return self.run.steps * self.algorithm.groups_per_step

    @property
    def groups_in_flight(self) -> int:
        """Groups that one engine generates at the same time (a group needs a slot, so more than its share is idle)."""
        said = self.topology.rollout.groups_in_flight
        return min(said or self.slots, -(-self.slots // self.topology.rollout.replicas))

    @property
    def journal_bytes(self) -> int:
        """The most that the journal takes on disk: groups not yet committed, and those that queue.retain keeps.

        Every answer is taken for one of max_tokens; prompts and dropped groups are not counted.
        """
        retain, steps = self.topology.queue.retain, self.run.steps
        uncommitted = self.slots + (self.checkpoint.every or steps) * self.algorithm.groups_per_step
        retained = (steps if retain == "all" else retain) * self.algorithm.groups_per_step
        groups = min(uncommitted + retained, self.groups_to_train + self.slots)
        return groups * self.sampling.group_size * self.sampling.max_tokens * BYTES_PER_TOKEN

    @property
    def choices(self) -> Choices:
        """Every choice of the algorithm, explicit. Raises ConfigError where they contradict each other."""
        sampling = self.sampling
        setting = Setting(
            group_size=sampling.group_size,
            max_tokens=sampling.max_tokens,
            negative_rewards=any(r.weight < 0 or r.kind == "overlong" for r in self.rewards),
        )
        return resolve(self.algorithm, setting)

    @property
    def uses_gpus(self) -> bool:
        """Whether any role asks for a GPU."""
        return self.topology.rollout.gpus > 0 or self.topology.learner.gpus > 0

    @property
    def plane(self) -> Literal["nccl", "gloo", "ipc", "store"]:
        """How weights travel: as said, or ipc inside one GPU, nccl between GPUs, store to several workers per engine,
        gloo otherwise."""
        if self.weights.plane != "auto":
            return self.weights.plane
        if not why_not_ipc(self):
            return "ipc"
        if min(self.topology.rollout.gpus, self.topology.learner.gpus) >= 1:
            return "nccl"
        return "store" if self.topology.rollout.gpus > 1 else "gloo"

    @property
    def adapters_travel(self) -> bool:
        """Whether only adapters travel: as said, or wherever there are some and both ends can."""
        if self.weights.lora != "auto":
            return self.weights.lora == "adapter"
        return self.topology.learner.lora_rank > 0 and not why_not_adapters(self)

    @property
    def evaluated_versions(self) -> tuple[int, ...]:
        """Weight versions after which the held-out prompts are answered, 0 first and the last one last."""
        every, steps = self.evaluate.every, self.run.steps
        return tuple(sorted({*range(0, steps, every), steps})) if every else ()

    def to_yaml(self) -> str:
        """The resolved topology, every default written out; `load` of it gives the same value."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A config together with what the user said, for `headrace explain` and for errors that name a line."""

    config: RunConfig
    source: Source


def load(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read, check and freeze a topology. Raises ConfigError: one line with place, field, value and remedy."""
    return load_with_source(path, overrides).config


def load_with_source(path: str | Path, overrides: Iterable[str] = ()) -> Loaded:
    """As `load`, and also where each value was said."""
    source = read(path, overrides)
    return Loaded(_checked(source), source)


def from_data(data: dict[str, Any], name: str = "config") -> RunConfig:
    """A config from plain data (tests, notebooks), with the checks and errors of a file."""
    return _checked(Source(name, data))


def _checked(source: Source) -> RunConfig:
    try:
        # JSON mode: strict types (no "8" for 8, no true for 1), yet lists for tuples
        config = RunConfig.model_validate_json(json.dumps(source.data), strict=True)
    except ValidationError as error:
        raise ConfigError(first_problem(error, source, RunConfig)) from None
    for problem in contradictions(config):
        raise ConfigError(f"{source.where(problem.path)}: {problem}")
    try:
        _ = config.choices
    except ConfigError as error:
        named = re.search(r"\b(?:algorithm|sampling)\.[a-z_.]*[a-z_]", str(error))
        raise ConfigError(f"{source.where(named[0] if named else 'algorithm')}: {error}") from None
    return config
