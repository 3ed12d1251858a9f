"""Proves, on a corpus of broken topologies, that each is refused with exactly one line: place, field, value, remedy.

Each file of `broken/` says in its first line what must be answered; a message that ends in ... is compared up to there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.config import load
from rollout.errors import ConfigError

BROKEN = sorted((Path(__file__).parent / "broken").glob("*.yaml"))
DEMO = Path(__file__).parents[2] / "launch/topologies/demo_cpu.yaml"


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("path", BROKEN, ids=lambda p: p.stem)
def test_broken_topology(path: Path) -> None:
    expected = path.read_text().splitlines()[0].removeprefix("# expect: ")
    got = refusal(path)
    assert "\n" not in got
    if expected.endswith(" ..."):
        assert got.startswith(expected.removesuffix(" ..."))
    else:
        assert got == expected


def test_the_corpus_is_there() -> None:
    assert len(BROKEN) >= 50


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.steps=0", "--set: run.steps: 0: must be >= 1"),
        ("run.stepz=3", "--set: run.stepz: 3: no such key; did you mean run.steps?"),
        ("topology.queue.retain=some", '--set: topology.queue.retain: "some": must be a whole number or all'),
        ("topology.queue.retain=-1", "--set: topology.queue.retain: -1: must be >= 0 or all"),
        ("learner.ranks=2", '--set: learner: {"ranks": 2}: no such key; did you mean topology.learner?'),
        ("run", "--set run: is not of the form section.key=value, e.g. --set run.steps=8"),
        ("run..steps=3", "--set run..steps=3: is not of the form section.key=value, e.g. --set run.steps=8"),
        ("rewards.3.weight=1", "--set rewards.3.weight=1: rewards.3 is no entry of a list of 1; entries count from 0"),
        ("device.kind=cpu", "--set device.kind=cpu: device is 'cpu', which has no keys; set device itself"),
    ],
)
def test_a_broken_override_says_that_it_is_the_override(override: str, expected: str) -> None:
    assert refusal(DEMO, override) == expected


def test_a_broken_override_value_is_one_line() -> None:
    got = refusal(DEMO, "sampling.stop=[a")
    assert got.startswith("--set sampling.stop=[a: value:1: is not valid YAML") and "\n" not in got


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("")
    assert refusal(tmp_path / "t.yaml") == f"{tmp_path}/t.yaml: no such file; {tmp_path} has other.yaml"
    assert refusal(tmp_path).startswith(f"{tmp_path}: is a directory")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refusal(tmp_path / "t.yaml")


def test_contradictions_are_refused_however_a_config_is_made() -> None:
    from launch.config import from_data

    with pytest.raises(ConfigError, match=r"^notebook: device: cuda: no role asks"):
        from_data(
            {
                "device": "cuda",
                "model": {"path": "m"},
                "prompts": {"path": "p", "held_out": 1},
                "rewards": [{"name": "exact"}],
            },
            "notebook",
        )
