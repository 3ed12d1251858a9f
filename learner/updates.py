"""Which groups each optimizer update of a step learns from. Pure but for one gather of the step's ordinals.

    a step's groups, on all ranks            ordinals 100 .. 107
    epoch 0, shuffled, in 2 mini-batches     {103, 100, 106, 101}  {107, 102, 105, 104}
    epoch 1, shuffled anew                   {101, 105, 104, 107}  {100, 106, 103, 102}

The shuffle depends on the version, the epoch and the ordinals alone, so that neither the number of ranks nor a resume
changes which groups meet in an update. A group is never divided. A rank that has none of an update's groups takes part
in its collectives with nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from learner.world import World

NOBODY = -1


def cut(ordinals: Sequence[int], version: int, epoch: int, mini_batches: int) -> list[frozenset[int]]:
    """The mini-batches of one epoch, as even as can be; where it does not divide, the first ones have a group more."""
    shuffled = np.random.default_rng((version, epoch)).permutation(np.array(sorted(ordinals), np.int64))
    return [frozenset(part.tolist()) for part in np.array_split(shuffled, max(1, min(mini_batches, len(shuffled))))]


def updates_of(world: World, own: Sequence[int], version: int, mini_batches: int, epochs: int) -> list[frozenset[int]]:
    """For each update of the step, in order, which of this rank's groups (by index) it learns from. Collective."""
    everything = frozenset(range(len(own)))
    if mini_batches == 1:
        return [everything] * epochs
    padded = torch.full((world.most(len(own)),), NOBODY, dtype=torch.int64, device=world.device)
    padded[: len(own)] = torch.tensor(own, dtype=torch.int64)
    ordinals = [o for rank in world.gather(padded) for o in rank.tolist() if o != NOBODY]
    parts = [part for epoch in range(epochs) for part in cut(ordinals, version, epoch, mini_batches)]
    return [frozenset(i for i in everything if own[i] in part) for part in parts]
