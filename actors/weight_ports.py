"""What a push of weights needs of both sides (ports), what is asked of the canary, and what a push reports."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rollout.canary import CanaryText, Reading
from rollout.engine import CommitReport, Rendezvous
from rollout.types import Float32
from rollout.versions import WeightManifest

if TYPE_CHECKING:
    from learner.weight_epochs import EpochSender, Sent
    from learner.weight_publisher import WeightPublisher


class EnginePort(Protocol):
    """What a push asks of an engine: `rollout.service.RolloutService` is one, a Ray handle is wrapped into one."""

    async def join(self, rendezvous: Rendezvous) -> None: ...
    async def stage_weights(self, manifest: WeightManifest) -> float: ...
    async def commit_weights(self, version: int, digest: str = "") -> CommitReport: ...
    async def confirm_weights(self, version: int) -> None: ...
    async def condemn(self, reason: str) -> None: ...
    async def discard_weights(self) -> None: ...
    async def score(self, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float) -> Float32: ...


class SenderPort(Protocol):
    """The learner's side; see `learner.weight_epochs.EpochSender`."""

    async def invite(self, members: Sequence[str]) -> dict[str, Rendezvous]: ...
    async def enter(self) -> None: ...
    async def announce(self, version: int) -> WeightManifest: ...
    async def send(self, manifest: WeightManifest) -> Sent: ...
    async def close_group(self) -> None: ...


class ThreadedSender:
    """A sender of this process as a SenderPort: its blocking calls run in a thread."""

    def __init__(self, sender: EpochSender[Any] | WeightPublisher) -> None:
        self._sender = sender

    async def invite(self, members: Sequence[str]) -> dict[str, Rendezvous]:
        return await asyncio.to_thread(self._sender.invite, members)

    async def enter(self) -> None:
        await asyncio.to_thread(self._sender.enter)

    async def announce(self, version: int) -> WeightManifest:
        return await asyncio.to_thread(self._sender.announce, version)

    async def send(self, manifest: WeightManifest) -> Sent:
        return await asyncio.to_thread(self._sender.send, manifest)

    async def close_group(self) -> None:
        await asyncio.to_thread(self._sender.close_group)


@dataclass(frozen=True, slots=True)
class Delivery:
    """One version, staged and proven on `members`; who was lost on the way is in `quarantined`, with the reason."""

    version: int
    sent: Sent
    transfer_s: float
    attempts: int
    members: tuple[str, ...]
    quarantined: dict[str, str]


@dataclass(frozen=True, slots=True)
class PushReport:
    """What became of one version on every engine.

    PushReport(7, root="9f2c...", nbytes=269060352, transfer_s=0.21, stall_s=0.31, held_s=0.12,
               committed={"rollout-0": CommitReport(7, 0.31, 0.28)}, quarantined={}, attempts=1, readings=())
    """

    version: int
    root: str
    nbytes: int
    transfer_s: float
    stall_s: float
    held_s: float  # from the commit until answers of the new version may leave the engines
    committed: Mapping[str, CommitReport]
    quarantined: Mapping[str, str]
    attempts: int
    readings: tuple[Reading, ...] = ()

    def metrics(self) -> dict[str, float]:
        """The `weights/*` keys of one line of metrics.jsonl."""
        found = {
            "weights/stall_s": self.stall_s,
            "weights/transfer_s": self.transfer_s,
            "weights/held_s": self.held_s,
            "weights/bytes": float(self.nbytes),
            "weights/engines": float(len(self.committed)),
        }
        if self.readings:
            found["weights/canary"] = max(r.mean_abs for r in self.readings)
        return found


@dataclass(frozen=True, slots=True)
class CanaryPlan:
    """What to score, and how the learner does: `score(version)` gives one float32[L] per text, at temperature 1."""

    texts: tuple[CanaryText, ...]
    score: Callable[[int], Awaitable[Sequence[Float32]]]
    every: int = 1
    tolerance: float = 0.15
    quarantine: bool = True  # False: an alarm is only told, to measure the canary itself
