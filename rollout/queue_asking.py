"""Asking the queue server and waiting for it: what every call of a queue client is made of.

A plan is a generator: it yields what to ask the server and is sent the answer (None if it did not come in time). So
what a call does, says and retries is written once, and the clients differ only in how they wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rollout.errors import DeadlineError, HeadraceError
from rollout.queue_connection import Connection
from rollout.queue_protocol import WAIT_SLICE, Answer, read_error
from rollout.wire import Buffer

log = logging.getLogger(__name__)
T = TypeVar("T")
GRACE = 5.0  # seconds an answer may come later than the wait that was asked for


@dataclass(slots=True)
class Ask:
    """One request of a plan, and how long to wait for the answer."""

    op: str
    args: dict[str, Any]
    blobs: Sequence[Buffer] = ()
    timeout: float = WAIT_SLICE


@dataclass(slots=True)
class Work:
    """Something slow on this host, in the middle of a plan: an event loop must not do it itself."""

    do: Callable[[], Any]


Plan = Generator[Ask | Work, Any, T]


class Asking:
    """The plans that all the others are made of. `patience_s` bounds those that have no wait of their own."""

    def __init__(self, connection: Connection, patience_s: float) -> None:
        self.connection, self.holder, self.patience_s = connection, connection.holder, patience_s
        self._since_said = time.monotonic()

    def _insist(
        self, op: str, args: dict[str, Any], blobs: Sequence[Buffer] = (), then_wait_s: float = 0.0
    ) -> Plan[Answer]:
        """The answer to a request that the server answers at once, however long the server is away.

        `then_wait_s`: how much later because of what is asked for in the same breath.
        """
        since = time.monotonic()
        while (waited := time.monotonic() - since) < self.patience_s:
            answer = yield Ask(op, args, blobs, min(WAIT_SLICE, self.patience_s - waited) + then_wait_s)
            if answer is not None:
                return answer
            self._say(op, since, "the queue server does not answer")
        raise DeadlineError(f"an answer of the queue server at {self.connection.endpoint} to '{op}'", self.patience_s)

    def _await(self, op: str, args: dict[str, Any], wait_s: float) -> Plan[tuple[Answer | None, str]]:
        """The answer to a request that may have to wait, or (None, what it waited for) once wait_s is over."""
        since, why = time.monotonic(), "the queue server, which is there, but its answers are lost"
        while True:
            left = max(0.0, wait_s - (time.monotonic() - since))
            part = min(left, WAIT_SLICE)
            answer = yield Ask(op, {**args, "wait": part}, (), part + min(GRACE, 1.0 + wait_s))
            if answer is not None and "waiting" not in answer.ok:
                return answer, ""
            if answer is not None:
                why = answer.ok["waiting"]
            elif self.connection.silent:
                why = "the queue server does not answer"
            if time.monotonic() - since >= wait_s:
                return None, why
            self._say(op, since, why)

    def _insist_then(
        self, op: str, args: dict[str, Any], then: str, asked: dict[str, Any], wait_s: float, blobs: Sequence[Buffer]
    ) -> Plan[tuple[Answer, str]]:
        """The answer to a request, and to one that follows it, in one message each way; and what it waited for.

        The second part is missing if the wait was over, and raised if it was refused; then the first one is done.
        """
        since, part = time.monotonic(), min(wait_s, WAIT_SLICE)
        answer = yield from self._insist(op, {**args, "then": {"op": then, **asked, "wait": part}}, blobs, part)
        if "end" in answer.ok:
            raise read_error(answer.ok["end"], "reply.end")
        if "waiting" not in answer.ok:
            return answer, ""
        left = wait_s - (time.monotonic() - since)
        if left <= 0:
            return answer, answer.ok["waiting"]
        second, why = yield from self._await(then, asked, left)
        return second or answer, why

    def _say(self, op: str, since: float, why: str) -> None:
        """A blocked call says what it waits for, every 30 s."""
        now = time.monotonic()
        if now - max(self._since_said, since) >= WAIT_SLICE - 1.0:
            self._since_said = now
            log.warning("%s has waited %.0f s in '%s': %s", self.holder, now - since, op, why)


def resume(plan: Plan[Any], answer: Answer | HeadraceError | None) -> Ask | Work:
    """Go on with the plan: with the answer, or with the server's error raised where the plan asked."""
    return plan.throw(answer) if isinstance(answer, HeadraceError) else plan.send(answer)
