"""`headrace explain T.yaml KEY`: the value, who said it, what it means, what depends on it.

staleness.bound = 2
  said by    demo_cpu.yaml:21 (default 2)
  meaning    largest allowed learner version minus version of the oldest token (S)
  may be     a whole number >= 0
  affects    slots = (S + 1) * P = 24; 0 makes the run synchronous
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from launch.config import Loaded, RunConfig
from launch.config_errors import nearest, section_of
from learner.choices import Choices
from rollout.errors import ConfigError

Affects = Callable[[RunConfig], str]

AFFECTS: dict[str, Affects] = {  # key -> what it changes elsewhere, in the numbers of this run
    "run.steps": lambda c: f"groups trained in all: steps * P = {c.groups_to_train}; learning-rate schedules end there",
    "run.seed": lambda c: "which prompt an ordinal is, and what the engines sample",
    "run.dir": lambda c: f"run directories {c.run.dir}/{c.run.name}-001, -002, ...",
    "device": lambda c: f"only what is refused; this run {'uses GPUs' if c.uses_gpus else 'is on CPU'}",
    "model.dtype": lambda c: "bytes of a weight update, the engines' log-probs; the learner keeps float32 masters",
    "model.max_context": lambda c: "KV cache per sequence, and which prompts are too long",
    "prompts.held_out": lambda c: f"what is evaluated, at {_versions(c)}",
    "sampling.group_size": lambda c: f"answers per step: P * G = {c.samples_per_step}; the baseline of each advantage",
    "sampling.max_tokens": lambda c: "time to generate, length/truncated; must fit topology.learner.token_budget",
    "sampling.temperature": lambda c: "log-probs on both sides: the learner divides its logits by it too",
    "algorithm.preset": lambda c: (
        f"every choice of the update: here loss {c.choices.loss}, correction {c.choices.correction}"
    ),
    "algorithm.groups_per_step": lambda c: f"slots = (S + 1) * P = {c.slots}; answers per step = {c.samples_per_step}",
    "algorithm.mini_batches": lambda c: f"optimizer updates per step, and so per version: {c.algorithm.updates}",
    "algorithm.epochs": lambda c: f"optimizer updates per step, and so per version: {c.algorithm.updates}",
    "algorithm.overrides": lambda c: (
        f"single choices of preset {c.algorithm.preset}; `headrace explain T.yaml clip_high`"
    ),
    "staleness.bound": lambda c: f"slots = (S + 1) * P = {c.slots}; 0 makes the run synchronous",
    "staleness.window": lambda c: (
        f"take may choose among the oldest {max(1, int(c.staleness.window * c.slots))} groups"
    ),
    "topology.rollout.replicas": lambda c: f"each engine generates up to {c.groups_in_flight} groups at a time",
    "topology.rollout.groups_in_flight": lambda c: (
        f"sequences per engine: {c.groups_in_flight * c.sampling.group_size}"
    ),
    "topology.rollout.cpus": lambda c: "the cores an engine is pinned to, see `headrace plan`",
    "topology.learner.cpus": lambda c: "the cores a rank is pinned to, see `headrace plan`",
    "topology.learner.ranks": lambda c: f"how the {c.algorithm.groups_per_step} groups of a step are shared, by tokens",
    "topology.queue.durability": lambda c: "fsync survives a power cut, os a killed process, memory neither",
    "topology.queue.retain": lambda c: f"disk: the journal takes up to {c.journal_bytes / 1e6:.1f} MB",
    "weights.plane": lambda c: f"here {c.plane}",
    "weights.lora": lambda c: "here only adapters travel" if c.adapters_travel else "here all weights travel",
    "evaluate.every": lambda c: f"evaluations at {_versions(c)}",
    "checkpoint.every": lambda c: "how much a resumed run does again, and how long the journal must remember",
    "observe.prometheus_port": lambda c: "headrace_* gauges over HTTP; the address is in <run dir>/prometheus.json",
}

DERIVED = {  # what nobody says and follows from what was said
    "slots": "groups that may live between lease and release: (staleness.bound + 1) * algorithm.groups_per_step",
    "samples_per_step": "answers per optimizer step: algorithm.groups_per_step * sampling.group_size",
    "groups_to_train": "groups the run trains on: run.steps * algorithm.groups_per_step",
    "groups_in_flight": "groups one engine generates at the same time: its share of the slots",
    "journal_bytes": "the most that the journal takes on disk, if every answer has sampling.max_tokens tokens",
    "plane": "how weights travel: weights.plane, or by where the GPUs are",
    "adapters_travel": "whether versions are adapters alone: weights.lora, or wherever both ends can",
    "evaluated_versions": "weight versions whose held-out score is measured",
}


def explain(loaded: Loaded, key: str | None) -> str:
    """One key, one section, one derived value, or (None) every value with who said it."""
    if key is None:
        return "\n".join(_line(loaded, path, value) for path, value, _ in leaves(loaded.config))
    if key in DERIVED:
        return f"{key} = {_shown(getattr(loaded.config, key))}\n  derived    {DERIVED[key]}"
    rows = [row for row in leaves(loaded.config) if row[0] == key or row[0].startswith(f"{key}.")]
    exact = [row for row in rows if row[0] == key]
    if exact:
        return _page(loaded, *exact[0])
    if rows:
        return "\n".join(_line(loaded, path, value) for path, value, _ in rows)
    if key.startswith("algorithm.overrides.") and key.rpartition(".")[2] in Choices.model_fields:
        return _choice(loaded, key.rpartition(".")[2])
    if key in Choices.model_fields:
        return _choice(loaded, key)
    same_name = {path for path, _, _ in leaves(loaded.config) if path.rpartition(".")[2] == key}
    if len(same_name) == 1:
        return explain(loaded, same_name.pop())
    near = nearest(key, RunConfig)
    raise ConfigError(
        f"explain {key}: no such key; " + (f"did you mean {near}?" if near else "without a key, all are listed")
    )


def leaves(value: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, FieldInfo]]:
    """(path, value, field) of every value that is no section, in the order of the README."""
    for name, field in type(value).model_fields.items():
        path, here = f"{prefix}{name}", getattr(value, name)
        if isinstance(here, BaseModel):
            yield from leaves(here, f"{path}.")
        elif section_of(field.annotation)[0] is not None and isinstance(here, tuple):
            for n, entry in enumerate(here):
                yield from leaves(entry, f"{path}.{n}.")
        else:
            yield path, here, field


def _line(loaded: Loaded, path: str, value: Any) -> str:
    said = loaded.source.said_by(path)
    return f"{path} = {_shown(value)}" + (f"    # {said}" if said else "")


def _page(loaded: Loaded, path: str, value: Any, field: FieldInfo) -> str:
    said, default = loaded.source.said_by(path), field.get_default(call_default_factory=True)
    if field.is_required():
        origin = f"{said} (required)"
    elif said is None:
        origin = "the default"
    else:
        origin = f"{said} (default {_shown(default)})"
    lines = [f"{path} = {_shown(value)}", f"  said by    {origin}"]
    if field.description:
        lines.append(f"  meaning    {field.description}")
    lines.append(f"  may be     {allowed(field)}")
    if path in AFFECTS:
        lines.append(f"  affects    {AFFECTS[path](loaded.config)}")
    return "\n".join(lines)


def _choice(loaded: Loaded, name: str) -> str:
    """One choice of the algorithm: by the preset, or by an override."""
    choices, field = loaded.config.choices, Choices.model_fields[name]
    said = loaded.source.said_by(f"algorithm.overrides.{name}")
    lines = [
        f"algorithm.overrides.{name} = {_shown(getattr(choices, name))}",
        f"  said by    {said or f'preset {choices.preset}'}",
        f"  may be     {allowed(field)}",
    ]
    if field.description:
        lines.insert(2, f"  meaning    {field.description}")
    return "\n".join(lines)


def allowed(field: FieldInfo) -> str:
    """Type and range in words: 'a whole number >= 1', 'wait or drop'."""
    kind = _kind(field.annotation)
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [f"{signs[k]} {getattr(m, k):g}" for m in field.metadata for k in signs if getattr(m, k, None) is not None]
    return " ".join([kind, " and ".join(bounds)]) if bounds else kind


def _kind(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " or ".join(map(str, args))
    if origin in (typing.Union, types.UnionType):
        words = [_kind(a) for a in args if a is not type(None)]
        return " or ".join(dict.fromkeys(words + (["null"] if type(None) in args else [])))
    if origin is typing.Annotated:
        return allowed(FieldInfo.from_annotation(annotation))
    if origin in (tuple, list):
        return f"a list of {_kind(args[0])}"
    plain = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "a mapping"}
    return plain.get(origin or annotation, "a value")


def _versions(c: RunConfig) -> str:
    return f"versions {', '.join(map(str, c.evaluated_versions))}" if c.evaluated_versions else "no version"


def _shown(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return json.dumps(value, ensure_ascii=False, default=str)
