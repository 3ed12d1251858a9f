"""RolloutService: prompts in, groups out, around any Engine; no Ray, no trainer, no queue of its own.

    loop      consumes     produces           waits for                      unblocked by
    run       leases       submitted groups   room in flight, then a lease   a finished group; the queue's slots
    generate  one prompt   one Group          the engine                     the engine, which never stops decoding

Weight updates happen beside these loops (`engine.stage_weights` / `commit_weights`); nothing here pauses for them.
Every leased ordinal is answered exactly once: submitted, or given back with the reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import numpy as np

from rollout.engine import Completion, Engine, SamplingParams
from rollout.errors import HeadraceError
from rollout.types import Group, Prompt, Trajectory

log = logging.getLogger(__name__)


class LeaseLike(Protocol):
    """What the service needs of a lease."""

    @property
    def ordinal(self) -> int: ...
    @property
    def attempt(self) -> int: ...


Lease = Callable[[int], Awaitable[Sequence[LeaseLike]]]  # how many -> leases; [] if none in time; raises when drained
Submit = Callable[[Group], Awaitable[None]]
GiveBack = Callable[[int, str], Awaitable[None]]


def trajectory(completion: Completion) -> Trajectory:
    """A completion as the learner will see it: all of its tokens are the model's own, so all are trainable."""
    return Trajectory(
        token_ids=completion.token_ids,
        loss_mask=np.ones(len(completion.token_ids), dtype=np.bool_),
        behaviour_logprobs=completion.logprobs,
        versions=completion.versions,
        status=completion.status,
        extras=completion.extras,
    )


class RolloutService:
    """Turns prompts into groups with one engine, up to `max_in_flight` groups at a time."""

    def __init__(self, engine: Engine, sampling: SamplingParams, group_size: int, max_in_flight: int) -> None:
        self.engine, self.sampling = engine, sampling
        self.group_size, self.max_in_flight = group_size, max_in_flight
        self._in_flight: set[asyncio.Task[None]] = set()
        self._groups = self._tokens = 0
        self._waiting_s = 0.0

    async def generate(self, prompt: Prompt, attempt: int = 0) -> Group:
        """One group of `group_size` answers. Raises ConfigError if the prompt leaves no room for an answer."""
        request = f"{prompt.ordinal}.{attempt}"
        answers = await self.engine.generate(request, prompt.token_ids, self.sampling, self.group_size)
        group = Group(prompt.ordinal, np.asarray(prompt.token_ids, np.int32), tuple(map(trajectory, answers)), attempt)
        self._groups += 1
        self._tokens += group.n_tokens
        return group

    async def run(self, lease: Lease, prompt_for: Callable[[int], Prompt], submit: Submit, give_back: GiveBack) -> None:
        """Lease, generate and submit until `lease` raises or the task is cancelled; then finish what is in flight."""
        clock = asyncio.get_running_loop().time
        try:
            while True:
                if len(self._in_flight) >= self.max_in_flight:
                    await asyncio.wait(self._in_flight, return_when=asyncio.FIRST_COMPLETED)
                    continue
                asked = clock()
                for item in await lease(self.max_in_flight - len(self._in_flight)):
                    task = asyncio.create_task(self._answer(item, prompt_for, submit, give_back))
                    self._in_flight.add(task)
                    task.add_done_callback(self._in_flight.discard)
                if not self._in_flight:
                    self._waiting_s += clock() - asked
        finally:
            await asyncio.gather(*self._in_flight)

    async def _answer(
        self, item: LeaseLike, prompt_for: Callable[[int], Prompt], submit: Submit, give: GiveBack
    ) -> None:
        try:
            group = await self.generate(prompt_for(item.ordinal), item.attempt)
        except HeadraceError as error:
            log.warning("ordinal %d given back: %s", item.ordinal, error)
            return await give(item.ordinal, f"{type(error).__name__}: {error}")
        await submit(group)

    def gauges(self) -> dict[str, float]:
        """Counters since the start; `waiting_s` is time with nothing in flight (the slots were out)."""
        return {
            "groups_generated": self._groups,
            "tokens_generated": self._tokens,
            "groups_in_flight": len(self._in_flight),
            "waiting_s": self._waiting_s,
            **self.engine.gauges(),
        }
