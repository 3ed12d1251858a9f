"""RolloutService: prompts in, groups out, around any Engine; no Ray, no trainer, no queue of its own.

    loop      consumes     produces           waits for                              unblocked by
    run       leases       submitted groups   room in flight, then a lease           a made group; the queue's slots
    generate  one prompt   one Group          the engine, then proof of its weights  decoding; `confirm_weights`

Weight updates happen beside these loops, and nothing pauses for them: answers made by a version that the learner has
not confirmed yet are held here (rollout/probation.py) while the engine makes the next ones.

    stage_weights -> commit_weights(7)  -> the learner compares log-probs -> confirm_weights(7): answers of 7 go out
                                                                          -> condemn(why): none ever does, `run` ends

Every leased ordinal is answered exactly once: submitted, or given back with the reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Protocol

import numpy as np

from rollout.engine import CommitReport, Completion, Engine, Rendezvous, SamplingParams
from rollout.errors import ConfigError, DeadlineError, EngineError, Quarantined
from rollout.probation import Probation
from rollout.types import Float32, Group, Int32, Prompt, Trajectory
from rollout.versions import WeightManifest

log = logging.getLogger(__name__)
GIVE_BACK_S = 10.0  # for telling the queue that an engine is gone; leases that cannot be told expire


class LeaseLike(Protocol):
    """What the service needs of a lease."""

    @property
    def ordinal(self) -> int: ...
    @property
    def attempt(self) -> int: ...


Lease = Callable[[int], Awaitable[Sequence[LeaseLike]]]  # how many -> leases; [] if none in time; raises when drained
Submit = Callable[[Group], Awaitable[None]]
GiveBack = Callable[[int, str, bool], Awaitable[None]]  # ordinal, reason, whether it counts against the ordinal


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
    """Turns prompts into groups with one engine: up to `max_in_flight` groups are being made, as many held.

    `hold_s` bounds how long an answer waits for the confirmation of its weights; then it is given back.
    """

    def __init__(
        self, engine: Engine, sampling: SamplingParams, group_size: int, max_in_flight: int, hold_s: float = 120.0
    ) -> None:
        self.engine, self.sampling = engine, sampling
        self.group_size, self.max_in_flight = group_size, max_in_flight
        self.probation = Probation(hold_s)
        self._leased: set[int] = set()
        self._in_flight = self._held = self._groups = self._tokens = 0
        self._room = asyncio.Event()
        self._waiting_s = 0.0

    # ---- one prompt

    async def generate(self, prompt: Prompt, attempt: int = 0) -> Group:
        """One group of `group_size` answers, all of proven weights.

        Raises ConfigError if the prompt leaves no room for an answer, Quarantined and DeadlineError if its weights
        were not confirmed.
        """
        group = await self._make(prompt, attempt)
        await self.probation.proven(_versions(group.trajectories))
        return group

    async def answer(
        self, request_id: str, prompt_ids: Sequence[int] | Int32, sampling: SamplingParams, n: int
    ) -> list[Completion]:
        """n answers to any prompt, beside the rollouts (an evaluation, say); of proven weights, as in `generate`."""
        answers = await self.engine.generate(request_id, prompt_ids, sampling, n)
        await self.probation.proven(_versions(answers))
        return answers

    async def _make(self, prompt: Prompt, attempt: int) -> Group:
        request = f"{prompt.ordinal}.{attempt}"
        answers = await self.engine.generate(request, prompt.token_ids, self.sampling, self.group_size)
        group = Group(prompt.ordinal, np.asarray(prompt.token_ids, np.int32), tuple(map(trajectory, answers)), attempt)
        self._groups += 1
        self._tokens += group.n_tokens
        return group

    # ---- the loop

    async def run(self, lease: Lease, prompt_for: Callable[[int], Prompt], submit: Submit, give_back: GiveBack) -> None:
        """Lease, generate and submit until `lease` raises; then finish what is in flight and raise that.

        An error that is not about one rollout (a dead engine, a lost queue, a condemned engine) ends the loop at
        once: it is re-raised here, never left in a task. If the engine is at fault its leases are given back.
        """
        try:
            async with asyncio.TaskGroup() as watched:
                guard = watched.create_task(self.probation.condemned())
                async with asyncio.TaskGroup() as answers:
                    end = await self._intake(
                        answers, lease, lambda item: self._answer(item, prompt_for, submit, give_back)
                    )
                guard.cancel()
        except BaseExceptionGroup as several:
            cause = _first(several)
            if isinstance(cause, EngineError | Quarantined):
                await self._give_up(give_back, cause)
            raise cause from None  # one plain error crosses process borders readably
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
            while self._in_flight >= self.max_in_flight or self._held >= self.max_in_flight:
                self._room.clear()
                await self._room.wait()
            asked, idle = clock(), self._in_flight == 0
            try:
                leases = await lease(self.max_in_flight - self._in_flight)
            except Exception as end:  # noqa: BLE001 (handed to the caller of `run`, once nothing is in flight)
                return end
            self._waiting_s += (clock() - asked) * idle
            for item in leases:
                self._in_flight += 1
                self._leased.add(item.ordinal)
                answers.create_task(answer(item))

    async def _answer(
        self, item: LeaseLike, prompt_for: Callable[[int], Prompt], submit: Submit, give: GiveBack
    ) -> None:
        try:
            group = await self._make(prompt_for(item.ordinal), item.attempt)
        except ConfigError as error:
            log.warning("ordinal %d given back: %s", item.ordinal, error)
            await give(item.ordinal, str(error), True)
            self._leased.discard(item.ordinal)
            return
        finally:
            self._in_flight -= 1
            self._room.set()
        self._held += 1
        try:
            await self._hand_out(group, submit, give)
        finally:
            self._held -= 1
            self._room.set()

    async def _hand_out(self, group: Group, submit: Submit, give: GiveBack) -> None:
        try:
            await self.probation.proven(_versions(group.trajectories))
        except DeadlineError as late:
            log.warning("ordinal %d given back: %s", group.ordinal, late)
            await give(group.ordinal, f"unconfirmed weights: {late}", False)
        else:
            await submit(group)
        self._leased.discard(group.ordinal)

    async def _give_up(self, give: GiveBack, cause: Exception) -> None:
        """Give back every lease. A quarantine is not the prompts' fault; a crash may be."""
        reason = f"{'engine quarantined' if isinstance(cause, Quarantined) else 'engine lost'}: {cause}"
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                for ordinal in sorted(self._leased):
                    await give(ordinal, reason, not isinstance(cause, Quarantined))
        except TimeoutError:
            log.warning("the queue did not take %d leases back in time; they expire", len(self._leased))
        self._leased.clear()

    # ---- weights, as `actors.weight_ports.EnginePort`

    async def join(self, rendezvous: Rendezvous) -> None:
        await self.engine.join(rendezvous)

    async def stage_weights(self, manifest: WeightManifest) -> float:
        return await self.engine.stage_weights(manifest)

    async def commit_weights(self, version: int, digest: str = "") -> CommitReport:
        """Serve what is staged, on probation: answers with tokens of `version` stay here until it is confirmed."""
        self.probation.expect(version)
        return await self.engine.commit_weights(version, digest)

    async def confirm_weights(self, version: int) -> None:
        """The learner vouches for what this engine serves as `version`."""
        self.probation.confirm(version)

    async def condemn(self, reason: str) -> None:
        """The learner does not: nothing that is held goes out, and `run` ends with Quarantined."""
        self.probation.condemn(reason)

    async def discard_weights(self) -> None:
        await self.engine.discard_weights()

    async def score(self, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float) -> Float32:
        return await self.engine.score(prompt_ids, token_ids, temperature)

    def gauges(self) -> dict[str, float]:
        """Counters since the start; `waiting_s` is time with nothing in flight (the slots were out)."""
        return {
            "groups_generated": self._groups,
            "tokens_generated": self._tokens,
            "groups_in_flight": self._in_flight,
            "groups_held": self._held,
            "waiting_s": self._waiting_s,
            **self.engine.gauges(),
        }


def _versions(answers: Iterable[Completion | Trajectory]) -> set[int]:
    return {span.version for answer in answers for span in answer.versions}


def _first(several: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended a task group; groups may be nested."""
    error: BaseException = several
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
