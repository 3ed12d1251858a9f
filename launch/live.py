"""What the user sees while a run goes on. Fed by the driver; reads nothing by itself.

    view = LiveView(config, run_dir)
    with view:
        view.setup("starting vLLM on core 0 (about 40 s)")
        view.step(row); view.event(event); view.evaluation(0, "held_out", 0.12); view.gauges(gauges)
    view.finish({"outcome": "finished", "lost": 0, "duplicated": 0, ...})

On a terminal: a panel that stays in place, redrawn four times a second by rich. Elsewhere: one plain line per thing
worth a line, so that a log file of a run can be read and grepped.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launch.config import RunConfig
from launch.outcome import final_rows, next_steps
from launch.progress import TROUBLE, Progress, decimals, described, duration, per_second, percent, spark

WORTH_A_LINE = {
    *TROUBLE,
    *("role_died", "role_restarting", "role_restarted", "role_given_up"),
    *("learner_restarted", "queue_recovered", "journal_resumed"),
}


class LiveView:
    """All methods are quick; none raises because of what it is shown.

    rich draws on a thread of its own: `_lock` keeps it from reading a half-made state, and is never held while rich
    is called (rich holds its own lock while it calls `__rich__`).
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.run_dir = config, run_dir
        self.console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.progress = Progress(config.run.steps)
        self._clock, self._started = clock, clock()
        self._gauges: Mapping[str, Any] = {}
        self._doing = "setting up"
        self._live: Live | None = None
        self._counts: Counter[tuple[Any, ...]] = Counter()
        self._lock = threading.Lock()

    # ---- fed by the driver

    def setup(self, text: str) -> None:
        """One stage of the start-up is beginning."""
        self._doing = text
        self._say(f"[{duration(self._clock() - self._started)}] {text}")

    def resume(self, rows: list[dict[str, Any]]) -> None:
        """What the run did before it was resumed."""
        with self._lock:
            for row in rows:
                self.progress.step(row)

    def step(self, row: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl."""
        with self._lock:
            self.progress.step(row)
            self._doing = ""
        if self._live is None:
            self._say(self.step_line())
        self._redraw()

    def event(self, event: Mapping[str, Any]) -> None:
        """A line of events.jsonl."""
        with self._lock:
            self.progress.event(event)
        kind = event.get("event")
        if kind == "evaluation":
            self._say(
                f"  {event.get('name')} score {decimals(event.get('score'), 3)} at version {event.get('version')}"
            )
        elif kind == "checkpoint":
            self._say(f"  checkpoint of version {event.get('version')}")
        elif kind in WORTH_A_LINE and (times := self._seen(event)):
            self._say(f"! {described(event)}" + (f" ({times} times so far)" if times > 1 else ""))
        self._redraw()

    def evaluation(self, step: int, name: str, score: float) -> None:
        """Held-out prompts were answered by weight version `step`."""
        with self._lock:
            self.progress.evaluation(step, name, score)
        self._say(f"  {name} score {score:.3f} at version {step}")
        self._redraw()

    def gauges(self, gauges: Mapping[str, Any]) -> None:
        """What gauges.json says now, for the time between two steps."""
        self._gauges = gauges
        self._redraw()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The final table and the next three things to try."""
        self.close()
        rows = final_rows(self.config, self.progress, summary, self._clock() - self._started)
        title = f"Run {self.config.run.name}: {summary.get('outcome', 'finished')}"
        if self.console.is_terminal:
            table = Table("what", "result", title=title, title_justify="left")
            for what, result in rows:
                table.add_row(what, result)
            self.console.print()
            self.console.print(table)
        else:
            self._say("\n".join([f"\n{title}", *(f"  {what:<22}{result}" for what, result in rows)]))
        self._say("\nNext:")
        for n, (command, why) in enumerate(next_steps(self.config, self.run_dir, summary), 1):
            self._say(f"  {n}. {command}\n     {why}")

    # ---- its life

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(
                self, console=self.console, refresh_per_second=4, redirect_stdout=True, redirect_stderr=True
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the last picture standing and give the terminal back. Idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    # ---- what it looks like

    def step_line(self) -> str:
        """The last step as one plain line."""
        p = self.progress
        scores = [points[-1][1] for points in p.held_out.values() if points]
        return (
            f"step {p.version}/{p.steps}  reward {decimals(p.latest('reward/mean'), 3)}"
            + (f"  held-out {scores[0]:.3f}" if scores else "")
            + f"  staleness {decimals(p.latest('staleness/mean'), 1)} (max {decimals(p.latest('staleness/max'), 0)})"
            f"  rollout {per_second(p.recent('throughput/rollout_tokens_per_s'))}"
            f"  learner {per_second(p.recent('throughput/learner_tokens_per_s'))}"
            f"  idle: rollout {percent(p.recent('idle/rollout'))}, learner {percent(p.recent('idle/learner'))}"
            f"  left {duration(p.left_s())}"
        )

    def __rich__(self) -> RenderableType:
        """Called by rich whenever it likes to draw."""
        with self._lock:
            return self._panel()

    def _panel(self) -> RenderableType:
        p, grid = self.progress, Table.grid(padding=(0, 2), expand=False)
        for _ in range(3):
            grid.add_column(no_wrap=True)
        rewards = [value for _, value in p.series("reward/mean")]
        grid.add_row(Text("reward", "dim"), decimals(p.latest("reward/mean"), 3), Text(spark(rewards, 40), "cyan"))
        for name, points in p.held_out.items():
            path = " → ".join(f"{score:.2f}" for _, score in points[-6:])
            grid.add_row(Text(name.replace("_", "-"), "dim"), Text(decimals(points[-1][1], 3), "bold green"), path)
        bound = self.config.staleness.bound
        stale = f"max {decimals(p.latest('staleness/max'), 0)} of at most {bound}"
        grid.add_row(Text("staleness", "dim"), decimals(p.latest("staleness/mean"), 1), stale)
        for role in ("rollout", "learner"):
            idle = p.recent(f"idle/{role}")
            speed = per_second(p.recent(f"throughput/{role}_tokens_per_s"))
            grid.add_row(Text(role, "dim"), speed, _busy_bar(idle))
        losses = ", ".join(f"{reason} {n}" for reason, n in p.dropped.most_common(4)) or "none"
        grid.add_row(Text("dropped", "dim"), str(sum(p.dropped.values())), losses)
        parts: list[RenderableType] = [self._head(), grid]
        doing = self._doing or self._phase()
        if doing:
            parts.append(Text(doing, "yellow"))
        parts.extend(Text(line, "yellow") for line in self._absent())
        parts.extend(Text(f"! {alarm}", "bold red") for alarm in p.alarms[-2:])
        return Panel(Group(*parts), title=f"[bold]{self.config.run.name}[/]", title_align="left", expand=False)

    def _head(self) -> RenderableType:
        p = self.progress
        head = Table.grid(padding=(0, 2))
        times = f"{duration(self._clock() - self._started)} elapsed, {duration(p.left_s())} left"
        bar = ProgressBar(total=p.steps, completed=p.version, width=36)
        head.add_row(Text(f"step {p.version}/{p.steps}", "bold"), bar, Text(times, "dim"))
        return head

    def _phase(self) -> str:
        learners = [v for k, v in dict(self._gauges.get("roles", {})).items() if str(k).startswith("learner")]
        phase = learners[0].get("phase") if learners and isinstance(learners[0], Mapping) else None
        return f"learner: {phase}" if phase else ""

    def _absent(self) -> list[str]:
        """Engines that do not serve now: 'rollout-1 starting: ActorDiedError: killed'."""
        roles = dict(self._gauges.get("roles", {})).items()
        absent = [(name, g) for name, g in roles if isinstance(g, Mapping) and "absent" in g]
        return [f"{name} {g['absent']}: {g.get('reason')}" for name, g in absent]

    def _seen(self, event: Mapping[str, Any]) -> int:
        """How often this kind of trouble was seen, when that is worth a line (1, 10, 100, ...), else 0."""
        if event["event"] not in TROUBLE:
            return 1
        kind = (event["event"], event.get("what"), event.get("engine"))
        self._counts[kind] += 1
        times = self._counts[kind]
        return times if times == 10 ** (len(str(times)) - 1) else 0

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _redraw(self) -> None:
        if self._live is not None:
            self._live.refresh()


def _busy_bar(idle: float | None, width: int = 20) -> Text:
    """Busy in green, idle in grey: '████████████████░░░░  idle 20 %'."""
    if idle is None:
        return Text("")
    busy = round(width * (1 - min(1.0, max(0.0, idle))))
    return Text.assemble(("█" * busy, "green"), ("░" * (width - busy), "dim"), f"  idle {percent(idle)}")
