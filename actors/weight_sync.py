"""How one version reaches every engine: the choreography, free of Ray, gloo and vLLM (ports are handed in).

    push(v)   form an epoch if membership changed -> announce -> { send | stage on each engine, at the same time }
              -> commit on each engine -> canary -> report

    step      waits for                     if it does not come within the deadline
    form      every engine to enter         the missing are quarantined, a new epoch is formed without them
    stage     every engine to prove it      silent: quarantined. refused: sent again, quarantined after `attempts`
    commit    every engine to load          quarantined
    canary    log-probs of fixed tokens     alarm in the report and in events; the engine is quarantined if asked

A push never outlives its deadlines, whatever engines do. It raises only when no engine is left, or when the learner's
own weights cannot be sent; everything else is in the report and in events:
weights_committed, weights_refused, weights_unchanged, engine_quarantined, engine_admitted, canary_alarm.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from actors.weight_ports import CanaryPlan, EnginePort, PushReport, SenderPort, ThreadedSender
from rollout.canary import Canary, CanaryText, Reading
from rollout.engine import CommitReport
from rollout.errors import DeadlineError, WeightError
from rollout.types import Float32

if TYPE_CHECKING:
    from learner.weight_sender import Sent

__all__ = ["CanaryPlan", "EnginePort", "PushReport", "SenderPort", "ThreadedSender", "WeightSync"]


@dataclass
class _Outcome:
    """One engine's answer to one question."""

    name: str
    value: Any = None
    error: Exception | None = None
    silent: bool = False  # it did not answer at all, or its process is gone


@dataclass
class WeightSync:
    """Pushes versions to the engines it knows. One push at a time."""

    sender: SenderPort
    event: Callable[..., None]
    timeout_s: float = 60.0
    grace_s: float = 5.0  # an engine's own deadline comes first, and its error says more than our giving up
    attempts: int = 3
    canary: CanaryPlan | None = None
    on_quarantine: Callable[[str, str], Awaitable[None]] | None = None
    _engines: dict[str, EnginePort] = field(default_factory=dict)
    _members: tuple[str, ...] = ()
    _canaries: dict[str, Canary] = field(default_factory=dict)
    _root: str = ""
    _pushes: int = 0

    def admit(self, name: str, engine: EnginePort) -> None:
        """From the next push on, `name` takes part. An engine of an older version must not serve before that."""
        self._engines[name] = engine
        self._canaries[name] = Canary(self.canary.tolerance if self.canary else 0.15)
        self._members = ()  # a new epoch
        self.event("engine_admitted", engine=name)

    def dismiss(self, name: str) -> None:
        """`name` leaves on purpose; the next push does without it."""
        if self._engines.pop(name, None) is not None:
            self._canaries.pop(name, None)
            self._members = ()

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(self._engines)

    async def push(self, version: int, grad_norm: float | None = None) -> PushReport:
        """Make every engine serve `version`. Raises WeightError if none is left or nothing could be sent."""
        quarantined: dict[str, str] = {}
        sent, transfer_s, attempt = await self._deliver(version, quarantined)
        self._alarm_if_unchanged(version, sent.root, grad_norm)
        committed = await self._commit(version, sent, quarantined)
        readings = await self._read_canaries(version, sent.root, committed, quarantined)
        for name, report in committed.items():
            self.event(
                "weights_committed",
                engine=name,
                version=version,
                digest=sent.root,
                stall_s=round(report.stall_s, 4),
                transfer_s=round(transfer_s, 4),
                bytes=sent.nbytes,
            )
        self._require_engines(version, quarantined)
        stall = max((r.stall_s for r in committed.values()), default=0.0)
        return PushReport(
            version, sent.root, sent.nbytes, transfer_s, stall, committed, quarantined, attempt, tuple(readings)
        )

    # --- deliver: an epoch, an announcement, bytes on every engine ------------------------------------------------

    async def _deliver(self, version: int, quarantined: dict[str, str]) -> tuple[Sent, float, int]:
        strikes: dict[str, int] = {}
        failure: Exception | None = None
        for attempt in range(1, self.attempts + len(self._engines) + 1):
            self._require_engines(version, quarantined)
            failure = await self._form(strikes, quarantined)
            if failure is not None:
                continue
            started = time.monotonic()
            sent, failure, outcomes = await self._send_and_stage(version)
            bad = [o for o in outcomes if o.error is not None]
            if sent is not None and not bad:
                return sent, time.monotonic() - started, attempt
            self._members = ()  # something broke: the epoch is over for everybody
            await self._judge(version, sent, bad, strikes, quarantined)
            if sent is None and not any(o.silent for o in bad):
                strikes["learner"] = strikes.get("learner", 0) + 1
                if strikes["learner"] >= self.attempts:
                    break
        await self._discard_everywhere()
        raise WeightError(f"version {version} could not be sent after {attempt} attempts: {failure}")

    async def _form(self, strikes: dict[str, int], quarantined: dict[str, str]) -> Exception | None:
        """Make sure that the group consists of exactly the known engines; the error if somebody was missing."""
        wanted = tuple(self._engines)
        if self._members == wanted:
            return None
        rendezvous = await self.sender.invite(wanted)
        joins = [self._ask(n, self._engines[n].join(rendezvous[n]), self.timeout_s) for n in wanted]
        entered, *outcomes = await self._all_or_call_off(
            [self._ask("learner", self.sender.enter(), self.timeout_s), *joins]
        )
        if entered.error is None and all(o.error is None for o in outcomes):
            self._members = wanted
            return None
        await self.sender.close_group()
        blamed = [o for o in outcomes if o.silent or _names(o.name, entered.error)]
        if not blamed:  # nobody was missing, yet it failed: whoever keeps failing is out after `attempts`
            failed = [o for o in outcomes if o.error is not None and "called off" not in str(o.error)]
            for o in failed:
                strikes[o.name] = strikes.get(o.name, 0) + 1
            blamed = [o for o in failed if strikes[o.name] >= self.attempts]
        for o in blamed:
            reason = f"did not enter the weight group: {o.error or entered.error}"
            await self._quarantine(o.name, reason, quarantined)
        return entered.error or WeightError("an engine did not enter the weight group")

    async def _all_or_call_off(self, asked: list[Awaitable[_Outcome]]) -> list[_Outcome]:
        """Everybody's outcome; after the first failure nobody needs to wait for who is missing."""
        tasks = [asyncio.ensure_future(a) for a in asked]
        for done in asyncio.as_completed(tasks):
            if (await done).error is not None:
                await self.sender.close_group()
                break
        return list(await asyncio.gather(*tasks))

    async def _send_and_stage(self, version: int) -> tuple[Sent | None, Exception | None, list[_Outcome]]:
        manifest = await self.sender.announce(version)
        stages = [self._ask(n, self._engines[n].stage_weights(manifest), self.timeout_s) for n in self._members]
        sending = self._ask("learner", self.sender.send(manifest), self.timeout_s)
        sent, *outcomes = await asyncio.gather(sending, *stages)
        if sent.error is not None:
            await self.sender.close_group()
        return sent.value, sent.error, outcomes

    async def _judge(
        self, version: int, sent: Sent | None, bad: list[_Outcome], strikes: dict[str, int], quarantined: dict[str, str]
    ) -> None:
        """Who is to blame: the silent at once; who refused whole bytes after `attempts`; bystanders never."""
        for o in bad:
            if o.silent:
                await self._quarantine(o.name, f"silent while version {version} was staged: {o.error}", quarantined)
            elif sent is not None:
                self.event("weights_refused", engine=o.name, version=version, reason=str(o.error))
                strikes[o.name] = strikes.get(o.name, 0) + 1
                if strikes[o.name] >= self.attempts:
                    await self._quarantine(o.name, f"refused version {version} {strikes[o.name]} times", quarantined)
            else:
                self.event("weights_interrupted", engine=o.name, version=version, reason=str(o.error))

    # --- commit and check -----------------------------------------------------------------------------------------

    async def _commit(self, version: int, sent: Sent, quarantined: dict[str, str]) -> dict[str, CommitReport]:
        commits = [
            self._ask(n, self._engines[n].commit_weights(version, sent.root), self.timeout_s) for n in self._members
        ]
        committed = {}
        for o in await asyncio.gather(*commits):
            if o.error is None:
                committed[o.name] = o.value
            else:
                self.event("weights_refused", engine=o.name, version=version, reason=str(o.error))
                await self._quarantine(o.name, f"could not commit version {version}: {o.error}", quarantined)
        return committed

    async def _read_canaries(
        self, version: int, root: str, committed: dict[str, CommitReport], quarantined: dict[str, str]
    ) -> list[Reading]:
        self._pushes += 1
        plan = self.canary
        if plan is None or plan.every == 0 or self._pushes % plan.every or not committed:
            return []
        wanted = await plan.score()
        readings = []
        asked = [self._ask(n, self._score_all(n, plan.texts), self.timeout_s) for n in committed]
        for o in await asyncio.gather(*asked):
            if o.error is not None:
                await self._quarantine(o.name, f"did not answer the canary: {o.error}", quarantined)
                continue
            reading = self._canaries[o.name].read(o.name, version, o.value, wanted, root)
            readings.append(reading)
            if reading.alarm:
                self.event("canary_alarm", engine=o.name, version=version, reason=reading.alarm)
                if plan.quarantine:
                    await self._quarantine(o.name, f"canary: {reading.alarm}", quarantined)
        for name in quarantined:
            committed.pop(name, None)
        return readings

    async def _score_all(self, name: str, texts: tuple[CanaryText, ...]) -> list[Float32]:
        return [await self._engines[name].score(t.prompt_ids, t.token_ids, 1.0) for t in texts]

    def _alarm_if_unchanged(self, version: int, root: str, grad_norm: float | None) -> None:
        if root == self._root and grad_norm:
            self.event("weights_unchanged", version=version, digest=root, grad_norm=grad_norm)
        self._root = root

    # --- asking, blaming ------------------------------------------------------------------------------------------

    async def _ask(self, name: str, question: Awaitable[Any], timeout_s: float) -> _Outcome:
        """Never raises for what an engine does: an answer, its error, or its silence."""
        try:
            return _Outcome(name, await asyncio.wait_for(question, timeout_s + self.grace_s))
        except TimeoutError:
            return _Outcome(name, error=DeadlineError(f"an answer of {name}", timeout_s + self.grace_s), silent=True)
        except (WeightError, DeadlineError) as error:
            return _Outcome(name, error=error)
        except Exception as error:  # noqa: BLE001 - a dead actor raises whatever its transport raises: a named outcome
            return _Outcome(name, error=error, silent=True)

    async def _quarantine(self, name: str, reason: str, quarantined: dict[str, str]) -> None:
        engine = self._engines.pop(name, None)
        if engine is None:
            return
        self._canaries.pop(name, None)
        self._members = ()
        quarantined[name] = reason
        self.event("engine_quarantined", engine=name, reason=reason)
        if self.on_quarantine is not None:
            await self.on_quarantine(name, reason)

    async def _discard_everywhere(self) -> None:
        await asyncio.gather(*(self._ask(n, e.discard_weights(), self.grace_s) for n, e in self._engines.items()))

    def _require_engines(self, version: int, quarantined: dict[str, str]) -> None:
        if not self._engines:
            why = "; ".join(f"{n}: {r}" for n, r in quarantined.items()) or "none was admitted"
            raise WeightError(f"no engine is left to serve version {version} ({why}); start one and admit it")


def _names(engine: str, error: Exception | None) -> bool:
    """Whether the learner's "waited for ... to enter" names this engine."""
    return (
        isinstance(error, DeadlineError) and engine in error.awaited.removesuffix("to enter").replace(",", " ").split()
    )
