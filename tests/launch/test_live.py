"""Proves that a run can be followed on a terminal and in a log file, that both say the same, and that how it ended
decides what is proposed next."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launch.live import LiveView


def view(config: Any, terminal: bool) -> tuple[LiveView, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=110, color_system=None)
    return LiveView(config, Path("runs/demo-001"), console=console, clock=lambda: 0.0), out


def feed(live: LiveView, steps: int = 3) -> None:
    live.setup("starting the queue")
    live.event({"event": "evaluation", "version": 0, "name": "held_out", "score": 0.125})
    for version in range(1, steps + 1):
        live.step(
            {
                "step": version,
                "version": version,
                "time_s": 10.0 * version,
                "reward/mean": 0.2 * version,
                "staleness/mean": 1.0,
                "staleness/max": 2.0,
                "throughput/rollout_tokens_per_s": 300.0,
                "throughput/learner_tokens_per_s": 100.0,
                "idle/learner": 0.05,
                "idle/rollout": 0.4,
            }
        )
    live.event({"event": "dropped", "reason": "zero_signal", "ordinals": [7]})
    live.event({"event": "role_died", "role": "rollout-0", "reason": "signal 9"})


def test_without_a_terminal_each_thing_is_one_plain_line(make_config: Any) -> None:
    live, out = view(make_config({"run": {"steps": 8}}), terminal=False)
    with live:
        feed(live)
    lines = out.getvalue().splitlines()
    assert lines == [
        "[0:00] starting the queue",
        "  held_out score 0.125 at version 0",
        *(
            f"step {v}/8  reward {0.2 * v:.3f}  held-out 0.125  staleness 1.0 (max 2)  rollout 300 tokens/s  "
            f"learner 100 tokens/s  idle: rollout 40 %, learner 5 %  left {left}"
            for v, left in ((1, "?"), (2, "1:00"), (3, "0:50"))
        ),
        "! role_died role=rollout-0 reason=signal 9",
    ]
    assert "\x1b" not in out.getvalue()


def test_a_trouble_that_repeats_is_not_said_every_time(make_config: Any) -> None:
    live, out = view(make_config(), terminal=False)
    for n in range(100):
        live.event({"event": "alarm", "what": "no_signal", "detail": f"step {n}"})
        live.event({"event": "alarm", "what": "canary", "detail": "0.3"} if n == 50 else {"event": "dropped"})
    assert out.getvalue().splitlines() == [
        "! alarm what=no_signal detail=step 0",
        "! alarm what=no_signal detail=step 9 (10 times so far)",
        "! alarm what=canary detail=0.3",
        "! alarm what=no_signal detail=step 99 (100 times so far)",
    ]


def test_on_a_terminal_the_panel_says_the_same(make_config: Any) -> None:
    live, out = view(make_config({"run": {"steps": 8}}), terminal=True)
    with live:
        feed(live)
        live.gauges({"roles": {"learner-0": {"phase": "take"}}})
    shown = out.getvalue()
    for part in ("step 3/8", "0.600", "0.125", "max 2 of at most 2", "idle 40 %", "zero_signal 1", "learner: take"):
        assert part in shown
    assert "! role_died role=rollout-0" in shown


def test_an_empty_run_can_be_drawn(make_config: Any) -> None:
    live, out = view(make_config(), terminal=True)
    with live:
        pass
    live.finish({"outcome": "failed", "reason": "rollout-0 died"})
    assert "rollout-0 died" in out.getvalue()


def test_the_panel_may_be_drawn_while_the_driver_feeds_it(make_config: Any) -> None:
    live, _ = view(make_config({"run": {"steps": 500}}), terminal=False)
    failures: list[BaseException] = []

    def draw() -> None:
        try:
            for _ in range(40):
                live.console.render_lines(live)  # type: ignore[arg-type]
        except BaseException as error:
            failures.append(error)
            raise

    drawing = threading.Thread(target=draw)
    drawing.start()
    for n in range(300):
        live.progress.held_out  # noqa: B018
        live.evaluation(n, f"set-{n % 40}", 0.5)
        live.event({"event": "dropped", "reason": f"reason-{n % 40}", "ordinals": [n]})
    drawing.join(60)
    assert not failures and not drawing.is_alive()


@pytest.mark.parametrize(
    ("over", "summary", "expected"),
    [
        ({}, {"outcome": "finished"}, ["report.html", "vllm serve", "staleness.bound=0"]),
        ({"staleness": {"bound": 0}}, {"outcome": "finished"}, ["report.html", "vllm serve", "staleness.bound=2"]),
        ({}, {"outcome": "stopped", "reason": "Ctrl-C"}, ["--resume", "headrace why", "headrace report"]),
        ({}, {"outcome": "failed", "reason": "x"}, ["--resume", "headrace why", "headrace report"]),
    ],
)
def test_three_things_to_try_next(make_config: Any, over: Any, summary: dict[str, Any], expected: list[str]) -> None:
    live, out = view(make_config(over), terminal=False)
    feed(live)
    live.finish(summary)
    tail = out.getvalue().partition("Next:")[2]
    for n, part in enumerate(expected, 1):
        line = next(line for line in tail.splitlines() if line.startswith(f"  {n}. "))
        assert part in line
    assert "  4." not in tail


def test_the_final_table_balances_the_books(make_config: Any) -> None:
    live, out = view(make_config({"run": {"steps": 3}}), terminal=False)
    feed(live)
    live.finish(
        {
            "outcome": "finished",
            "issued": 27,
            "trained": 24,
            "dropped": {"zero_signal": 1, "run_ended": 2},
            "lost": 0,
            "duplicated": 0,
            "seconds": 61,
        }
    )
    shown = out.getvalue()
    for part in (
        "27 issued = 24 trained + 3 dropped (run_ended 2, zero_signal 1)",
        "0 lost, 0 trained twice",
        "0.125 (greedy)",
        "0.200 → 0.600",
        "3 of 3 in 1:01 (10.0 s each)",
        "mean 1.00, max 2 (bound 2)",
        "rollout-0 1",
    ):
        assert part in shown
