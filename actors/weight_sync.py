"""How one version reaches every engine: the choreography, free of Ray, gloo and vLLM (ports are handed in).

    bring(v, e)  push to one newcomer alone, so that it serves what the others serve
    deliver(v)   form an epoch if membership changed -> announce -> { send | stage on each engine, at the same time }
    serve(v)     commit on each engine -> canary -> confirm -> report
    push(v)      both; after `deliver` nobody reads the learner's weights any more

    step      waits for                     if it does not come within the deadline
    form      every engine to enter         the missing are quarantined, a new epoch is formed without them
    stage     every engine to prove it      silent: quarantined. refused: sent again, quarantined after `attempts`
    commit    every engine to load          quarantined
    canary    log-probs of fixed tokens     quarantined; wrong ones as well
    confirm   every engine to hear it       quarantined

From commit to confirm an engine generates, but what it made with the new version does not leave it (probation): so
what only the canary can see is caught before a token is served. A quarantined engine is told so (`condemn`): what it
holds never leaves. Updates that are not due for a canary are confirmed at once.

An update never outlives its deadlines, whatever engines do. It raises only when no engine is left, or when the
learner's own weights cannot be sent or are the old ones; everything else is in the report and in events:
weights_committed, weights_refused, weights_unchanged, engine_quarantined, engine_admitted, canary_alarm.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from actors.asking import Outcome, ask
from actors.canary_check import CanaryCheck
from actors.weight_ports import CanaryPlan, Delivery, EnginePort, PushReport, SenderPort, ThreadedSender
from rollout.canary import Reading
from rollout.engine import CommitReport
from rollout.errors import NoEngine, WeightError

if TYPE_CHECKING:
    from learner.weight_epochs import Sent

__all__ = ["CanaryPlan", "EnginePort", "PushReport", "SenderPort", "ThreadedSender", "WeightSync"]

CONDEMN_S = 1.0  # the word is sent; an engine that is quarantined for its silence need not be waited for


@dataclass
class WeightSync:
    """Brings versions to the engines it knows. One update at a time."""

    sender: SenderPort
    event: Callable[..., None]
    timeout_s: float = 60.0
    grace_s: float = 5.0  # an engine's own deadline comes first, and its error says more than our giving up
    attempts: int = 3
    canary: CanaryPlan | None = None
    _engines: dict[str, EnginePort] = field(default_factory=dict)
    _members: tuple[str, ...] = ()
    _last: tuple[int, str] = (-1, "")  # version and root digest that were delivered last

    def __post_init__(self) -> None:
        self._check = CanaryCheck(self.canary)

    def admit(self, name: str, engine: EnginePort) -> None:
        """From the next update on, `name` takes part. An engine of an older version must not serve before that."""
        self._engines[name] = engine
        self._check.admit(name)
        self._members = ()  # a new epoch
        self.event("engine_admitted", engine=name)

    def dismiss(self, name: str) -> None:
        """`name` leaves on purpose; the next update does without it."""
        if self._engines.pop(name, None) is not None:
            self._check.forget(name)
            self._members = ()

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(self._engines)

    async def push(self, version: int, grad_norm: float | None = None) -> PushReport:
        """Make every engine serve `version`. Raises NoEngine if none is left, WeightError if nothing could be sent."""
        return await self.serve(await self.deliver(version, grad_norm))

    async def bring(self, name: str, engine: EnginePort, version: int) -> PushReport:
        """Admit `name` and make it alone serve `version`: proven and confirmed, or out again (NoEngine)."""
        self.admit(name, engine)
        delivery = await self._deliver(version, only=name)
        self._last = version, delivery.sent.root
        return await self.serve(delivery)

    async def deliver(self, version: int, grad_norm: float | None = None) -> Delivery:
        """`version` lies proven in every engine, not served yet; the learner's weights may change again.

        `grad_norm` above 0 says that the optimizer moved them: the bytes of the version before are then refused.
        """
        delivery = await self._deliver(version)
        await self._refuse_unchanged(delivery, grad_norm)
        return delivery

    async def serve(self, delivery: Delivery) -> PushReport:
        """Commit what was delivered, hold it against the learner, and let the engines hand out what it makes."""
        version, sent, quarantined = delivery.version, delivery.sent, delivery.quarantined
        committed = await self._commit(delivery)
        loaded = time.monotonic()
        readings = await self._read_canaries(delivery, committed)
        for name, report in committed.items():
            self.event(
                "weights_committed",
                engine=name,
                version=version,
                digest=sent.root,
                stall_s=round(report.stall_s, 4),
                transfer_s=round(delivery.transfer_s, 4),
                bytes=sent.nbytes,
            )
        await self._confirm(delivery, committed)
        _require(committed, version, quarantined)
        return PushReport(
            version,
            sent.root,
            sent.nbytes,
            delivery.transfer_s,
            max((r.stall_s for r in committed.values()), default=0.0),
            time.monotonic() - loaded,
            committed,
            quarantined,
            delivery.attempts,
            tuple(readings),
        )

    # --- deliver: an epoch, an announcement, bytes on every engine ------------------------------------------------

    async def _deliver(self, version: int, only: str = "") -> Delivery:
        strikes: dict[str, int] = {}
        quarantined: dict[str, str] = {}
        failure: Exception | None = None
        for attempt in range(1, self.attempts + len(self._engines) + 1):
            wanted = tuple(n for n in self._engines if not only or n == only)
            _require(wanted, version, quarantined)
            failure = await self._form(wanted, strikes, quarantined)
            if failure is not None:
                continue
            started = time.monotonic()
            sent, failure, outcomes = await self._send_and_stage(version)
            bad = [o for o in outcomes if o.error is not None]
            if sent is not None and not bad:
                return Delivery(version, sent, time.monotonic() - started, attempt, self._members, quarantined)
            self._members = ()  # something broke: the epoch is over for everybody
            await self._judge(version, sent, bad, strikes, quarantined)
            if sent is None and not any(o.silent for o in bad):
                strikes["learner"] = strikes.get("learner", 0) + 1
                if strikes["learner"] >= self.attempts:
                    break
        await self._discard_everywhere()
        raise WeightError(f"version {version} could not be sent after {attempt} attempts: {failure}")

    async def _form(
        self, wanted: tuple[str, ...], strikes: dict[str, int], quarantined: dict[str, str]
    ) -> Exception | None:
        """Make sure that the group consists of exactly these engines; the error if somebody was missing."""
        if self._members == wanted:
            return None
        rendezvous = await self.sender.invite(wanted)
        joins = [ask(n, self._engines[n].join(rendezvous[n]), self._patience) for n in wanted]
        entered, *outcomes = await self._all_or_call_off([ask("learner", self.sender.enter(), self._patience), *joins])
        if entered.error is None and all(o.error is None for o in outcomes):
            self._members = wanted
            return None
        await self.sender.close_group()
        blamed = [o for o in outcomes if o.silent or o.named_by(entered.error)]
        if not blamed:  # nobody was missing, yet it failed: whoever keeps failing is out after `attempts`
            failed = [o for o in outcomes if o.error is not None and "called off" not in str(o.error)]
            for o in failed:
                strikes[o.name] = strikes.get(o.name, 0) + 1
            blamed = [o for o in failed if strikes[o.name] >= self.attempts]
        for o in blamed:
            reason = f"did not enter the weight group: {o.error or entered.error}"
            await self._quarantine(o.name, reason, quarantined)
        return entered.error or WeightError("an engine did not enter the weight group")

    async def _all_or_call_off(self, asked: list[Awaitable[Outcome]]) -> list[Outcome]:
        """Everybody's outcome; after the first failure nobody needs to wait for who is missing."""
        tasks = [asyncio.ensure_future(a) for a in asked]
        for done in asyncio.as_completed(tasks):
            if (await done).error is not None:
                await self.sender.close_group()
                break
        return list(await asyncio.gather(*tasks))

    async def _send_and_stage(self, version: int) -> tuple[Sent | None, Exception | None, list[Outcome]]:
        manifest = await self.sender.announce(version)
        asked = [ask(n, self._engines[n].stage_weights(manifest), self._patience) for n in self._members]
        stages = [asyncio.ensure_future(a) for a in asked]
        sent = await ask("learner", self.sender.send(manifest), self._patience)
        if sent.error is not None:  # nobody needs to wait for what will not come, and be taken for silent
            await self._discard_everywhere()
        outcomes = list(await asyncio.gather(*stages))
        if sent.error is not None:
            await self.sender.close_group()
        return sent.value, sent.error, outcomes

    async def _judge(
        self, version: int, sent: Sent | None, bad: list[Outcome], strikes: dict[str, int], quarantined: dict[str, str]
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

    async def _refuse_unchanged(self, delivery: Delivery, grad_norm: float | None) -> None:
        """The optimizer moved the weights, yet what came is what came before: the learner sends something else."""
        version, root = delivery.version, delivery.sent.root
        (before, old), self._last = self._last, (version, root)
        moved = grad_norm is not None and math.isfinite(grad_norm) and grad_norm > 0.0
        if root != old or version == before or not moved:
            return
        self.event("weights_unchanged", version=version, digest=root, grad_norm=grad_norm)
        await self._discard_everywhere()
        raise WeightError(
            f"version {version} has the digest of the version before ({root}) although the gradient norm was "
            f"{grad_norm:.3g}: the learner sends other weights than it trains; no engine was given them"
        )

    # --- commit, check, confirm -----------------------------------------------------------------------------------

    async def _commit(self, delivery: Delivery) -> dict[str, CommitReport]:
        version, root = delivery.version, delivery.sent.root
        commits = [
            ask(n, self._engines[n].commit_weights(version, root), self._patience)
            for n in delivery.members
            if n in self._engines
        ]
        committed = {}
        for o in await asyncio.gather(*commits):
            if o.error is None:
                committed[o.name] = o.value
            else:
                self.event("weights_refused", engine=o.name, version=version, reason=str(o.error))
                await self._quarantine(o.name, f"could not commit version {version}: {o.error}", delivery.quarantined)
        return committed

    async def _read_canaries(self, delivery: Delivery, committed: dict[str, CommitReport]) -> list[Reading]:
        """Takes out of `committed` who does not agree with the learner."""
        if not self._check.due() or not committed:
            return []
        wanted = await self._check.wanted(delivery.version)
        readings = []
        asked = [ask(n, self._check.ask(self._engines[n]), self._patience) for n in committed]
        for o in await asyncio.gather(*asked):
            if o.error is not None:
                await self._quarantine(o.name, f"did not answer the canary: {o.error}", delivery.quarantined)
                continue
            reading = self._check.read(o.name, delivery.version, o.value, wanted, delivery.sent.root)
            readings.append(reading)
            if reading.alarm:
                self.event("canary_alarm", engine=o.name, version=delivery.version, reason=reading.alarm)
                if self._check.quarantines:
                    await self._quarantine(o.name, f"canary: {reading.alarm}", delivery.quarantined)
        for name in delivery.quarantined:
            committed.pop(name, None)
        return readings

    async def _confirm(self, delivery: Delivery, committed: dict[str, CommitReport]) -> None:
        version = delivery.version
        asked = [ask(n, self._engines[n].confirm_weights(version), self._patience) for n in committed]
        for o in await asyncio.gather(*asked):
            if o.error is not None:
                committed.pop(o.name)
                reason = f"did not hear that version {version} is confirmed: {o.error}"
                await self._quarantine(o.name, reason, delivery.quarantined)

    # --- asking, blaming ------------------------------------------------------------------------------------------

    @property
    def _patience(self) -> float:
        return self.timeout_s + self.grace_s

    async def _quarantine(self, name: str, reason: str, quarantined: dict[str, str]) -> None:
        engine = self._engines.pop(name, None)
        if engine is None:
            return
        self._check.forget(name)
        self._members = ()
        quarantined[name] = reason
        self.event("engine_quarantined", engine=name, reason=reason)
        await ask(name, engine.condemn(reason), CONDEMN_S)

    async def _discard_everywhere(self) -> None:
        await asyncio.gather(*(ask(n, e.discard_weights(), 2 * self.grace_s) for n, e in self._engines.items()))


def _require(engines: Collection[str], version: int, quarantined: Mapping[str, str]) -> None:
    if not engines:
        why = "; ".join(f"{n}: {r}" for n, r in quarantined.items()) or "none was admitted"
        raise NoEngine(f"no engine is left to serve version {version} ({why}); start one and admit it")
