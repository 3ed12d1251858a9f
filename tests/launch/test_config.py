"""Proves that a topology file becomes exactly one frozen value: defaults, overrides, YAML without surprises, derived
numbers, and a resolved file that loads to the same value again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from launch.config import RunConfig, load, load_with_source
from launch.explain import leaves
from rollout.errors import ConfigError

TOPOLOGIES = sorted((Path(__file__).parents[2] / "launch/topologies").glob("*.yaml"))
SMALLEST = "model: {path: m}\nprompts: {path: p.jsonl, held_out: 8}\nrewards: [{name: exact}]\n"


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "t.yaml"
        path.write_text(SMALLEST + text)
        return path

    return write


@pytest.mark.parametrize("path", TOPOLOGIES, ids=lambda p: p.stem)
def test_every_topology_we_ship_loads_and_its_resolved_form_is_the_same_run(path: Path, tmp_path: Path) -> None:
    config = load(path)
    resolved = tmp_path / "config.yaml"
    resolved.write_text(config.to_yaml())
    assert load(resolved) == config


def test_the_demo_is_what_the_readme_says() -> None:
    config = load(next(p for p in TOPOLOGIES if p.stem == "demo_cpu"))
    assert (config.slots, config.samples_per_step, config.plane) == (24, 64, "gloo")
    assert config.evaluated_versions[0] == 0 and config.evaluated_versions[-1] == config.run.steps
    choices = config.choices
    assert (choices.correction, choices.correction_high, choices.mode, choices.kl_coef) == ("tis", 2.0, "decoupled", 0)
    assert (config.algorithm.learning_rate, config.algorithm.betas, config.algorithm.grad_clip) == (
        2e-5,
        (0.9, 0.99),
        1.0,
    )


def test_overrides_are_yaml_and_win_over_the_file(file: Any) -> None:
    path = file("run: {steps: 4}\nsampling: {stop: [a]}\n")
    config = load(path, ["run.steps=9", "sampling.stop=[x, y]", "rewards.0.weight=0.5", "run.name=a", "run.name=b"])
    assert (config.run.steps, config.sampling.stop, config.rewards[0].weight) == (9, ("x", "y"), 0.5)
    assert config.run.name == "b"  # the last one, as on any command line


def test_yaml_without_its_surprises(file: Any) -> None:
    path = file("algorithm: {learning_rate: 1e-6, overrides: {kl_kind: k3}}\nrun: {seed: 010, name: off}\n")
    config = load(path)
    assert config.algorithm.learning_rate == 1e-6  # YAML 1.1 reads text
    assert config.run.seed == 10  # YAML 1.1 reads eight
    assert config.run.name == "off"  # YAML 1.1 reads false


def test_anchors_and_merges_work_and_an_endless_one_ends(file: Any) -> None:
    config = load(file("evaluate: &each {every: 3}\ncheckpoint: {<<: *each, keep_last: 1}\n"))
    assert (config.checkpoint.every, config.checkpoint.keep_last) == (3, 1)
    with pytest.raises(ConfigError, match="nests deeper than"):
        load(file("evaluate: &a {every: *a}\n"))


def test_where_a_value_was_said(file: Any) -> None:
    source = load_with_source(file("run:\n  steps: 4\n"), ["run.seed=1", "algorithm={preset: grpo}"]).source
    assert source.said_by("run.steps") == "t.yaml:5"
    assert source.said_by("run.seed") == "--set"
    assert source.said_by("algorithm.preset") == "--set"
    assert source.said_by("run.name") is None


def test_a_config_cannot_be_changed(make_config: Any) -> None:
    config = make_config()
    with pytest.raises(ValidationError, match="frozen"):
        config.run.steps = 3


@pytest.mark.parametrize(
    ("over", "name", "value"),
    [
        ({"staleness": {"bound": 0}, "algorithm": {"groups_per_step": 3}}, "slots", 3),
        ({"staleness": {"bound": 3}, "algorithm": {"groups_per_step": 5}}, "slots", 20),
        ({"topology": {"rollout": {"replicas": 5}}}, "groups_in_flight", 5),  # 24 slots among 5 engines, rounded up
        ({"topology": {"rollout": {"groups_in_flight": 100}}}, "groups_in_flight", 24),
        ({"topology": {"rollout": {"gpus": 1}, "learner": {"gpus": 1}}}, "plane", "nccl"),
        ({"topology": {"rollout": {"gpus": 0.5}, "learner": {"gpus": 0.5}}}, "plane", "ipc"),
        ({"topology": {"rollout": {"gpus": 0.7}, "learner": {"gpus": 0.5}}}, "plane", "gloo"),
        ({"topology": {"rollout": {"gpus": 0.2, "replicas": 2}, "learner": {"gpus": 0.5}}}, "plane", "gloo"),
        ({"topology": {"rollout": {"gpus": 0.5}, "learner": {"gpus": 0.5, "lora_rank": 8}}}, "adapters_travel", False),
        ({"topology": {"rollout": {"gpus": 1}}}, "plane", "gloo"),
        ({"weights": {"plane": "store"}}, "plane", "store"),
        ({}, "adapters_travel", False),
        ({"topology": {"learner": {"lora_rank": 8}}}, "adapters_travel", True),
        ({"topology": {"learner": {"lora_rank": 8}}, "weights": {"lora": "merged"}}, "adapters_travel", False),
        ({"topology": {"learner": {"lora_rank": 8}}, "model": {"dtype": "float32"}}, "adapters_travel", False),
        ({"topology": {"learner": {"lora_rank": 1024}}}, "adapters_travel", False),
        (
            {"topology": {"rollout": {"gpus": 1}, "learner": {"gpus": 1, "lora_rank": 8}}},
            "adapters_travel",
            False,
        ),
        ({"run": {"steps": 5}, "evaluate": {"every": 2}}, "evaluated_versions", (0, 2, 4, 5)),
        ({"evaluate": {"every": 0}}, "evaluated_versions", ()),
    ],
)
def test_what_follows_from_what_was_said(make_config: Any, over: dict[str, Any], name: str, value: object) -> None:
    assert getattr(make_config(over), name) == value


def test_every_key_says_what_it_means(make_config: Any) -> None:
    silent = [path for path, _, field in leaves(make_config()) if not field.description]
    assert silent == []


def test_no_section_accepts_keys_it_does_not_know() -> None:
    sections: list[type[BaseModel]] = [RunConfig]
    for section in sections:
        assert section.model_config.get("extra") == "forbid" and section.model_config.get("frozen") is True, section
        for field in section.model_fields.values():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                sections.append(field.annotation)
    assert len(sections) > 10
