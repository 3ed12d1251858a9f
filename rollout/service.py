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
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Protocol

import numpy as np

from rollout.engine import Completion, Engine, SamplingParams
from rollout.errors import ConfigError
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
        self._in_flight = self._groups = self._tokens = 0
        self._finished = asyncio.Event()
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
        """Lease, generate and submit until `lease` raises; then finish what is in flight and raise that.

        An error that is not about one rollout (a dead engine, a lost queue) ends the loop at once: it is re-raised
        here, never left in a task. The leases still held then expire.
        """
        try:
            async with asyncio.TaskGroup() as answers:
                end = await self._intake(answers, lease, lambda item: self._answer(item, prompt_for, submit, give_back))
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None  # one plain error crosses process borders readably
        raise end

    async def _intake(
        self,
        answers: asyncio.TaskGroup,
        lease: Lease,
        answer: Callable[[LeaseLike], Coroutine[None, None, None]],
    ) -> Exception:
        """Start an answer per lease, at most `max_in_flight` at a time; returns the error that ended the leases."""
        clock = asyncio.get_running_loop().time
        while True:
            while self._in_flight >= self.max_in_flight:
                self._finished.clear()
                await self._finished.wait()
            asked, idle = clock(), self._in_flight == 0
            try:
                leases = await lease(self.max_in_flight - self._in_flight)
            except Exception as end:  # noqa: BLE001 (handed to the caller of `run`, once nothing is in flight)
                return end
            self._waiting_s += (clock() - asked) * idle
            for item in leases:
                self._in_flight += 1
                answers.create_task(answer(item))

    async def _answer(
        self, item: LeaseLike, prompt_for: Callable[[int], Prompt], submit: Submit, give: GiveBack
    ) -> None:
        try:
            group = await self.generate(prompt_for(item.ordinal), item.attempt)
            await submit(group)
        except ConfigError as error:
            log.warning("ordinal %d given back: %s", item.ordinal, error)
            await give(item.ordinal, str(error))
        finally:
            self._in_flight -= 1
            self._finished.set()

    def gauges(self) -> dict[str, float]:
        """Counters since the start; `waiting_s` is time with nothing in flight (the slots were out)."""
        return {
            "groups_generated": self._groups,
            "tokens_generated": self._tokens,
            "groups_in_flight": self._in_flight,
            "waiting_s": self._waiting_s,
            **self.engine.gauges(),
        }
