"""Proves that `headrace explain` says of every key its value, who said it, what it may be and what it changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.config import Loaded, RunConfig, load_with_source
from launch.config_errors import keys_of
from launch.explain import AFFECTS, DERIVED, explain, leaves
from rollout.errors import ConfigError

DEMO = Path(__file__).parents[2] / "launch/topologies/demo_cpu.yaml"


@pytest.fixture
def demo() -> Loaded:
    return load_with_source(DEMO, ["run.steps=4"])


def test_a_key_said_in_the_file(demo: Loaded) -> None:
    assert explain(demo, "staleness.bound") == "\n".join(
        [
            "staleness.bound = 2",
            f"  said by    demo_cpu.yaml:{demo.source.lines['staleness.bound']} (default 2)",
            "  meaning    largest allowed learner version minus version of the oldest token (S)",
            "  may be     a whole number >= 0",
            "  affects    slots = (S + 1) * P = 24; 0 makes the run synchronous",
        ]
    )


def test_a_key_said_on_the_command_line_and_one_said_by_nobody(demo: Loaded) -> None:
    assert "said by    --set (default 24)" in explain(demo, "run.steps")
    assert "said by    the default" in explain(demo, "topology.queue.lease_s")
    assert "(required)" in explain(demo, "model.path")


def test_a_choice_of_the_preset_and_a_derived_value(demo: Loaded) -> None:
    assert explain(demo, "clip_high").startswith("algorithm.overrides.clip_high = 0.28\n  said by    preset dapo")
    assert explain(demo, "slots").startswith("slots = 24\n  derived")
    for name in DERIVED:
        assert explain(demo, name).startswith(f"{name} = ")


def test_a_section_and_everything(demo: Loaded) -> None:
    assert [line.partition(" = ")[0] for line in explain(demo, "staleness").splitlines()] == [
        "staleness.bound",
        "staleness.mode",
        "staleness.window",
    ]
    assert len(explain(demo, None).splitlines()) == len(list(leaves(demo.config)))


def test_a_name_that_is_unique_needs_no_section(demo: Loaded) -> None:
    assert explain(demo, "learning_rate").startswith("algorithm.learning_rate = 2e-05")


def test_an_unknown_key_names_the_nearest(demo: Loaded) -> None:
    with pytest.raises(ConfigError, match=r"explain stalenes\.bound: no such key; did you mean staleness\.bound\?"):
        explain(demo, "stalenes.bound")


def test_every_key_can_be_explained_and_no_effect_is_about_a_key_that_is_gone(demo: Loaded) -> None:
    for path, _, _ in leaves(demo.config):
        assert explain(demo, path).startswith(f"{path} = ")
    assert set(AFFECTS) <= set(keys_of(RunConfig))
    assert all(isinstance(say(demo.config), str) for say in AFFECTS.values())


def test_types_are_said_in_words(demo: Loaded) -> None:
    words: dict[str, Any] = {
        "sampling.stop": "a list of text",
        "staleness.mode": "wait or drop",
        "model.max_context": "a whole number or null",
        "evaluate.every": "a whole number >= 0",
    }
    for key, expected in words.items():
        assert f"may be     {expected}" in explain(demo, key)
