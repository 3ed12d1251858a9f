"""Proves that what this machine offers is read from the kernel, and that a written inventory is checked row by row."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launch import inventory
from launch.inventory import Host, read_inventory, this_host
from rollout.errors import ConfigError


def test_this_host_offers_only_what_this_process_may_use() -> None:
    host = this_host()
    assert set(host.cores) <= os.sched_getaffinity(0) and host.cores
    assert host.memory_gb > 0.5


def test_one_of_each_physical_core_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for core, siblings in {0: "0-1", 1: "0-1", 2: "2,3", 3: "2,3"}.items():
        folder = tmp_path / f"cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings)
    monkeypatch.setattr(inventory, "CPUS", tmp_path)
    monkeypatch.setattr(inventory, "_cgroup_quota", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert inventory.usable_cores() == (0, 2, 1, 3)
    monkeypatch.setattr(inventory, "_cgroup_quota", lambda: 2.5)
    assert inventory.usable_cores() == (0, 2)


@pytest.mark.parametrize(("visible", "expected"), [(None, 3), ("", 0), ("0,2", 2), ("-1", 0), ("0,1,2,3,4", 3)])
def test_gpus_are_those_that_are_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: int
) -> None:
    for n in range(3):
        (tmp_path / f"0000:{n}").mkdir()
    monkeypatch.setattr(inventory, "NVIDIA", tmp_path)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert inventory.visible_gpus() == expected


def test_a_written_inventory(tmp_path: Path) -> None:
    file = tmp_path / "hosts.yaml"
    file.write_text("- {name: a, cores: 2, gpus: 1, memory_gb: 8}\n- {name: b, cores: [4, 6]}\n")
    assert read_inventory(file).hosts == (Host("a", (0, 1), 1, 8.0), Host("b", (4, 6)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: 1",
        "- {name: a}",
        "- {name: a, cores: 0}",
        "- {name: a, cores: []}",
        "- {name: a, cores: 2, gpu: 1}",
        "- [",
        "- {name: a, cores: true}",
    ],
)
def test_a_broken_inventory_is_refused_on_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "hosts.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"hosts\.yaml") as caught:
        read_inventory(file)
    assert "\n" not in str(caught.value)
