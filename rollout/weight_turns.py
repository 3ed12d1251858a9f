"""Taking turns at one bucket that both sides can see: who may write, who may read, and who did not answer.

    learner   fills the bucket   put "turn" 7: tensors 12..19 of version 3 lie in it -- waits for "read" 7 of everybody
    engine    waits for turn 7   reads                                               -- puts "read" 7

Over the meeting point (`rollout/meeting.py`), as plain JSON; three short values per epoch, however many versions go.
The bucket is filled again only when every reader has said that it is done, so a reader that is late costs time up to
the deadline, and never reads what another turn has written without its sums telling (it is out of the epoch by then).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from rollout.engine import Rendezvous
from rollout.errors import DeadlineError, WeightError
from rollout.ipc_handle import IpcHandle
from rollout.meeting import MeetingPoint, MeetingStore

_POLL_S = 0.002
_REFUSED = "refused: "


@dataclass(frozen=True, slots=True)
class Turn:
    """Tensors [start, stop) of `version`'s manifest lie end to end in the bucket. Without a bucket: given up."""

    number: int
    version: int
    start: int
    stop: int
    bucket: IpcHandle | None

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Turn:
        plain = json.loads(text)
        bucket = plain.pop("bucket")
        return cls(**plain, bucket=bucket and IpcHandle(**bucket))


class TurnGiver:
    """The learner's end, for one epoch. Construction waits for every reader and for nobody else."""

    def __init__(self, meeting: MeetingPoint, epoch: int, members: Mapping[int, str], gpu: str) -> None:
        """Raises DeadlineError naming who did not come, WeightError naming who came from another GPU than `gpu`."""
        self._meeting, self._epoch, self._members, self._number = meeting, epoch, members, 0
        here = self._await("here", None, time.monotonic() + meeting.timeout_s, f"enter weight group epoch {epoch}")
        for rank, theirs in here.items():
            if theirs != gpu:
                raise WeightError(
                    f"{members[rank]} is on GPU {theirs}, the learner on {gpu}: weights.plane ipc needs one GPU for "
                    "both; use gloo"
                )

    def give(self, version: int, start: int, stop: int, bucket: IpcHandle, deadline: float) -> None:
        """Returns when everybody has read: the bucket may be filled again. DeadlineError names who has not, WeightError
        who could not.

        `deadline` on the clock of `time.monotonic`.
        """
        self._say(version, start, stop, bucket)
        self._await("read", str(self._number), deadline, f"read turn {self._number} of version {version}")

    def give_up(self, version: int) -> None:
        """Readers need not wait for the rest of `version`."""
        self._say(version, 0, 0, None)

    def _say(self, version: int, start: int, stop: int, bucket: IpcHandle | None) -> None:
        self._number += 1
        self._meeting.put(self._epoch, "turn", Turn(self._number, version, start, stop, bucket).to_json())

    def _await(self, word: str, wanted: str | None, deadline: float, to_do: str) -> dict[int, str]:
        """Every member's `word`, once it is what is wanted (or anything)."""
        while True:
            said = {r: (self._meeting.said(self._epoch, f"{word}/{r}") or b"").decode() for r in self._members}
            if self._meeting.called_off(self._epoch):
                raise WeightError(f"weight group epoch {self._epoch} was called off; engines will be invited again")
            for rank, text in said.items():
                if text.startswith(_REFUSED):
                    raise WeightError(f"{self._members[rank]} could not {to_do}: {text.removeprefix(_REFUSED)}")
            late = [r for r, text in said.items() if not text or (wanted is not None and text != wanted)]
            if not late:
                return said
            if time.monotonic() > deadline:
                who = ", ".join(self._members[r] for r in late)
                raise DeadlineError(f"{who} to {to_do}", self._meeting.timeout_s)
            time.sleep(_POLL_S)


@contextmanager
def _learner_there() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WeightError(f"the learner is gone ({error}); wait for the next invitation") from None


class TurnTaker:
    """An engine's end, for one epoch. Blocking calls, one at a time."""

    def __init__(self, rendezvous: Rendezvous, gpu: str) -> None:
        """Says that we are here, on `gpu`. Raises WeightError if nobody is there to hear it."""
        self._rdv, self._number = rendezvous, 0
        self._store = MeetingStore(rendezvous)
        self._put(f"here/{rendezvous.rank}", gpu)

    def take(self, version: int, start: int, deadline: float) -> Turn:
        """Wait for the turn whose tensors begin at `start`; it may be read until `done`.

        Raises WeightError if the learner gave up, is gone or sends something else; DeadlineError.
        """
        while (turn := self._next()) is None:
            if time.monotonic() > deadline:
                raise DeadlineError(f"tensors {start}.. of version {version} from the learner", self._rdv.timeout_s)
            time.sleep(_POLL_S)
        self._number = turn.number
        if turn.bucket is None:
            raise WeightError(f"the learner gave up sending version {turn.version}; it will announce it again")
        if (turn.version, turn.start) != (version, start) or turn.stop <= start:
            raise WeightError(
                f"the learner sends tensors {turn.start}..{turn.stop} of version {turn.version} where {start}.. of "
                f"version {version} are due; announce again"
            )
        return turn

    def _next(self) -> Turn | None:
        """The turn after the one we had; None if it has not come yet, WeightError if none will."""
        with _learner_there():
            over = self._store.called_off()  # asked first: what the learner said before it left is heard
            text = self._store.look("turn")
            turn = Turn.from_json(text) if text is not None else None
            if turn is not None and turn.number > self._number:
                return turn
            if over:
                self._store.refuse_if_called_off()
        return None

    def done(self, turn: Turn) -> None:
        """The bucket of `turn` was read to the end."""
        self._put(f"read/{self._rdv.rank}", str(turn.number))

    def refuse(self, reason: str) -> None:
        """This version will not be read any further; the learner need not wait."""
        self._put(f"read/{self._rdv.rank}", f"{_REFUSED}{reason}")

    def _put(self, key: str, value: str) -> None:
        with _learner_there():
            self._store.set(key, value)

    def close(self) -> None:
        self._store.close()
