"""Clients of the queue: QueueClient blocks, AsyncQueueClient awaits; the same calls (rollout/queue_calls.py).

with QueueClient(endpoint, "rollout-0") as queue:
    leases = queue.lease(4, wait_s=30)
    while True:  # until Drained is raised
        leases = queue.submit_then_lease(map(generate, leases), 4, wait_s=30)
"""

from __future__ import annotations

import asyncio
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from rollout.errors import Drained, HeadraceError
from rollout.ledger_states import Lease
from rollout.queue_asking import Plan, Work, resume
from rollout.queue_calls import Calls

__all__ = ["AsyncQueueClient", "Drained", "Lease", "QueueClient"]


class QueueClient(Calls):
    """Each call returns its result, or raises. Any thread may call; heartbeats go out by themselves."""

    def _drive(self, plan: Plan[Any]) -> Any:
        answer: Any = None
        while True:
            try:
                ask = resume(plan, answer)
            except StopIteration as done:
                return done.value
            if isinstance(ask, Work):
                answer = ask.do()
                continue
            answer = None
            pending = self.connection.ask(ask.op, ask.args, ask.blobs)
            try:
                answer = self.connection.wait(pending, ask.timeout)
            except HeadraceError as error:
                answer = error
            except FutureTimeout:
                answer = None
            finally:
                self.connection.settle(pending, heard=answer is not None)

    def __enter__(self) -> QueueClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncQueueClient(Calls):
    """Each call is a coroutine; the event loop is never blocked."""

    def _drive(self, plan: Plan[Any]) -> Any:
        return self._drive_async(plan)

    async def _drive_async(self, plan: Plan[Any]) -> Any:
        answer: Any = None
        while True:
            try:
                ask = resume(plan, answer)
            except StopIteration as done:
                return done.value
            if isinstance(ask, Work):
                answer = await asyncio.to_thread(ask.do)
                continue
            answer = None
            pending = self.connection.ask_in_background(ask.op, ask.args, ask.blobs)
            try:
                answer = await asyncio.wait_for(asyncio.wrap_future(pending.future), ask.timeout)
            except HeadraceError as error:
                answer = error
            except TimeoutError:
                answer = None
            finally:
                self.connection.settle(pending, heard=answer is not None)

    async def __aenter__(self) -> AsyncQueueClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)
