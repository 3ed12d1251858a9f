"""Choices that cannot both be meant are refused before anything starts, with the reason and the remedy.

A rule is (it is wrong, why and what to do instead). The first rule that is wrong becomes the ConfigError.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from learner.choices import (
    BATCH_BASELINES,
    PURE_MASKS,
    SEQUENCE_LOSSES,
    SEQUENCE_RATIO_LOSSES,
    TOKEN_ADVANTAGES,
    TOKEN_CORRECTIONS,
    Choices,
)
from learner.config import AlgorithmConfig
from rollout.errors import ConfigError

Rule = tuple[bool, str]


@dataclass(frozen=True)
class Setting:
    """What the rest of the run says that a choice may contradict.

    Setting(group_size=8, max_tokens=256, negative_rewards=False)
    """

    group_size: int = 8
    max_tokens: int | None = None
    negative_rewards: bool = False  # some weighted sum of the reward components can be below 0


def refuse_contradictions(c: Choices, s: Setting, config: AlgorithmConfig) -> None:
    """Raise ConfigError for the first pair of choices that cannot both be meant."""
    for wrong, why in _contradictions(c, s, config):
        if wrong:
            raise ConfigError(f"algorithm ({c.preset}): {why}")


def _contradictions(c: Choices, s: Setting, config: AlgorithmConfig) -> Iterator[Rule]:
    yield from _loss_rules(c)
    yield from _correction_rules(c)
    yield from _maxrl_rules(c, s)
    yield from _regulariser_rules(c)
    yield from _setting_rules(c, s)
    yield from _preference_rules(c)
    yield from _update_rules(c, config)


def _loss_rules(c: Choices) -> list[Rule]:
    token_weights = c.correction in TOKEN_CORRECTIONS
    return [
        (
            c.loss in SEQUENCE_RATIO_LOSSES and (token_weights or c.m2po_tau is not None),
            f"loss {c.loss!r} has one ratio per sequence, so a token-level correction "
            f"({c.correction!r}{', m2po_tau' if c.m2po_tau is not None else ''}) would weight tokens the ratio "
            "does not know; use correction 'geo_tis', 'geo_mask', 'seq_tis', 'seq_mis', 'seq_mask' or 'none'",
        ),
        (
            c.loss in SEQUENCE_LOSSES and c.advantage in TOKEN_ADVANTAGES,
            f"loss {c.loss!r} needs one advantage per sequence but advantage {c.advantage!r} differs from token "
            "to token; use loss 'gspo_token' or 'ppo_clip'",
        ),
        (
            c.loss in ("gspo", "gspo_token") and max(c.clip_low, c.clip_high) > 0.01,
            f"clip_low {c.clip_low} / clip_high {c.clip_high} are token-level widths; a length-normalised sequence "
            "ratio moves about a hundred times less, so nothing would ever be clipped; use about 3e-4 and 4e-4",
        ),
        (
            c.drop_zero_signal and c.advantage in BATCH_BASELINES,
            f"advantage {c.advantage!r} compares with the whole step, so a group of equal rewards does carry signal; "
            "set drop_zero_signal: false",
        ),
        (
            c.loss == "cispo" and c.weight_min >= c.weight_max,
            f"weight_min {c.weight_min} must be below weight_max {c.weight_max} (both are absolute)",
        ),
        (
            c.dual_clip is not None and c.loss != "ppo_clip",
            f"dual_clip belongs to loss 'ppo_clip', not to {c.loss!r}",
        ),
        (
            c.dual_clip is not None and c.dual_clip <= 1 + c.clip_high,
            f"dual_clip {c.dual_clip} must be above 1 + clip_high = {1 + c.clip_high}",
        ),
        (
            c.staleness_clip != 0 and c.loss not in ("ppo_clip", "gspo", "gspo_token", "sequence_clip", "gmpo"),
            f"staleness_clip adapts a clip width, and loss {c.loss!r} has none",
        ),
        (
            c.components == "normalize_then_sum" and c.advantage != "group_std",
            f"components 'normalize_then_sum' normalises each component by its group, which advantage "
            f"{c.advantage!r} does not",
        ),
    ]


def _correction_rules(c: Choices) -> list[Rule]:
    low, high = c.correction_low, c.correction_high
    return [
        (
            c.mode == "bypass" and c.loss != "reinforce" and c.correction not in PURE_MASKS | {"none"},
            f"mode 'bypass' already takes the ratio to the engine's log-probs; correction {c.correction!r} would apply "
            "the same weight twice; set correction: none (or a pure mask) or mode: decoupled",
        ),
        (
            c.proximal == "loglinear" and c.mode == "bypass",
            "proximal 'loglinear' stands in for the old policy, which mode 'bypass' does not read; use mode: decoupled",
        ),
        (
            low is not None and high is not None and low >= high,
            f"correction_low {low} must be below correction_high {high}",
        ),
        (
            c.correction.endswith(("mis", "mask")) and low is None and high is None,
            f"correction {c.correction!r} without correction_low or correction_high would drop nothing; give one",
        ),
        (
            c.correction.endswith("tis") and high is None,
            f"correction {c.correction!r} truncates at correction_high, which is not set; set it or use 'uncapped'",
        ),
    ]


def _maxrl_rules(c: Choices, s: Setting) -> list[Rule]:
    return [
        (
            c.advantage == "maxrl" and s.negative_rewards,
            "MaxRL divides by the mean reward, and a negative reward flips the sign of the update; "
            "give every reward a range of [0, ...] or use advantage 'group_std'",
        ),
        (
            c.advantage == "maxrl" and c.overlong_cache is not None,
            "the soft overlong punishment makes rewards negative, which MaxRL cannot use; drop overlong_cache",
        ),
        (
            c.advantage == "maxrl" and c.kl_in == "reward" and c.kl_coef > 0,
            "a KL penalty in the reward makes rewards negative, which MaxRL cannot use; set kl_in: loss",
        ),
    ]


def _regulariser_rules(c: Choices) -> list[Rule]:
    return [
        (
            c.kl_coef > 0 and c.kl_in == "loss" and c.kl_kind == "k1",
            "KL estimator k1 has zero expected gradient inside the loss; use k2 or k3, or kl_in: reward",
        ),
        (
            c.kl_coef > 0 and c.kl_in == "reward" and c.kl_kind == "k3_ratio",
            "kl_kind 'k3_ratio' is a loss term (its ratio carries the gradient); use k1 with kl_in: reward",
        ),
        (
            c.kl_target is not None and c.kl_coef == 0,
            "kl_target adapts kl_coef, which is 0; give it a start value such as 0.1",
        ),
    ]


def _setting_rules(c: Choices, s: Setting) -> list[Rule]:
    return [
        (
            c.aggregation == "constant" and c.length_constant is None,
            "aggregation 'constant' needs length_constant (the generation budget, sampling.max_tokens)",
        ),
        (
            c.aggregation == "constant" and s.max_tokens is not None and (c.length_constant or 0) < s.max_tokens,
            f"length_constant {c.length_constant} is below sampling.max_tokens {s.max_tokens}: it must "
            "cover the whole answer",
        ),
        (
            c.overlong_cache is not None and s.max_tokens is not None and c.overlong_cache > s.max_tokens,
            f"overlong_cache {c.overlong_cache} is above sampling.max_tokens {s.max_tokens}",
        ),
        (
            c.objective == "policy" and c.advantage not in ("gae", "reinforce_pp", "batch_mean") and s.group_size < 2,
            f"advantage {c.advantage!r} compares answers of one prompt, but sampling.group_size is "
            f"{s.group_size}; use 2 or more",
        ),
    ]


def _preference_rules(c: Choices) -> list[Rule]:
    return [
        (
            c.objective == "preference" and c.preference_loss in ("cdpo", "robust") and c.label_smoothing == 0,
            f"preference_loss {c.preference_loss!r} with label_smoothing 0 is plain 'sigmoid'; set it, say 0.1",
        ),
        (
            c.objective == "preference" and c.preference_loss not in ("cdpo", "robust") and c.label_smoothing > 0,
            f"label_smoothing {c.label_smoothing} has no effect on preference_loss {c.preference_loss!r}; use 'cdpo' "
            "or 'robust'",
        ),
    ]


def _update_rules(c: Choices, config: AlgorithmConfig) -> list[Rule]:
    return [
        (
            config.mini_batches > config.groups_per_step,
            f"algorithm.mini_batches {config.mini_batches} is above algorithm.groups_per_step "
            f"{config.groups_per_step}, and a group is never divided; lower it",
        ),
        (
            c.objective == "preference" and config.updates > 1,
            f"algorithm.mini_batches {config.mini_batches} and algorithm.epochs {config.epochs} repeat policy updates; "
            "a preference objective makes one update of a step's pairs: set both to 1",
        ),
    ]
