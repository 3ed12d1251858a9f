"""One broadcast group of one epoch over gloo: rank 0 is the learner, the others are engines.

    learner:  MeetingPoint -> a rendezvous per member -> GlooGroup.enter(...)
    engine:   Rendezvous -> GlooGroup.enter(...)

A group is its own process group over its own store: it never touches torch's default group, so it can be torn
down and entered again as a new epoch while DeepSpeed and vLLM keep theirs. Every call has a deadline and raises
DeadlineError (who was awaited) or WeightError (the peer went away); after either the group is of no more use.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from rollout.engine import Rendezvous
from rollout.errors import DeadlineError, WeightError
from rollout.meeting import MeetingStore

_POLL_S = 0.02


def _announce_and_await(store: MeetingStore, rdv: Rendezvous, names: Mapping[int, str]) -> None:
    """Say that we are here; wait until everybody is. The one who is missing is named."""
    deadline = time.monotonic() + rdv.timeout_s
    store.set(f"here/{rdv.rank}", "1")
    waiting = [r for r in range(rdv.world_size) if r != rdv.rank]
    while waiting:
        store.refuse_if_called_off()
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
    Its destructor waits for works in flight while it holds Python's lock, which would freeze the whole process until
    their deadline: hence `_let_go`, which waits for them with the lock free, and only then destroys the group.
    """

    def __init__(self, rdv: Rendezvous, group: dist.ProcessGroupGloo, store: MeetingStore) -> None:
        self.rendezvous = rdv
        self._store = store
        self.broken = False  # a broadcast failed: members are out of step, the group is of no more use
        self._group: dist.ProcessGroupGloo | None = group
        self._works: dict[int, tuple[dist.Work, torch.Tensor]] = {}
        self._tickets = itertools.count()
        self._deadline = 0.0
        self.start_clock()

    @classmethod
    def enter(cls, rdv: Rendezvous, names: Mapping[int, str] | None = None) -> GlooGroup:
        """Block until all members are in, at most `rdv.timeout_s`. `names` makes errors name engines, not ranks."""
        try:
            store = MeetingStore(rdv)
            _announce_and_await(store, rdv, names or {})
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=store.address)]
            # everybody is there, so connecting takes milliseconds; who dies just now must not cost a whole deadline
            options._timeout = timedelta(seconds=min(rdv.timeout_s, max(2.0, rdv.timeout_s / 4)))
            options._threads = 1
            group = dist.ProcessGroupGloo(store, rdv.rank, rdv.world_size, options)
        except (RuntimeError, OSError) as error:  # what gloo and a vanished meeting point raise
            raise DeadlineError(f"weight group epoch {rdv.epoch}", rdv.timeout_s, _first_line(error)) from error
        return cls(rdv, group, store)

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
        self._works[ticket] = (group.broadcast([buffer], options), buffer)  # type: ignore[attr-defined]
        return ticket

    def wait(self, ticket: int) -> None:
        """Block until the buffer is ours again (sent or received)."""
        started = time.monotonic()
        work = self._works.get(ticket)
        try:
            if work is None:
                raise WeightError(f"weight group epoch {self.rendezvous.epoch} was closed while in use")
            work[0].wait()
        except RuntimeError as error:
            self.broken = True
            waited, reason, epoch = time.monotonic() - started, _first_line(error), self.rendezvous.epoch
            if "imed out" in reason or "imeout" in reason:
                raise DeadlineError(f"a member of weight group epoch {epoch}", waited, reason) from error
            raise WeightError(f"weight group epoch {epoch} broke: {reason}") from error
        finally:
            self._works.pop(ticket, None)
            del work  # a traceback that keeps this frame must not keep the connection
            if self.broken:
                self.close()  # gloo broadcasts along a tree: whoever waits behind us must not wait for the deadline

    def close(self) -> None:
        """Leave; peers that wait for us see the connection close. Idempotent, and it never blocks."""
        group, works = self._group, list(self._works.values())
        self._group, self._works = None, {}
        if group is not None:
            leaving: list[object] = [self._store, group, works]
            threading.Thread(target=_let_go, args=(leaving,), name="weights-leaving").start()


def _let_go(leaving: list[object]) -> None:
    """Wait until no work is in flight, then drop the last references."""
    works = leaving.pop()
    assert isinstance(works, list)
    while works:
        if works[-1][0].is_completed():
            works.pop()
        else:
            time.sleep(_POLL_S)
    time.sleep(_POLL_S)  # gloo's thread lets go of its last buffer a moment after the work is done, and needs the lock
    leaving.clear()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
