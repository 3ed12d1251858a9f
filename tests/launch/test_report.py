"""Proves that the report is one self-contained, well-formed page with every curve, made from the files alone, for a run
that finished, one that is going on, one that died, and one that never began."""

from __future__ import annotations

import json
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from launch import curves, report
from launch.charts import Axis, Series, line_chart
from launch.run_dir import RunDirectory

FINISHED = [
    {"time": 1000.0, "event": "evaluation", "version": 0, "name": "held_out", "score": 0.125},
    {"time": 1030.0, "event": "dropped", "reason": "zero_signal", "ordinals": [3, 4]},
    {"time": 1040.0, "event": "role_died", "role": "rollout-0", "reason": "<signal 9>"},
    {"time": 1060.0, "event": "evaluation", "version": 8, "name": "held_out", "score": 0.875},
    {"time": 1061.0, "event": "run_finished", "outcome": "finished", "issued": 66, "trained": 64, "lost": 0,
     "duplicated": 0, "dropped": {"zero_signal": 2}},
]  # fmt: skip


class Page(HTMLParser):
    """Collects what a page refers to, its text, and tags that were not closed."""

    VOID = ("meta", "link", "img", "br", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for key, value in attrs if key in ("src", "href")]
        assert tag != "script"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_a_finished_run(make_run: Any) -> None:
    run = make_run(steps=8, events=FINISHED)
    assert report.write(run.path) == [run.report_path, run.curves_path]
    text = run.report_path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == [] and page.links == []
    for part in (
        "0.12 → 0.88",
        "8 of 8",
        "finished",
        "zero_signal",
        "66 issued = 64 trained + 2 dropped",
        "<signal 9>",
    ):
        assert part in page.text, part
    for title in ("Reward", "Staleness", "Idle share", "Tokens per second", "Where a step"):
        assert title in page.text
    width, height = png_size(run.curves_path)
    assert width >= 1600 and height >= 700


@pytest.mark.parametrize(
    ("steps", "events", "state"),
    [(0, [], "not finished"), (1, [], "not finished"), (3, [FINISHED[2]], "not finished"),
     (2, [{"time": 1, "event": "run_finished", "outcome": "failed", "reason": "learner-0 died"}], "learner-0 died")],
)  # fmt: skip
def test_runs_that_did_not_finish(make_run: Any, steps: int, events: list[Any], state: str) -> None:
    run = make_run(steps=steps, events=events)
    report.write(run.path)
    assert state in Page(run.report_path.read_text(encoding="utf-8")).text
    assert png_size(run.curves_path)[0] > 0


def test_without_matplotlib_there_is_still_a_page(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves.importlib.util, "find_spec", lambda name: None)
    run = make_run()
    assert report.write(run.path) == [run.report_path]


def test_a_run_that_holds_torn_and_foreign_lines(make_run: Any) -> None:
    run: RunDirectory = make_run(steps=2)
    with run.metrics_path.open("a") as file:
        file.write('{"step": "x"}\n{"step": 3, "reward/me')
    with run.events_path.open("a") as file:
        file.write(json.dumps({"time": 1.0}) + "\n{")
    report.write(run.path)
    assert "2 of 8" in Page(run.report_path.read_text(encoding="utf-8")).text


def test_a_chart_is_well_formed_and_shows_each_point() -> None:
    points = [(0.0, 0.1), (4.0, 0.9)]
    chart = line_chart(
        "A & B", [Series("one <1>", points, "a", dots=True), Series("limit", points, "limit", dashed=True)]
    )
    svg = chart[chart.index("<svg") : chart.index("</svg>") + 6].replace("class=grid", "").replace("class=tick", "")
    root = ElementTree.fromstring(svg.replace("class=line", "").replace("class=value", "").replace("class=touch", ""))
    titles = [node.text for node in root.iter("title")]
    assert titles == ["one <1> at 0: 0.1", "one <1> at 4: 0.9"]
    assert "A &amp; B" in chart and "one &lt;1&gt;" in chart


def test_a_chart_without_points_says_so() -> None:
    assert "no data yet" in line_chart("Reward", [Series("x", [], "a")])


@pytest.mark.parametrize(
    ("low", "high", "most", "expected"),
    [(0, 1, 5, [0, 0.5, 1]), (0, 24, 8, [0, 5, 10, 15, 20]), (0, 0.004, 5, [0, 0.001, 0.002, 0.003, 0.004]),
     (3, 3, 5, [3]), (-1, 1, 5, [-1, -0.5, 0, 0.5, 1])],
)  # fmt: skip
def test_ticks_are_round_and_inside(low: float, high: float, most: int, expected: list[float]) -> None:
    assert Axis(low, high, 0, 100).ticks(most) == pytest.approx(expected)
