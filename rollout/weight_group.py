"""One broadcast group of one epoch over gloo: rank 0 is the learner, the others are engines.

    learner:  MeetingPoint (hosts the store) -> rendezvous per member -> GlooGroup.enter(...)
    engine:   Rendezvous -> GlooGroup.enter(...)

A group is its own process group over its own store: it never touches torch's default group, so it can be torn
down and entered again as a new epoch while DeepSpeed and vLLM keep theirs. Every call has a deadline and raises
DeadlineError (who was awaited) or WeightError (the peer went away); after either the group is of no more use.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from rollout.engine import Rendezvous
from rollout.errors import DeadlineError, WeightError

_POLL_S = 0.02
_PREFIX, _CALLED_OFF = "headrace", "called-off"


class MeetingPoint:
    """Where the members of all epochs meet: a key-value store on a port that the system picked (PAINS 26)."""

    def __init__(self, host: str = "127.0.0.1", timeout_s: float = 60.0) -> None:
        self.host, self.timeout_s = host, timeout_s
        patience = timedelta(seconds=timeout_s)
        self._store = dist.TCPStore(host, 0, None, True, patience, wait_for_workers=False)
        # a second connection: the first is locked while a group waits for something on it
        self._bell = dist.TCPStore(host, self._store.port, None, False, patience, wait_for_workers=False)

    @property
    def port(self) -> int:
        return int(self._store.port)

    @property
    def store(self) -> dist.TCPStore:
        return self._store

    def invite(self, epoch: int, members: Sequence[str]) -> dict[str, Rendezvous]:
        """The rendezvous of each member; rank 0 is the caller's own."""
        world = len(members) + 1
        return {
            name: Rendezvous(epoch, self.host, self.port, rank, world, self.timeout_s)
            for rank, name in enumerate(members, start=1)
        }

    def call_off(self, epoch: int) -> None:
        """Members that still wait for others to enter this epoch stop waiting."""
        self._bell.set(f"{_PREFIX}/{epoch}/{_CALLED_OFF}", "1")

    def own(self, epoch: int, n_members: int) -> Rendezvous:
        return Rendezvous(epoch, self.host, self.port, 0, n_members + 1, self.timeout_s)


def _address_towards(host: str, port: int) -> str:
    """The address of this machine by which `host` sees it (no packet is sent)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _announce_and_await(store: dist.Store, rdv: Rendezvous, names: Mapping[int, str], deadline: float) -> None:
    """Say that we are here; wait until everybody is. The one who is missing is named."""
    store.set(f"here/{rdv.rank}", "1")
    waiting = [r for r in range(rdv.world_size) if r != rdv.rank]
    while waiting:
        if store.check([_CALLED_OFF]):
            raise WeightError(f"weight group epoch {rdv.epoch} was called off; wait for the next invitation")
        waiting = [r for r in waiting if not store.check([f"here/{r}"])]
        if waiting and time.monotonic() > deadline:
            who = ", ".join(names.get(r, "the learner" if r == 0 else f"rank {r}") for r in waiting)
            raise DeadlineError(f"{who} to enter weight group epoch {rdv.epoch}", rdv.timeout_s)
        if waiting:
            time.sleep(_POLL_S)


class GlooGroup:
    """An entered group. One thread uses it at a time; `close` may come from any thread.

    gloo closes its connections only when nothing refers to the group any more, works in flight included. So works
    never leave this object (callers hold ticket numbers), and peers see the end as soon as `close` let go of them.
    """

    def __init__(self, rdv: Rendezvous, group: dist.ProcessGroupGloo) -> None:
        self.rendezvous = rdv
        self.broken = False  # a broadcast failed: members are out of step, the group is of no more use
        self._group: dist.ProcessGroupGloo | None = group
        self._works: dict[int, dist.Work] = {}
        self._tickets = itertools.count()
        self._deadline = 0.0
        self.start_clock()

    @classmethod
    def enter(
        cls, rdv: Rendezvous, *, store: dist.TCPStore | None = None, names: Mapping[int, str] | None = None
    ) -> GlooGroup:
        """Block until all members are in, at most `rdv.timeout_s`. `names` makes errors name engines, not ranks."""
        deadline = time.monotonic() + rdv.timeout_s
        timeout = timedelta(seconds=rdv.timeout_s)
        try:
            base = store or dist.TCPStore(rdv.host, rdv.port, None, False, timeout, wait_for_workers=False)
            epoch_store = dist.PrefixStore(f"{_PREFIX}/{rdv.epoch}", base)
            _announce_and_await(epoch_store, rdv, names or {}, deadline)
            options = dist.ProcessGroupGloo._Options()
            here = rdv.host if rdv.rank == 0 else _address_towards(rdv.host, rdv.port)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=here)]
            # everybody is there, so connecting takes milliseconds; who dies just now must not cost a whole deadline
            options._timeout = timedelta(seconds=min(rdv.timeout_s, max(2.0, rdv.timeout_s / 4)))
            options._threads = 1
            group = dist.ProcessGroupGloo(epoch_store, rdv.rank, rdv.world_size, options)
        except RuntimeError as error:  # all that torch's stores and gloo raise
            raise DeadlineError(f"weight group epoch {rdv.epoch}", rdv.timeout_s, _first_line(error)) from error
        return cls(rdv, group)

    def start_clock(self) -> None:
        """From now on, everything until the next `start_clock` must be done within `rendezvous.timeout_s`."""
        self._deadline = time.monotonic() + self.rendezvous.timeout_s

    def broadcast(self, buffer: torch.Tensor) -> int:
        """Start sending (rank 0) or receiving (others) `buffer`; `wait` for the ticket before touching it."""
        group = self._group
        if group is None:
            raise WeightError(f"weight group epoch {self.rendezvous.epoch} is closed; enter the next epoch")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(self._deadline - time.monotonic(), 0.001))
        ticket = next(self._tickets)
        self._works[ticket] = group.broadcast([buffer], options)
        return ticket

    def wait(self, ticket: int) -> None:
        """Block until the buffer is ours again (sent or received)."""
        started = time.monotonic()
        work = self._works.pop(ticket, None)
        try:
            if work is None:
                raise WeightError(f"weight group epoch {self.rendezvous.epoch} was closed while in use")
            work.wait()
        except RuntimeError as error:
            self.broken = True
            waited, reason, epoch = time.monotonic() - started, _first_line(error), self.rendezvous.epoch
            if "imed out" in reason or "imeout" in reason:
                raise DeadlineError(f"a member of weight group epoch {epoch}", waited, reason) from error
            raise WeightError(f"weight group epoch {epoch} broke: {reason}") from error
        finally:
            del work  # a traceback that keeps this frame must not keep the connection
            if self.broken:
                self.close()  # gloo broadcasts along a tree: whoever waits behind us must not wait for the deadline

    def close(self) -> None:
        """Leave; peers that wait for us see the connection close. Idempotent, and it never blocks."""
        leaving = [self._group, self._works]
        self._group, self._works = None, {}
        if leaving[0] is not None:  # letting go waits for operations in flight, which end at their deadline
            threading.Thread(target=leaving.clear, name="weights-leaving").start()
        del leaving


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
