"""The learner's end of the IPC plane: the same steps as `weight_sender`. NOT RUN on a GPU yet.

    enter   waits for the engine to say that it is there, and on which GPU; another one than ours is refused
    send    vLLM packs tensors into a bucket on the device; each filling is the engine's turn, until it has read it

Whoever does not read in time is named, the epoch is over, and nothing waits for it any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from learner.weight_epochs import EpochSender, Sent, Source
from rollout.engine import Rendezvous
from rollout.errors import WeightError
from rollout.meeting import MeetingPoint
from rollout.versions import WeightManifest
from rollout.weight_checksum import summed
from rollout.weight_turns import TurnGiver

if TYPE_CHECKING:
    from rollout.vllm_ipc import IpcTrainer


def open_trainer() -> IpcTrainer:
    """The GPU that we are on; imported only where there is one."""
    from rollout.vllm_ipc import IpcTrainer

    return IpcTrainer()


class IpcSender(EpochSender[TurnGiver]):
    """Stands where a `WeightSender` stands. torch counts one reader per bucket, so there is one engine."""

    def __init__(
        self,
        source: Source,
        *,
        bucket_bytes: int = 8 << 20,
        timeout_s: float = 60.0,
        host: str = "127.0.0.1",
        trainer: Callable[[], IpcTrainer] = open_trainer,
    ) -> None:
        super().__init__(source, None, bucket_bytes, timeout_s)
        self._meeting = MeetingPoint(host, timeout_s)
        self._open = trainer
        self._trainer: IpcTrainer | None = None

    def _meet(self) -> dict[str, Rendezvous]:
        if len(self._members) > 1:
            raise WeightError(f"ipc has one engine, here are {', '.join(self._members)}; use gloo")
        return self._meeting.invite(self.epoch, self._members)

    def enter(self) -> None:
        self._trainer = self._trainer or self._open()
        names = dict(enumerate(self._members, start=1))
        self._group = TurnGiver(self._meeting, self.epoch, names, self._trainer.gpu)

    def send(self, manifest: WeightManifest) -> Sent:
        """As the base says. Whatever ends it, the engine hears of it; a DeadlineError ends the epoch."""
        turns, trainer = self._entered(manifest), self._trainer
        assert trainer is not None  # since `enter`
        started = time.monotonic()
        sums: dict[str, str] = {}
        at, room = 0, max([self.bucket_bytes, *(t.nbytes for t in manifest.tensors)])
        try:
            with closing(trainer.fill(summed(self._layout.tensors(manifest), sums), room)) as fillings:
                for count, bucket in fillings:
                    turns.give(manifest.version, at, at + count, bucket, started + self.timeout_s)
                    at += count
            if at != len(manifest.tensors):
                raise WeightError(f"only {at} of {len(manifest.tensors)} tensors were packed; report it")
        except BaseException:
            turns.give_up(manifest.version)
            self.close_group()
            raise
        return Sent.proven(manifest, list(sums.values()), time.monotonic() - started)

    def close_group(self) -> None:
        self._meeting.call_off(self.epoch)
        self._group = None

    def close(self) -> None:
        super().close()
        self._meeting.close()
