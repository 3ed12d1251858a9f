"""Proves that input which cannot work is refused in one line with the remedy and exit code 2, before anything starts.

Through the `headrace` command, with a real model directory and real files: what a user would see.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from actors.prompts_data import write
from launch.cli import main
from launch.config import load
from launch.preflight import preflight

ROOT = Path(__file__).parents[2]
TINY = ROOT / "launch" / "topologies" / "tiny_cpu.yaml"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "letters.jsonl"
    write("letters", path)
    return path


def refusal(capsys: pytest.CaptureFixture[str], tmp_path: Path, *settings: str) -> str:
    """What `headrace run` says on stderr; it must be one line, exit 2, and leave no run behind."""
    capsys.readouterr()
    run_dir = tmp_path / "run"
    sets = [word for setting in settings for word in ("--set", setting)]
    assert main(["run", str(TINY), *sets, "--run-dir", str(run_dir)]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("headrace: ") and "\n" not in said
    assert not (run_dir / "journal").exists()
    return said


def test_an_unknown_key_names_the_nearest(capsys, tmp_path, tiny_llama, prompts) -> None:
    said = refusal(capsys, tmp_path, f"model.path={tiny_llama}", f"prompts.path={prompts}", "staleness.bounds=3")
    assert "staleness.bounds" in said and "bound" in said


def test_a_journal_that_does_not_fit_is_refused_only_if_it_shall_be_kept(
    capsys, tmp_path, tiny_llama, prompts, monkeypatch
) -> None:
    monkeypatch.setattr("launch.preflight.free_bytes", lambda _: 1000)
    paths = f"model.path={tiny_llama}", f"prompts.path={prompts}"
    said = refusal(capsys, tmp_path, *paths, "topology.queue.retain=all")
    assert "topology.queue.retain: all" in said and "lower it, or set run.dir" in said
    said = refusal(capsys, tmp_path, *paths, "topology.queue.retain=5", "topology.queue.durability=memory")
    assert "memory keeps nothing" in said
    preflight(load(TINY, paths))


def test_a_missing_model(capsys, tmp_path, prompts) -> None:
    said = refusal(capsys, tmp_path, f"model.path={tmp_path / 'nowhere'}", f"prompts.path={prompts}")
    assert "nowhere" in said and "model.path" in said


def test_an_unreadable_prompt_file_names_the_line(capsys, tmp_path, tiny_llama) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "aa", "answer": "a"}\n{"prompt": "ab", "ans\n')
    said = refusal(capsys, tmp_path, f"model.path={tiny_llama}", f"prompts.path={broken}")
    assert "broken.jsonl" in said and "2" in said


def test_a_missing_prompt_file(capsys, tmp_path, tiny_llama) -> None:
    said = refusal(capsys, tmp_path, f"model.path={tiny_llama}", f"prompts.path={tmp_path / 'gone.jsonl'}")
    assert "gone.jsonl" in said


def test_an_empty_prompt_file(capsys, tmp_path, tiny_llama) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    said = refusal(capsys, tmp_path, f"model.path={tiny_llama}", f"prompts.path={empty}")
    assert "empty.jsonl" in said


def test_a_prompt_longer_than_the_context_names_its_row(capsys, tmp_path, tiny_llama) -> None:
    long = tmp_path / "long.jsonl"
    rows = [{"prompt": "ab", "answer": "b"}] * 3 + [{"prompt": "x" * 700, "answer": "x"}]
    long.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = refusal(capsys, tmp_path, f"model.path={tiny_llama}", f"prompts.path={long}", "prompts.held_out=1")
    assert "long.jsonl line 4" in said and "701 tokens" in said  # 700 bytes and the start token


def test_a_reward_that_cannot_be_imported(capsys, tmp_path, tiny_llama, prompts) -> None:
    reward = "rewards=[{kind: function, path: 'nowhere.at_all:f'}]"
    said = refusal(capsys, tmp_path, f"model.path={tiny_llama}", f"prompts.path={prompts}", reward)
    assert "nowhere.at_all" in said


def test_a_port_in_use(capsys, tmp_path, tiny_llama, prompts) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refusal(
            capsys, tmp_path, f"model.path={tiny_llama}", f"prompts.path={prompts}", f"observe.prometheus_port={port}"
        )
    assert str(port) in said and "prometheus_port" in said


def test_an_answer_budget_that_leaves_no_room(capsys, tmp_path, tiny_llama, prompts) -> None:
    said = refusal(capsys, tmp_path, f"model.path={tiny_llama}", f"prompts.path={prompts}", "sampling.max_tokens=128")
    assert "max_tokens" in said


def test_an_algorithm_that_contradicts_itself(capsys, tmp_path, tiny_llama, prompts) -> None:
    overrides = ("algorithm.preset=gspo", "algorithm.overrides={correction: tis}")
    said = refusal(capsys, tmp_path, f"model.path={tiny_llama}", f"prompts.path={prompts}", *overrides)
    assert "gspo" in said
