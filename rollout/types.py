"""The nouns of Headrace. Nothing here knows ZeroMQ, Ray, vLLM or torch; numpy is all it needs.

One filled-in group, G = 2 answers to a prompt of 5 tokens:

    Group(ordinal=17, prompt_ids=int32[5], trajectories=(
        Trajectory(token_ids=int32[3], loss_mask=bool[3], behaviour_logprobs=float32[3],
                   versions=(VersionSpan(4, 0, 3),), status=Status.FINISHED, verdict=Scored(1.0, {"exact": 1.0})),
        Trajectory(token_ids=int32[12], ..., status=Status.TRUNCATED, verdict=TimedOut(5.0)),
    ), attempt=0)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from rollout.versions import VersionSpan, check_spans, oldest_version

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


class Status(StrEnum):
    """How a generation ended. The engine says so; nobody infers it from lengths."""

    FINISHED = "finished"  # the model stopped by itself (EOS or a stop string)
    TRUNCATED = "truncated"  # the token budget ran out
    FAILED = "failed"  # the engine gave up on this one; it has no trainable token


@dataclass(frozen=True, slots=True)
class Scored:
    """A reward: `value` is what is trained on, `components` what it was made of (finite floats)."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """The reward could not be computed: `kind` is a short stable word ("raised", "nan", "crashed")."""

    kind: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The reward did not answer within `deadline_s` seconds and its process was killed."""

    deadline_s: float


Verdict = Scored | Failed | TimedOut


@dataclass(frozen=True, slots=True)
class Prompt:
    """What `prompt_for(ordinal)` returns. `meta` holds what a reward needs (the reference answer, say).

    Prompt(ordinal=17, text="sorted([3, 1, 2]) =", token_ids=int32[11], meta={"answer": "[1, 2, 3]"})
    """

    ordinal: int
    text: str
    token_ids: Int32
    meta: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One answer of L tokens (the prompt is not part of it).

    loss_mask is True where the model itself produced the token and the learner may train on it (False on
    tool output). behaviour_logprobs are those of the engine at sampling time, at the sampling temperature.
    extras holds optional per-token arrays of first dimension L (entropy, kept_mass, routed_experts, ...).
    notes holds what belongs to the answer as a whole, as plain values (turn boundaries, tool results, image names).
    """

    token_ids: Int32
    loss_mask: Bool
    behaviour_logprobs: Float32
    versions: tuple[VersionSpan, ...]
    status: Status
    verdict: Verdict | None = None
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    notes: Mapping[str, object] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.token_ids)

    def check(self) -> None:
        """Raise ValueError naming the field that disagrees with `token_ids`."""
        n = len(self.token_ids)
        for name in ("loss_mask", "behaviour_logprobs"):
            got = len(getattr(self, name))
            if got != n:
                raise ValueError(f"{name} has {got} entries for {n} tokens")
        for name, array in self.extras.items():
            if len(array) != n:
                raise ValueError(f"extras[{name!r}] has {len(array)} entries for {n} tokens")
        if n == 0 and self.status is not Status.FAILED:
            raise ValueError("token_ids is empty but status is not 'failed'")
        check_spans(self.versions, n)


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The answers of one group end to end, n tokens in all: Columns(int32[15], bool[15], float32[15], (3, 12))."""

    token_ids: Int32
    loss_mask: Bool
    behaviour_logprobs: Float32
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> Columns:
        return cls(
            np.concatenate([t.token_ids for t in trajectories]),
            np.concatenate([t.loss_mask for t in trajectories]),
            np.concatenate([t.behaviour_logprobs for t in trajectories]),
            tuple(map(len, trajectories)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The G trajectories of one ordinal: the unit of lease, transfer, advantage, staleness and release.

    `trajectories` is a tuple, or for a group from the queue a sequence that makes its items when they are touched.
    """

    ordinal: int
    prompt_ids: Int32
    trajectories: Sequence[Trajectory]
    attempt: int = 0  # which lease of the ordinal produced it, 0 for the first

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token; a group without tokens counts as version 0 (as stale as can be)."""
        return oldest_version((s for t in self.trajectories for s in t.versions), default=0)

    @property
    def newest_version(self) -> int:
        """Version of the newest token; 0 for a group without tokens."""
        return max((s.version for t in self.trajectories for s in t.versions), default=0)

    @property
    def n_tokens(self) -> int:
        """Answer tokens of the whole group (the prompt not counted)."""
        return sum(len(t) for t in self.trajectories)

    @property
    def columns(self) -> Columns:
        """The answers end to end: no copies for a group that came from the queue in one piece."""
        made = getattr(self.trajectories, "columns", None)
        return made if isinstance(made, Columns) else Columns.of(self.trajectories)

    def with_verdicts(self, verdicts: Sequence[Verdict]) -> Group:
        """The same group, scored. Raises ValueError if the counts differ."""
        if len(verdicts) != len(self.trajectories):
            raise ValueError(f"{len(verdicts)} verdicts for {len(self.trajectories)} trajectories")
        pairs = zip(self.trajectories, verdicts, strict=True)
        return replace(self, trajectories=tuple(replace(t, verdict=v) for t, v in pairs))
