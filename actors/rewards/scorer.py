"""score(prompt, answers) -> one verdict per answer, whatever the rewards do.

            one answer
                |-- component "exact"   --> a worker process  --> 1.0          x weight  \\
                |-- component "brevity" --> a worker process  --> Failed(nan)  x weight   >-- verdict
                '-- component "overlong"    (from its length)     -0.25        x weight  /

Scored(value = weighted sum, components = the raw numbers) when every component with a weight has a value; else the
first failure, so that an error is never a zero. A component of weight 0 is only watched: its failures cost nothing.
Answers are scored side by side on `processes` workers per component; a failure concerns its own answer alone.
Blocking, thread-safe.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from actors.config import RewardConfig
from actors.rewards.breaker import Breaker, ErrorBudget
from actors.rewards.components import needed_column
from actors.rewards.process import Outcome, RewardProcess, WorkerSpec
from actors.rewards.shaping import shape
from rollout.errors import ConfigError
from rollout.types import Failed, Prompt, Scored, TimedOut, Verdict

# emit(event, **fields): reward_failed(component, kind, detail) the first time of each kind, reward_errors(component,
# share, of, last), reward_circuit_open(component, failures, last), reward_circuit_closed(component)
Emit = Callable[..., object]
SHAPING = ("length", "overlong")


def build(
    rewards: Sequence[RewardConfig], emit: Emit | None = None, *, processes: int = 1, log_dir: Path | None = None
) -> Scorer:
    """A running Scorer. Raises ConfigError when a component cannot be loaded; nothing is left running then."""
    _refuse_duplicates(rewards)
    scorer = Scorer(rewards, _nobody if emit is None else emit, processes, log_dir)
    try:
        scorer.start()
    except BaseException:
        scorer.close()
        raise
    return scorer


def check(rewards: Sequence[RewardConfig], prompts: Sequence[Prompt] = ()) -> None:
    """Load every component in a process of its own and see that `prompts` carry what it needs. Raises ConfigError."""
    for reward in rewards:
        column = needed_column(reward.kind, reward.name, reward.args)
        for prompt in prompts:
            if column is not None and prompt.meta.get(column) is None:
                has = ", ".join(map(str, prompt.meta)) or "none"
                raise ConfigError(
                    f"verifier {reward.name} needs the column {column!r}, which the prompt {prompt.text[:60]!r} lacks "
                    f"(it has {has}); map yours with prompts.columns, or name it with rewards args: {{reference: ...}}"
                )
    build(rewards).close()


class Scorer:
    """Made by build(). Owns the worker processes until close()."""

    def __init__(self, rewards: Sequence[RewardConfig], emit: Emit, processes: int, log_dir: Path | None) -> None:
        self.rewards = tuple(rewards)
        self._logs = _Logs(log_dir)
        computed = (r for r in rewards if r.kind not in SHAPING)
        self._components = [_Component(r, emit, processes, self._logs.open(r.component)) for r in computed]
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Load every component once; the other processes of a component start when they are first needed."""
        for loading in [component.start() for component in self._components]:
            loading.result()

    def score(self, prompt: Prompt, texts: Sequence[str], trajectories: Sequence[Sized] | None = None) -> list[Verdict]:
        """One verdict per text. `trajectories` (their lengths) feed length and overlong; without them, no shaping."""
        if trajectories is not None and len(trajectories) != len(texts):
            raise ValueError(f"{len(trajectories)} trajectories for {len(texts)} texts")
        asked = [self._ask(prompt, text) for text in texts]
        lengths = [None] * len(texts) if trajectories is None else [len(t) for t in trajectories]
        return [self._verdict(futures, tokens) for futures, tokens in zip(asked, lengths, strict=True)]

    def judge(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        """One verdict per (prompt, text): held-out answers, side by side and without shaping."""
        asked = [self._ask(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        return [self._verdict(futures, None) for futures in asked]

    def _ask(self, prompt: Prompt, text: str) -> dict[str, Future[Outcome]]:
        return {component.name: component.ask(prompt, text) for component in self._components}

    def _verdict(self, futures: Mapping[str, Future[Outcome]], tokens: int | None) -> Verdict:
        outcomes: dict[str, Outcome] = {name: future.result() for name, future in futures.items()}
        if tokens is not None:
            outcomes |= {r.component: shape(r, tokens) for r in self.rewards if r.kind in SHAPING}
        verdict = self._compose(outcomes)
        with self._lock:
            self._counts[_kind(verdict)] += 1
        return verdict

    def _compose(self, outcomes: Mapping[str, Outcome]) -> Verdict:
        value, components = 0.0, {}
        for reward in self.rewards:
            outcome = outcomes.get(reward.component)
            if isinstance(outcome, float):
                components[reward.component] = outcome
                value += reward.weight * outcome
            elif outcome is not None and reward.weight != 0:
                return outcome
        return Scored(value, components)

    def gauges(self) -> dict[str, float]:
        """Verdicts so far by kind ("verdicts/scored", "verdicts/timed_out", "verdicts/raised") and process starts."""
        with self._lock:
            out = {f"verdicts/{kind}": float(n) for kind, n in self._counts.items()}
        for component in self._components:
            out[f"process_starts/{component.name}"] = float(component.process_starts)
            out[f"circuit_open/{component.name}"] = float(component.breaker.is_open)
        return out

    def close(self) -> None:
        """Kill every worker process. Idempotent; answers still being scored come back as failures."""
        for component in self._components:
            component.close()
        self._logs.close()


class _Component:
    """One component: a few processes, as many threads that ask them, and a breaker."""

    def __init__(self, config: RewardConfig, emit: Emit, processes: int, log: int) -> None:
        self.config, self.name, self._emit = config, config.component, emit
        self.breaker, self.budget = Breaker(config.breaker), ErrorBudget()
        self._lock = threading.Lock()
        self._closed = False
        self._kinds_seen: set[str] = set()
        self._processes = [RewardProcess(WorkerSpec.of(config), log) for _ in range(processes)]
        self._idle = deque(self._processes)  # one per thread; the last one back is the next one out: it is warm
        self._pool = ThreadPoolExecutor(processes, thread_name_prefix=f"reward-{self.name}")

    @property
    def process_starts(self) -> int:
        return sum(process.starts for process in self._processes)

    def start(self) -> Future[None]:
        return self._pool.submit(self._start)

    def ask(self, prompt: Prompt, answer: str) -> Future[Outcome]:
        return self._pool.submit(self._ask, prompt, answer)

    def _start(self) -> None:
        refused = self._processes[-1].start()
        if refused is not None:
            what = self.config.path if self.config.kind == "function" else self.config.name
            raise ConfigError(f"reward {what!r} cannot be loaded: {refused.detail}")

    def _ask(self, prompt: Prompt, answer: str) -> Outcome:
        if self._closed:
            return Failed("closed", f"{self.name}: the run is ending")
        with self._lock:
            if not self.breaker.admit(time.monotonic()):
                return Failed("circuit_open", f"{self.name}: failed {self.breaker.failures} times in a row")
        process = self._idle.pop()
        try:
            outcome = process.ask(prompt.text, answer, prompt.meta)
        finally:
            self._idle.append(process)
        if isinstance(outcome, Failed):
            outcome = Failed(outcome.kind, f"{self.name}: {outcome.detail}")
        self._record(outcome)
        return outcome

    def _record(self, outcome: Outcome) -> None:
        ok = isinstance(outcome, float)
        with self._lock:
            turned = self.breaker.record(ok, time.monotonic())
            spent = self.budget.record(ok)
            failures, share = self.breaker.failures, round(self.budget.failed_share, 3)
            kind = "scored" if isinstance(outcome, float) else _kind(outcome)
            new = not ok and kind not in self._kinds_seen
            self._kinds_seen.add(kind)
        if new:  # the rest of its kind is counted in gauges()
            self._emit("reward_failed", component=self.name, kind=kind, detail=_said(outcome))
        if turned == "opened":
            self._emit("reward_circuit_open", component=self.name, failures=failures, last=_said(outcome))
        elif turned == "closed":
            self._emit("reward_circuit_closed", component=self.name)
        if spent:
            self._emit("reward_errors", component=self.name, share=share, of=self.budget.window, last=_said(outcome))

    def close(self) -> None:
        self._closed = True
        for process in self._processes:
            process.interrupt()
        self._pool.shutdown(wait=True)
        for process in self._processes:
            process.close()


class _Logs:
    """Where rewards' prints go: a file per component, or nowhere. File descriptors, as processes take them."""

    def __init__(self, log_dir: Path | None) -> None:
        self.log_dir = log_dir
        self._fds: list[int] = []

    def open(self, component: str) -> int:
        if self.log_dir is None:
            return subprocess.DEVNULL
        self.log_dir.mkdir(parents=True, exist_ok=True)
        path = self.log_dir / f"reward-{component}.log"
        self._fds.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644))
        return self._fds[-1]

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def _refuse_duplicates(rewards: Sequence[RewardConfig]) -> None:
    twice = [name for name, n in Counter(r.component for r in rewards).items() if n > 1]
    if twice:
        raise ConfigError(f"rewards: two components are called {twice[0]!r}; give one a label")


def _kind(verdict: Verdict) -> str:
    return verdict.kind if isinstance(verdict, Failed) else "timed_out" if isinstance(verdict, TimedOut) else "scored"


def _said(outcome: Outcome) -> str:
    if isinstance(outcome, TimedOut):
        return f"no answer within {outcome.deadline_s} s"
    return f"{outcome.kind}: {outcome.detail}" if isinstance(outcome, Failed) else str(outcome)


def _nobody(event: str, **fields: object) -> None:
    """Events go nowhere."""
