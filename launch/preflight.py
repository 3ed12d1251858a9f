"""What can be known to be wrong before anything heavy starts. Each check raises ConfigError: one line, exit code 2.

    model directory -> algorithm's choices -> disk -> prompts (every row fits) -> rewards (importable) -> ports

Ordered from cheap to dear; a tokenizer is the heaviest thing that is loaded here.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from actors.models import check_model_dir
from actors.rewards import check as check_rewards
from actors.role import Task
from launch.config import RunConfig
from launch.ledger_settings import ledger_settings
from launch.plan import free_bytes
from rollout.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ready:
    """What the checks found: Ready(context=256, training_rows=936, held_out=64)."""

    context: int
    training_rows: int
    held_out: int


def preflight(config: RunConfig) -> Ready:
    """Check the whole run. Raises ConfigError."""
    facts = check_model_dir(config.model.path)
    context = min(config.model.max_context or facts.context, facts.context)
    if config.model.max_context and config.model.max_context > facts.context:
        raise ConfigError(
            f"model.max_context: {config.model.max_context} is more than the {facts.context} tokens that "
            f"{config.model.path} was made for; lower it"
        )
    if context <= config.sampling.max_tokens:
        raise ConfigError(
            f"sampling.max_tokens: {config.sampling.max_tokens} leaves no room for a prompt in a context of {context}; "
            "lower it"
        )
    ledger_settings(config)
    _check_disk(config)
    _check_port("observe.prometheus_port", config.observe.prometheus_port)
    task = Task("", config.run.seed, config.model, config.prompts, config.sampling, context)
    prompts = task.prompt_source()
    report = prompts.check()
    if config.evaluate.every and not report.held_out:
        raise ConfigError("prompts.held_out: 0 leaves nothing to evaluate on; set it, or evaluate.every to 0")
    check_rewards(config.rewards, [prompts.prompt_for(0), *prompts.held_out()])
    return Ready(context, report.training_rows, report.held_out)


def _check_disk(config: RunConfig) -> None:
    """What shall be kept must fit. What is kept only until it is committed may wait for room: no reason to refuse."""
    retain, free = config.topology.queue.retain, free_bytes(Path(config.run.dir))
    if retain and config.journal_bytes > free:
        raise ConfigError(
            f"topology.queue.retain: {retain}: the journal may take {config.journal_bytes / 1e9:.1f} GB and "
            f"{free / 1e9:.1f} GB are free in {config.run.dir}; lower it, or set run.dir to a larger disk"
        )


def _check_port(path: str, port: int | None) -> None:
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(f"{path}: {port} cannot be bound ({error.strerror}); choose another, or 0") from None
