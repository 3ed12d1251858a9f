"""What every process of a run has in common: what it is told, where it computes, where its output goes.

task = Task(run_dir="runs/sort3-001", seed=0, model=..., prompts=..., sampling=..., context=256, queue="ipc://...")
seat = Seat("rollout-0", cores=(0,))
take(seat, task)      pins the process, sends its stdout and stderr to runs/sort3-001/logs/rollout-0.log
settled()             when everything that lasts has been made
"""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from actors.config import ModelConfig, PromptsConfig
from rollout.config import SamplingConfig
from rollout.event_log import EventLog

if TYPE_CHECKING:
    from actors.prompts import PromptSource


@dataclass(frozen=True, slots=True)
class Task:
    """The same for all roles. `context` is prompt plus answer in tokens; `queue` the endpoint of the queue server."""

    run_dir: str
    seed: int
    model: ModelConfig
    prompts: PromptsConfig
    sampling: SamplingConfig
    context: int
    queue: str = ""

    def prompt_source(self) -> PromptSource:
        """The run's prompts, with the tokenizer of its model. Raises ConfigError."""
        from actors.models import load_tokenizer
        from actors.prompts import PromptSource

        room = self.context - self.sampling.max_tokens
        return PromptSource(self.prompts, load_tokenizer(self.model.path), self.seed, max_prompt_tokens=room)

    def events(self) -> EventLog:
        return EventLog(Path(self.run_dir) / "events.jsonl")


@dataclass(frozen=True, slots=True)
class Seat:
    """One process: its name, its cores (() for all), its device."""

    name: str
    cores: tuple[int, ...] = ()
    device: str = "cpu"

    @property
    def threads(self) -> int:
        return max(1, len(self.cores))


def take(seat: Seat, task: Task) -> None:
    """Pin this process, and all that it starts from now on, to the seat's cores; send what it prints to its log."""
    if seat.cores:
        os.sched_setaffinity(0, seat.cores)
    log = Path(task.run_dir) / "logs" / f"{seat.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


#: New objects before the garbage collector looks through them: one message of the queue makes more than Python's 700.
YOUNG = 20_000


def settled() -> None:
    """The role is set up: what exists now stays, so the garbage collector need not look through it again and again."""
    gc.unfreeze()  # a process that enters a second run has garbage of the first
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])


def thread_environment(threads: int) -> dict[str, str]:
    """For a process that computes with `threads` threads; must be set before torch is imported.

    Unpinned BLAS threads in every role cost a third of a step on shared machines.
    """
    libraries = ("OMP", "MKL", "OPENBLAS", "NUMEXPR")
    return {f"{library}_NUM_THREADS": str(max(1, threads)) for library in libraries}
