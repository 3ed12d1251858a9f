"""One rank's share of an optimizer step as flat arrays: what the groups said, before any model looks at it.

Two axes, both in the order of the groups: N answers (every trajectory, also failed and empty ones) and T answer
tokens (all of them, end to end). One group of two answers, the second truncated and unscored:

    Share(rewards=[1.0, nan]  group_ids=[0, 0]  truncated=[False, True]  lengths=[3, 12]           [N = 2]
          mask=[1 1 1 ...]    sequence_ids=[0 0 0 1 1 ...]  behaviour=[-0.1 ...]  versions=[4 4 4 ...]    [T = 15])

A verdict that failed or timed out is a NaN here, never a zero. Only answers that may give loss go through the model:
those with a finite reward and a trainable token, and not truncated where `mask_truncated` (DAPO's overlong filter) says
so. All of them count in the denominators.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learner.choices import Choices
from learner.metric_sums import MetricSums
from learner.packing import Answer
from learner.shaping import soft_overlong
from rollout.types import Group, Scored, Status, Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """See the head of this file."""

    groups: tuple[Group, ...]
    rewards: Tensor  # [N] float64, NaN: no reward; shaped (overlong punishment included)
    raw_rewards: Tensor  # [N] float64, as the verdicts said
    components: dict[str, Tensor]  # each [N] float64, NaN where the verdict lacks it
    group_ids: Tensor  # [N]
    truncated: Tensor  # [N] bool
    lengths: Tensor  # [N]
    mask: Tensor  # [T] bool
    sequence_ids: Tensor  # [T]
    behaviour: Tensor  # [T] float32
    versions: Tensor  # [T]

    @staticmethod
    def of(groups: Sequence[Group], choices: Choices, max_tokens: int | None = None) -> Share:
        trajectories = [t for g in groups for t in g.trajectories]
        lengths = torch.tensor([len(t) for t in trajectories], dtype=torch.int64)
        truncated = torch.tensor([t.status is Status.TRUNCATED for t in trajectories], dtype=torch.bool)
        raw = torch.tensor([_reward(t) for t in trajectories], dtype=torch.float64)
        return Share(
            groups=tuple(groups),
            rewards=_shaped(raw, lengths, choices, max_tokens),
            raw_rewards=raw,
            components=_components(trajectories),
            group_ids=torch.tensor([i for i, g in enumerate(groups) for _ in g.trajectories], dtype=torch.int64),
            truncated=truncated,
            lengths=lengths,
            mask=torch.from_numpy(_joined([t.loss_mask for t in trajectories], np.bool_)),
            sequence_ids=torch.arange(len(trajectories)).repeat_interleave(lengths),
            behaviour=torch.from_numpy(_joined([t.behaviour_logprobs for t in trajectories], np.float32)),
            versions=torch.from_numpy(_joined([_versions(t) for t in trajectories], np.int32)),
        )

    def answers(self, choices: Choices) -> Iterator[Answer]:
        """What has to go through the model: answers that may give loss."""
        mask = self.mask.numpy()
        useful = (torch.isfinite(self.rewards) & ~(self.truncated & choices.mask_truncated)).tolist()
        sequence, first = 0, 0
        for index, group in enumerate(self.groups):
            for trajectory in group.trajectories:
                own = mask[first : first + len(trajectory)]
                if useful[sequence] and own.any():
                    yield Answer(sequence, index, first, group.prompt_ids, trajectory.token_ids, own)
                sequence, first = sequence + 1, first + len(trajectory)

    def ordinals_of(self, groups: Sequence[int]) -> tuple[int, ...]:
        """The ordinals of groups given by their index in this share."""
        return tuple(sorted({self.groups[i].ordinal for i in groups}))

    def component_table(self, names: Sequence[str]) -> Tensor | None:
        """[N, K] in the order of `names`; NaN where a verdict lacks one."""
        absent = torch.full_like(self.raw_rewards, math.nan)
        return torch.stack([self.components.get(name, absent) for name in names], dim=1) if names else None

    def metrics(self, version: int, component_names: Sequence[str]) -> MetricSums:
        """What can be said of the step before the model sees it; every rank reports the same names."""
        scored = torch.isfinite(self.raw_rewards)
        everyone = torch.ones_like(scored)
        ages = torch.tensor([version - g.oldest_version for g in self.groups], dtype=torch.float64)
        means = {
            "reward/square": (self.raw_rewards**2, scored),
            "reward/raw": (self.raw_rewards, scored),
            "length/mean": (self.lengths.double(), everyone),
            "length/truncated": (self.truncated.double(), everyone),
            "staleness/mean": (ages, torch.ones(len(ages), dtype=torch.bool)),
        }
        for name in component_names:
            values = self.components.get(name, torch.full_like(self.raw_rewards, math.nan))
            means[f"reward/{name}"] = (values, torch.isfinite(values))
        return MetricSums.of(mean=means, total={"groups/trained": torch.tensor(float(len(self.groups)))})


def _reward(trajectory: Trajectory) -> float:
    verdict = trajectory.verdict
    return float(verdict.value) if isinstance(verdict, Scored) else math.nan


def _shaped(raw: Tensor, lengths: Tensor, choices: Choices, max_tokens: int | None) -> Tensor:
    """DAPO's soft overlong punishment, added to the reward; the filter on signal has seen the raw one."""
    if choices.overlong_cache is None or max_tokens is None:
        return raw
    return raw + soft_overlong(
        lengths.double(), float(max_tokens), float(choices.overlong_cache), choices.overlong_factor
    )


def _components(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    scored = [t.verdict.components if isinstance(t.verdict, Scored) else {} for t in trajectories]
    names = sorted({name for each in scored for name in each})
    return {n: torch.tensor([float(each.get(n, math.nan)) for each in scored], dtype=torch.float64) for n in names}


def _versions(trajectory: Trajectory) -> np.ndarray:
    spans = trajectory.versions
    return np.repeat(np.array([s.version for s in spans], np.int32), [s.end - s.start for s in spans])


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(a, dtype) for a in arrays]) if arrays else np.zeros(0, dtype)
