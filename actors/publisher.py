"""A version made in the learner becomes the version that engines serve, beside the learner's next step.

    learn thread                                     publisher thread (rank 0)
    begin(v)                                         deliver   reads the weights; engines stage and prove them
    train_step   forward, backward of the next step  serve     commit, canary, confirm
      before_update   waits until nobody reads       live      what follows: slots are released, an evaluation starts
      optimizer step                                 -> the future that `begin` returned
    updated(v+1) the canary's log-probs of v+1; whoever comes from now on is brought v+1

Where weights may be read beside the next step, and where not:

    ZeRO 0-2, gloo, ipc and store     every rank has whole weights: rank 0 alone delivers, no copy is made, and its
                                      optimizer step waits for the reading (so the other ranks' do, in the collective)
    ZeRO 3, plane nccl                a gather is a collective of all ranks, and two communicators must not run at once
                                      on one device: delivered inside `begin`, the rest goes on beside the next step

Engines come and go meanwhile: `bring` makes a newcomer serve what the others serve, between two publications and
never while the optimizer writes. A publication that finds no engine is not lost: the newcomer that comes makes its
version live. Under ZeRO 3 and nccl a newcomer waits for the next publication; there the last engine must not be lost.

publisher = Publisher(engine, plane, spec.weights, rank=0, world=1, event=events.append)
publisher.admit("rollout-0", RemoteEngine(actor)); publisher.begin(0).result() -> {"weights/stall_s": 0.31, ...}
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from actors.weight_planes import Plane, open_sender
from actors.weight_ports import CanaryPlan, Delivery, EnginePort, ThreadedSender
from actors.weight_sync import WeightSync
from rollout.canary import CanaryText
from rollout.config import WeightsConfig
from rollout.errors import NoEngine, WeightError
from rollout.types import Float32

if TYPE_CHECKING:
    from learner.engine import LearnerEngine

Metrics = dict[str, float]
Live = Callable[[int, Metrics], None]  # the version that is served, its weights/* metrics
Done = Future[Metrics]
T = TypeVar("T")


@dataclass(slots=True)
class Publication:
    """A version on its way: who hears first that it is live, and the future that `begin` returned."""

    version: int
    grad_norm: float | None
    live: Live
    done: Future[Metrics]


class Publisher:
    """One per rank. `begin` and `blocked_s` belong to the learn thread; `bring`, `dismiss` and `lost` to anybody."""

    def __init__(
        self,
        engine: LearnerEngine,
        plane: Plane,
        config: WeightsConfig,
        rank: int,
        world: int,
        event: Callable[..., None],
        canaries: tuple[CanaryText, ...] = (),
    ) -> None:
        self._engine, self._world, self._tell = engine, world, event
        self._together = engine.config.zero_stage == 3 or plane.kind == "nccl"
        self._canaries = canaries
        self._wanted: dict[int, list[Float32]] = {}  # of the present version and of the one on its way
        self._tensors = engine.adapter_tensors if plane.adapters else engine.state_tensors
        adapter = engine.adapter_spec() if plane.adapters else None  # on every rank: it may have to gather
        self._sync: WeightSync | None = None
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._weights = threading.Lock()  # held by a delivery that reads, or by the update that writes
        self._updating = False
        self._delivered = threading.Event()
        self._delivered.set()
        self._blocked_s = 0.0
        self._version = -1  # what the weights are while nobody updates them
        self._served = False  # whether any version ever was: before that, no engine is an error and nothing to wait out
        self._homeless: Publication | None = None  # found no engine, waits for a newcomer
        self._newcomers: dict[str, tuple[EnginePort, Future[Metrics]]] = {}  # who waits for the next publication
        self._lost: dict[str, str] = {}
        engine.before_update = self._before_update
        if rank == 0:
            sender = open_sender(plane, self._walk, config, adapter)
            canary = CanaryPlan(canaries, self._score, config.canary_every, config.canary_tolerance)
            self._sync = WeightSync(ThreadedSender(sender), self._event, config.timeout_s, canary=canary)

    def admit(self, name: str, engine: EnginePort) -> None:
        """`name` takes part from the next version on. Ranks other than 0 know no engines."""
        if self._sync is not None:
            self._sync.admit(name, engine)

    def updated(self, version: int) -> None:
        """The weights are those of `version` now. Also while the version before is still on its way."""
        if self._sync is not None or self._together:  # under ZeRO 3 a forward pass is of all ranks
            fresh = [self._engine.score(t.prompt_ids, t.token_ids, 1.0) for t in self._canaries]
            self._wanted = {v: known for v, known in self._wanted.items() if v == self._version} | {version: fresh}
        self._version = version
        if self._updating:
            self._updating = False
            self._weights.release()

    def begin(self, version: int, grad_norm: float | None = None, live: Live = lambda served, found: None) -> Done:
        """Start to make every engine serve `version`; the one before must be done. The future: its weights/* metrics.

        `live` hears first, on the publisher thread, once every engine serves `version` and may hand out what it makes
        (or a later one, where all had been lost and another came back). The future raises WeightError if nothing
        could be sent, and what `live` raises; NoEngine only if no version was ever served.
        """
        if self._version != version:
            self.updated(version)
        publication = Publication(version, grad_norm, live, Future())
        if self._sync is None:
            self._walk_along(publication)
            return publication.done
        self._delivered.clear()
        if self._together:
            self._beside.submit(self._admit_newcomers, self._sync).result()
            delivery = self._attempt(publication, lambda: self._deliver(version, grad_norm))
            if delivery is not None:
                self._beside.submit(self._attempt, publication, lambda: self._serve(publication, delivery))
        else:
            self._beside.submit(self._attempt, publication, lambda: self._publish(publication))
        return publication.done

    def blocked_s(self) -> float:
        """Seconds that updates waited for readers of the weights, since this was last asked."""
        seconds, self._blocked_s = self._blocked_s, 0.0
        return seconds

    def bring(self, name: str, engine: EnginePort) -> Future[Metrics]:
        """Make a newcomer serve the present version. The future raises why it may not (it is out again then)."""
        done: Future[Metrics] = Future()
        self._beside.submit(self._bring, name, engine, done)
        return done

    def dismiss(self, name: str) -> None:
        """`name` is gone; publications from now on do without it."""
        self._beside.submit(self._dismiss, name)

    def lost(self) -> dict[str, str]:
        """Engines that are out, with the reason: what this plane found out by itself, until they are brought back."""
        return dict(self._lost)

    def close(self) -> None:
        self._beside.shutdown(wait=False, cancel_futures=True)

    # ---- on the publisher thread

    def _attempt(self, publication: Publication, work: Callable[[], T]) -> T | None:
        """Every error of a publication is heard by whoever waits for it."""
        try:
            return work()
        except NoEngine as error:
            if self._served and not self._together:
                self._homeless = publication
            else:
                publication.done.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the publication
            publication.done.set_exception(error)
        return None

    def _publish(self, publication: Publication) -> None:
        self._serve(publication, self._deliver(publication.version, publication.grad_norm))

    def _deliver(self, version: int, grad_norm: float | None) -> Delivery:
        assert self._sync is not None
        try:
            with self._weights:
                return asyncio.run(self._sync.deliver(version, grad_norm))
        finally:
            self._signal(0)
            self._delivered.set()

    def _serve(self, publication: Publication, delivery: Delivery) -> None:
        assert self._sync is not None
        report = asyncio.run(self._sync.serve(delivery))
        for name in report.committed:
            if name in self._newcomers:
                self._newcomers.pop(name)[1].set_result(report.metrics())
        self._is_live(publication, report.version, report.metrics())

    def _is_live(self, publication: Publication, served: int, found: Metrics) -> None:
        self._served = True
        publication.live(served, found)
        publication.done.set_result(found)

    def _bring(self, name: str, engine: EnginePort, done: Future[Metrics]) -> None:
        assert self._sync is not None
        self._lost.pop(name, None)
        if self._together:
            self._newcomers[name] = engine, done
            return
        try:
            with self._weights:
                report = asyncio.run(self._sync.bring(name, engine, self._version))
        except BaseException as error:  # noqa: BLE001 - handed to whoever brought it
            done.set_exception(error)
            return
        waiting, self._homeless = self._homeless, None
        if waiting is not None:
            self._attempt(waiting, lambda: self._is_live(waiting, report.version, report.metrics()))
        done.set_result(report.metrics())

    def _dismiss(self, name: str) -> None:
        self._newcomers.pop(name, None)
        self._lost.pop(name, None)
        if self._sync is not None:
            self._sync.dismiss(name)

    def _admit_newcomers(self, sync: WeightSync) -> None:
        for name, (engine, _) in self._newcomers.items():
            sync.admit(name, engine)

    def _event(self, kind: str, **fields: Any) -> None:
        if kind == "engine_quarantined":
            name, reason = str(fields["engine"]), str(fields["reason"])
            self._lost[name] = reason
            if name in self._newcomers:
                self._newcomers.pop(name)[1].set_exception(WeightError(reason))
        self._tell(kind, **fields)

    async def _score(self, version: int) -> list[Float32]:
        return self._wanted[version]

    # ---- who may touch the weights

    def _before_update(self) -> None:
        """The optimizer is about to change them: wait for the delivery that reads them, then keep others out."""
        if self._updating:
            return
        started = time.monotonic()
        self._delivered.wait()  # ends: a delivery has its deadlines
        self._weights.acquire()
        self._updating = True
        self._blocked_s += time.monotonic() - started

    # ---- collective gathers

    def _walk(self) -> Iterator[tuple[str, Any]]:
        self._signal(1)
        yield from self._tensors()

    def _walk_along(self, publication: Publication) -> None:
        """Ranks other than 0: walk the weights as often as rank 0 does, where walking is collective."""
        while self._together and self._signal(0):
            for _ in self._tensors():
                pass
        publication.live(publication.version, {})
        publication.done.set_result({})

    def _signal(self, value: int) -> int:
        """Rank 0 says 1 (walk with me) or 0 (done); the others hear it."""
        import torch
        import torch.distributed as dist

        if self._world == 1 or not self._together:
            return value
        word = torch.tensor([value], device=self._engine.device)
        dist.broadcast(word, 0)
        return int(word)
