"""Proves that the append-only logs hold whole lines whoever writes and whoever is killed: torn lines are skipped, the
next writer starts afresh, several processes share a file, and a rewound log forgets exactly the later steps."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import numpy as np

from rollout.event_log import EventLog, JsonLines, MetricsLog, read_lines, replace_file


def test_what_is_appended_is_read_back_in_order(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "deep/log.jsonl")
    rows = [{"a": n, "text": "ü\n"} for n in range(3)]
    for row in rows:
        log.append(row)
    log.close()
    assert list(read_lines(log.path)) == rows
    assert log.path.read_text(encoding="utf-8").count("\n") == 3


def test_a_torn_line_is_skipped_wherever_the_kill_fell_and_the_next_writer_starts_afresh(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    whole = b'{"n":1}\n{"n":2}\n'
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        survivors = whole[:cut].count(b"}")
        assert len(list(read_lines(path))) == survivors
        log = JsonLines(path)
        log.append({"n": 9})
        log.close()
        assert [row["n"] for row in read_lines(path)] == [*range(1, survivors + 1), 9], cut


def test_lines_that_are_no_objects_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'[1]\n\xff\xfe\n\n{"n":1}\n"x"\n')
    assert list(read_lines(path)) == [{"n": 1}]
    assert list(read_lines(tmp_path / "none.jsonl")) == []


def test_what_json_cannot_say_becomes_null_and_numpy_becomes_numbers(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "log.jsonl")
    log.append({"nan": float("nan"), "inf": -np.inf, "f": np.float32(0.5), "a": np.arange(3), "p": Path("x"), 3: {4}})
    log.close()
    assert list(read_lines(log.path)) == [{"nan": None, "inf": None, "f": 0.5, "a": [0, 1, 2], "p": "x", "3": [4]}]


def test_an_event_begins_with_its_time_and_name(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.jsonl", clock=lambda: 12.34567)
    said = events.append("role_died", role="rollout-0", reason="signal 9")
    events.close()
    assert said == {"time": 12.346, "event": "role_died", "role": "rollout-0", "reason": "signal 9"}
    assert events.path.read_text() == json.dumps(said, separators=(",", ":")) + "\n"


def test_a_rewound_log_forgets_the_later_steps_and_goes_on(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(5):
        log.append({"step": step})
    assert log.rewind(3) == 2
    assert log.rewind(3) == 0
    log.append({"step": 3, "again": True})
    log.close()
    assert list(read_lines(log.path)) == [{"step": 0}, {"step": 1}, {"step": 2}, {"step": 3, "again": True}]


def _write_many(path: Path, writer: int) -> None:
    log = JsonLines(path)
    for n in range(200):
        log.append({"writer": writer, "n": n, "padding": "x" * 500})
    log.close()


def test_several_processes_write_one_file_without_tearing_each_other(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_write_many, args=(path, n)) for n in range(3)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(60)
        assert process.exitcode == 0
    assert path.read_bytes().count(b"\n") == 600
    seen = [(row["writer"], row["n"]) for row in read_lines(path)]
    assert sorted(seen) == [(w, n) for w in range(3) for n in range(200)]


def test_a_replaced_file_is_old_or_new_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "gauges.json"
    replace_file(path, "old")
    replace_file(path, "new")
    assert path.read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["gauges.json"]
