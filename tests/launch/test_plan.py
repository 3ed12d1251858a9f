"""Proves that a plan says on one page, and in JSON, what a run will be, and looks ahead at what would stop it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from launch.inventory import Host, Inventory
from launch.plan import adapter_parameters, make_plan, parameters_of

TWO_CORES = Inventory((Host("box", (0, 1), 0, 16.0),))


def write_weights(path: Path, **shapes: list[int]) -> None:
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def test_parameters_come_from_the_headers_of_all_files(tmp_path: Path) -> None:
    assert parameters_of(tmp_path) is None
    write_weights(tmp_path / "a.safetensors", embed=[10, 4], norm=[4])
    write_weights(tmp_path / "b.safetensors", head=[10, 4])
    assert parameters_of(tmp_path) == 84
    (tmp_path / "c.safetensors").write_bytes(b"\x05")
    assert parameters_of(tmp_path) is None  # damaged: nothing is better than something wrong


def test_what_an_adapter_weighs(tmp_path: Path) -> None:
    shapes = {"embed_tokens.weight": [10, 4], "norm.weight": [4], "lm_head.weight": [10, 4]}
    layers = {"0.q_proj.weight": [4, 4], "0.down_proj.weight": [4, 16]}
    write_weights(tmp_path / "a.safetensors", **shapes, **layers)
    assert adapter_parameters(tmp_path, 2, ()) == 2 * (8 + 20)
    assert adapter_parameters(tmp_path, 2, ("q_proj",)) == 16
    assert adapter_parameters(tmp_path / "nowhere", 2, ()) is None


def test_the_page_says_what_travels(make_config: Any, tmp_path: Path) -> None:
    write_weights(tmp_path / "model.safetensors", **{"0.q_proj.weight": [4096, 4096]})
    over = {"model": {"path": str(tmp_path)}, "topology": {"learner": {"lora_rank": 64}}}
    assert "adapters by gloo, 1.0 MB each step" in make_plan(make_config(over), TWO_CORES).text()
    over["topology"] = {}
    assert "whole models by gloo, 33.6 MB each step" in make_plan(make_config(over), TWO_CORES).text()


def test_the_page_and_the_json_agree(make_config: Any) -> None:
    plan = make_plan(make_config({"run": {"name": "demo", "steps": 3}, "evaluate": {"every": 2}}), TWO_CORES)
    data = json.loads(plan.json())
    assert [p["name"] for p in data["placements"]] == ["learner-0", "rollout-0", "reward-0", "queue"]
    assert data["derived"]["slots"] == 24 and data["derived"]["evaluated_versions"] == [0, 2, 3]
    text = plan.text()
    for part in ("Run demo: 3 steps", "learner-0  box   1", "shared with rollout-0", "= 24 groups", "0, 2, 3"):
        assert part in text


def test_what_would_stop_the_run_later_is_said_now(make_config: Any, tmp_path: Path) -> None:
    config = make_config({"model": {"path": str(tmp_path / "none")}, "prompts": {"path": str(tmp_path / "p.jsonl")}})
    warnings = "\n".join(make_plan(config, TWO_CORES).warnings)
    assert "is not a directory" in warnings and "p.jsonl is not there" in warnings


def test_memory_is_a_warning_when_it_cannot_suffice(make_config: Any, tmp_path: Path) -> None:
    write_weights(tmp_path / "model.safetensors", w=[1_000_000, 1_000])
    plan = make_plan(make_config({"model": {"path": str(tmp_path)}}), TWO_CORES)
    assert plan.parameters == 10**9 and (plan.memory_gb() or 0) > 20
    assert any(w.startswith("memory: about") for w in plan.warnings)


def test_the_journal_s_room_on_disk(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 slots and 8 steps of 8 groups until a checkpoint; retained steps on top, never more than the whole run."""
    shape = {"run": {"steps": 100}, "sampling": {"group_size": 4, "max_tokens": 100}}

    def journal_bytes(retain: object) -> int:
        made: int = make_config({**shape, "topology": {"queue": {"retain": retain}}}).journal_bytes
        return made

    group = 4 * 100 * 9
    assert [journal_bytes(r) // group for r in (0, 10, 1000, "all")] == [88, 168, 824, 824]
    monkeypatch.setattr("launch.plan.free_bytes", lambda _: 1_000_000)
    plan = make_plan(make_config({**shape, "topology": {"queue": {"retain": "all"}}}), TWO_CORES)
    assert any(w.startswith("disk: the journal may take 3.0 MB and 1.0 MB are free") for w in plan.warnings)
    assert "journal         up to 3.0 MB on disk; keeps all committed steps" in plan.text()
    assert json.loads(plan.json())["derived"]["journal_gb"] == 0.003
