"""The engines of a run, kept at work: one that dies is named, buried, started again, proven, and only then let in.

    serving --lost--> waiting --back-off over--> starting --model loaded--> joining --proven, confirmed--> serving
                         ^                           |                         |
                         +---------- failed ---------+-------- refused --------+      given up after `restarts`

    stage      waits for                           bounded by                 what the others do meanwhile
    waiting    1, 2, 4, ... s, at most a minute    itself                     generate; leases of the dead come to them
    starting   the model in a new process          START_S                    generate
    joining    the learner: weights and canary     START_S (and the weight    generate; a publication may come later by
                                                   plane's own deadlines)     the time of one delivery

Polled about once a second by the driver, never blocks; what it does to processes is handed in. The run goes on as long
as one engine serves or may still come back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rollout.errors import HeadraceError

START_S = 900.0  # the slowest honest start: a large model from a cold disk
LONGEST_S = 60.0

Stage = Literal["waiting", "starting", "joining", "given up"]


class RoleDied(HeadraceError):
    """A role ended that should not have. `RoleDied: rollout-0 died while generating: ActorDiedError: ...`"""


class Hands(Protocol):
    """What the crew does to processes; references are answered later."""

    def bury(self, name: str) -> None:
        """Kill what is left of its processes, and tell the learner that it is gone."""
        ...

    def restart(self, name: str) -> Any:
        """A new process in its place; the reference of its start."""
        ...

    def rejoin(self, name: str) -> Any:
        """Have the learner make it serve the present version; the reference of the answer."""
        ...

    def set_to_work(self, name: str) -> None:
        """Let it generate."""
        ...

    def outcome(self, reference: Any) -> str | None:
        """None while it is not answered; "" when all went well; else the error, on one line."""
        ...


@dataclass(slots=True)
class Absence:
    """One engine that does not serve: Absence("died: ActorDiedError", "waiting", until=1764475012.0)."""

    reason: str
    stage: Stage
    until: float  # when the stage is over: the back-off, or the deadline
    reference: Any = None


class Crew:
    """All engines by name; `lost` and `look` raise RoleDied when no engine is left that could come back."""

    def __init__(
        self,
        names: Iterable[str],
        restarts: int,
        hands: Hands,
        event: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.names, self.restarts = tuple(names), restarts
        self._hands, self._event, self._clock = hands, event, clock
        self.absent: dict[str, Absence] = {}
        self._used = dict.fromkeys(self.names, 0)
        self._silent: dict[str, float] = {}

    def lost(self, name: str, reason: str) -> None:
        """It died, hangs, or is not trusted any more. Said again of one that is absent already, it changes nothing."""
        if name not in self.absent:
            self._event("role_died", role=name, reason=reason)
            self._again(name, reason)

    def heard(self, name: str, answered: bool, patience_s: float) -> None:
        """Whether a serving engine answered just now; one that was silent for `patience_s` is lost."""
        if answered or name in self.absent:
            self._silent.pop(name, None)
        elif (silent_s := self._clock() - self._silent.setdefault(name, self._clock())) > patience_s:
            self.lost(name, f"has not answered for {silent_s:.0f} s")

    def look(self) -> None:
        """Take every absent engine a step further, if what it waits for is there."""
        for name, absence in list(self.absent.items()):
            if absence.stage == "waiting" and self._clock() >= absence.until:
                self._enter(absence, "starting", self._hands.restart(name))
            elif absence.stage in ("starting", "joining"):
                self._follow(name, absence)

    def gauges(self, name: str) -> dict[str, str | float]:
        """What is shown of an absent engine."""
        absence = self.absent[name]
        return {"absent": absence.stage, "reason": absence.reason, "restarts": float(self._used[name])}

    def _follow(self, name: str, absence: Absence) -> None:
        outcome = self._hands.outcome(absence.reference)
        if outcome is None and self._clock() < absence.until:
            return
        if outcome is None:
            outcome = f"no answer within {START_S:.0f} s"
        if outcome:
            word = "start" if absence.stage == "starting" else "join"
            self._again(name, f"could not {word} again: {outcome}")
        elif absence.stage == "starting":
            self._enter(absence, "joining", self._hands.rejoin(name))
        else:
            del self.absent[name]
            self._hands.set_to_work(name)
            self._event("role_restarted", role=name, restart=self._used[name])

    def _enter(self, absence: Absence, stage: Stage, reference: Any) -> None:
        absence.stage, absence.reference, absence.until = stage, reference, self._clock() + START_S

    def _again(self, name: str, reason: str) -> None:
        self._hands.bury(name)
        self._silent.pop(name, None)
        if self._used[name] >= self.restarts:
            self.absent[name] = Absence(reason, "given up", float("inf"))
            self._event("role_given_up", role=name, reason=reason, restarts=self._used[name])
            self._require_one(name, reason)
            return
        pause_s = min(LONGEST_S, 2.0 ** self._used[name])
        self._used[name] += 1
        self.absent[name] = Absence(reason, "waiting", self._clock() + pause_s)
        self._event(
            "role_restarting", role=name, reason=reason, restart=self._used[name], of=self.restarts, in_s=pause_s
        )

    def _require_one(self, name: str, reason: str) -> None:
        if all(n in self.absent and self.absent[n].stage == "given up" for n in self.names):
            raise RoleDied(
                f"{name} died: {reason}; no engine is left, and topology.rollout.restarts = {self.restarts} allows no "
                f"more; see logs/{name}.log"
            )
