"""From a header and frames to a group: all is checked at once, and an answer becomes an object when it is touched."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

import numpy as np

from rollout.errors import WireError
from rollout.types import Columns, Group, Trajectory, Verdict
from rollout.wire_body import KINDS, Body, Column, apart, check_boolean, check_finite, together
from rollout.wire_fields import Buffer
from rollout.wire_header import STATUSES, GroupHeader, read_header

NOTHING: Mapping[str, np.ndarray] = {}
ZEROS, ONES = np.zeros(1 << 16, np.float32), np.ones(1 << 16, np.bool_)
ZEROS.flags.writeable = ONES.flags.writeable = False
INT32, FLOAT32, BOOL = KINDS["<i4"], KINDS["<f4"], KINDS["|b1"]


@dataclass(slots=True, eq=False)
class Arrived(Sequence[Trajectory]):
    """The trajectories of a group that came over the wire: the header, the columns, and the objects once asked for."""

    header: GroupHeader
    tokens: Column
    logprobs: Column | None  # None: only the tokens came
    masks: Column | None
    verdicts: Sequence[Verdict | None]
    extras: dict[int, dict[str, np.ndarray]]
    made: tuple[Trajectory, ...] = ()

    def __len__(self) -> int:
        return len(self.header.lengths)

    @overload
    def __getitem__(self, i: int) -> Trajectory: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[Trajectory, ...]: ...
    def __getitem__(self, i: int | slice) -> Trajectory | tuple[Trajectory, ...]:
        return (self.made or self._make())[i]

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.made or self._make())

    @property
    def columns(self) -> Columns:
        """Views, where the arrays came in one piece."""
        h = self.header
        logprobs = _constant(ZEROS, h.n_tokens) if self.logprobs is None else together(self.logprobs)
        masks = _constant(ONES, h.n_tokens) if self.masks is None else together(self.masks)
        return Columns(together(self.tokens), masks, logprobs, h.lengths)

    def _make(self) -> tuple[Trajectory, ...]:
        h = self.header
        tokens = apart(self.tokens, h.lengths)
        if self.logprobs is None or self.masks is None:
            nothing, everything = _constant(ZEROS, max(h.lengths)), _constant(ONES, max(h.lengths))
            logprobs, masks = [nothing[:n] for n in h.lengths], [everything[:n] for n in h.lengths]
        else:
            logprobs, masks = apart(self.logprobs, h.lengths), apart(self.masks, h.lengths)
        spans, judged = h.spans(), self.verdicts
        statuses = [STATUSES[s] for s in h.statuses]
        self.made = tuple(
            [
                Trajectory(
                    tokens[i], masks[i], logprobs[i], spans[i], statuses[i], judged[i],
                    self.extras.get(i, NOTHING), h.notes.get(str(i), NOTHING),
                )
                for i in range(len(tokens))
            ]
        )  # fmt: skip
        return self.made


def _constant(usual: np.ndarray, n: int) -> np.ndarray:
    """n of what `usual` is made of; scorers ask for them with every group."""
    return usual[:n] if n <= len(usual) else np.full(n, usual[0])


def decode_group(data: Buffer, frames: Sequence[Buffer], verdicts: Sequence[Verdict] | None = None) -> Group:
    """The group, with `verdicts` if they are given; its arrays are read-only views wherever alignment allows.

    Frames that hold only the token ids (what a scorer gets) make a group with zero log-probs and an all-true mask.
    """
    return with_arrays(read_header(data), frames, verdicts)


def with_arrays(header: GroupHeader, frames: Sequence[Buffer], verdicts: Sequence[Verdict] | None = None) -> Group:
    """`decode_group` for a header that has been read. Raises WireError."""
    judged = header.verdicts if verdicts is None else verdicts
    if len(judged) != len(header.lengths):
        raise WireError("group.verdicts", f"{len(judged)} verdicts for {len(header.lengths)} trajectories")
    extras: dict[int, dict[str, np.ndarray]] = {}
    prompt, tokens, logprobs, masks = _at_a_glance(header, frames) or _carefully(header, frames, extras)
    return Group(header.ordinal, prompt, Arrived(header, tokens, logprobs, masks, judged, extras), header.attempt)


Arrays: TypeAlias = tuple[np.ndarray, Column, Column | None, Column | None]  # prompt, tokens, log-probs, masks


def _at_a_glance(h: GroupHeader, frames: Sequence[Buffer]) -> Arrays | None:
    """The arrays of a plain body that lies in one piece, aligned, where nobody can write. None: look carefully."""
    if len(frames) != 1 or h.extras or not h.prompt or not h.n_tokens or len(frames[0]) not in (h.body, h.tokens_end):
        return None
    view = memoryview(frames[0])
    prompt = np.frombuffer(view, INT32, h.prompt)
    if not view.readonly or not prompt.flags.aligned:
        return None
    n, end = h.n_tokens, h.tokens_end
    tokens = np.frombuffer(view, INT32, n, 4 * h.prompt)
    if len(view) == end:
        return prompt, tokens, None, None
    logprobs, masks = np.frombuffer(view, FLOAT32, n, end), np.frombuffer(view, BOOL, n, end + 4 * n)
    check_finite(logprobs)
    check_boolean(masks)
    return prompt, tokens, logprobs, masks


def _carefully(h: GroupHeader, frames: Sequence[Buffer], extras: dict[int, dict[str, np.ndarray]]) -> Arrays:
    """The arrays of any body; fills `extras`. Raises WireError."""
    body, lengths, total = Body(frames), h.lengths, h.n_tokens
    whole = body.nbytes == h.body
    if not whole and body.nbytes != h.tokens_end:
        raise WireError("group.frames", f"{body.nbytes} bytes, the header says {h.body}")
    prompt = body.take("<i4", h.prompt)
    tokens = body.column("<i4", lengths, total)
    logprobs = body.column("<f4", lengths, total, check_finite) if whole else None
    masks = body.column("|b1", lengths, total, check_boolean) if whole else None
    for i, name, dtype, shape in h.extras if whole else ():
        array = body.take(dtype.str, lengths[i] * math.prod(shape)).reshape(lengths[i], *shape)
        extras.setdefault(i, {})[name] = array
    return prompt, tokens, logprobs, masks
