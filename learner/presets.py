"""Algorithm names -> explicit choices. The table in docs/algorithms.md is printed from here.

A preset holds what its paper says; where a paper is silent or peers differ, NOTES says what was chosen and who differs.
Unless a preset says otherwise the correction for asynchrony is the project's default: decoupled, token weights
min(pi_old / mu, 2) (truncated importance sampling). Sequence-level objectives take a sequence-level weight instead.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from pydantic import ValidationError

from learner.choices import (
    PURE_MASKS,
    SEQUENCE_LOSSES,
    SEQUENCE_RATIO_LOSSES,
    TOKEN_ADVANTAGES,
    TOKEN_CORRECTIONS,
    Choices,
)
from learner.config import AlgorithmConfig
from rollout.errors import ConfigError

_GEO = {"correction": "geo_tis", "correction_high": 2.0}
_TWO_POLICY = {"mode": "bypass", "correction": "none", "correction_high": None}


def _preset(name: str, paper: str, **choices: object) -> Choices:
    return Choices.model_validate({"preset": name, "paper": paper, **choices})


PRESETS: dict[str, Choices] = {
    c.preset: c
    for c in (
        _preset(
            "ppo", "Schulman et al. 1707.06347; GAE 1506.02438", advantage="gae", lam=0.95,
            kl_coef=0.05, kl_kind="k1", kl_in="reward", drop_zero_signal=False,
        ),
        _preset("grpo", "DeepSeekMath 2402.03300", kl_coef=0.04, aggregation="seq-mean-token-mean"),
        _preset("dr_grpo", "Dr.GRPO 2503.20783", advantage="group_mean", aggregation="constant"),
        _preset("dapo", "DAPO 2503.14476", clip_high=0.28),
        _preset(
            "gspo", "GSPO 2507.18071", loss="gspo", clip_low=3e-4, clip_high=4e-4,
            aggregation="seq-mean-token-mean", **_GEO,
        ),
        _preset(
            "gspo_token", "GSPO-token 2507.18071", loss="gspo_token", clip_low=3e-4, clip_high=4e-4,
            aggregation="seq-mean-token-mean", **_GEO,
        ),
        _preset("cispo", "MiniMax-M1 2506.13585", loss="cispo", weight_min=0.0, weight_max=5.0, **_TWO_POLICY),
        _preset("sapo", "SAPO 2511.20347", loss="sapo", aggregation="seq-mean-token-mean"),
        _preset(
            "gmpo", "GMPO 2507.20673", loss="gmpo", clip_low=0.4, clip_high=0.4,
            aggregation="seq-mean-token-mean", **_GEO,
        ),
        _preset("rloo", "RLOO 2402.14740", advantage="leave_one_out", kl_coef=0.03, kl_kind="k1", kl_in="reward"),
        _preset(
            "rloo_sequence", "RLOO 2402.14740", advantage="leave_one_out", loss="sequence_clip",
            kl_coef=0.03, kl_kind="k1", kl_in="reward", aggregation="seq-mean-token-mean",
            correction="seq_tis", correction_high=2.0,
        ),
        _preset(
            "reinforce_pp", "REINFORCE++ 2501.03262", advantage="reinforce_pp",
            kl_coef=0.01, kl_kind="k1", kl_in="reward",
        ),
        _preset(
            "reinforce_pp_baseline", "REINFORCE++ 2501.03262", advantage="reinforce_pp_baseline",
            kl_coef=0.01, kl_kind="k2", kl_in="loss",
        ),
        _preset("maxrl", "MaxRL 2602.02710", advantage="maxrl", advantage_eps=0.0),
        _preset(
            "dppo", "DPPO-Binary-TV 2602.04879", advantage="group_mean", loss="dppo",
            trust_region_coef=1e-3, **_TWO_POLICY,
        ),
        _preset(
            "ipo", "INTELLECT Policy Optimization, PRIME-RL docs", advantage="group_mean", loss="ipo",
            clip_low=0.3, clip_high=0.3, trust_region_coef=1e-3, **_TWO_POLICY,
        ),
        _preset("aipo", "AIPO, LlamaRL 2505.24034", loss="aipo", weight_max=2.0, **_TWO_POLICY),
        _preset("aipo_surrogate", "AIPO, LlamaRL 2505.24034", loss="aipo_surrogate", weight_max=2.0, **_TWO_POLICY),
        _preset(
            "opmd", "Kimi k1.5 2501.12599, OpenKimi 2602.05933", advantage="group_mean", loss="opmd", tau=0.1,
            aggregation="seq-mean-token-mean", **_GEO,
        ),
        _preset(
            "reinforce", "importance-weighted REINFORCE", advantage="group_mean", loss="reinforce",
            mode="bypass", correction="tis", correction_high=2.0,
        ),
        _preset("lite_ppo", "LitePPO 2508.08221", advantage="batch_std", advantage_eps=1e-4),
        _preset("opo", "OPO 2505.23585", advantage="opo"),
        _preset("pass_at_k", "pass@k training 2503.19595", advantage="pass_at_k"),
        _preset("gdpo", "GDPO 2601.05242", components="normalize_then_sum", advantage_eps=1e-4),
        _preset(
            "icepop", "IcePop, Ring-1T 2510.18855", clip_high=0.28, correction="mis", correction_low=0.5,
            correction_high=5.0,
        ),
        _preset("m2po", "M2PO 2510.01161", loss="importance", m2po_tau=0.04, **_TWO_POLICY),
        _preset("dpo", "DPO 2305.18290", objective="preference", drop_zero_signal=True),
        _preset("dpo_ipo", "IPO 2310.12036", objective="preference", preference_loss="ipo", length_normalized=True),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What the rest of the run says that a choice may contradict.

    Setting(group_size=8, max_tokens=256, top_p=1.0, top_k=0, kept_mass=False, negative_rewards=False)
    """

    group_size: int = 8
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    kept_mass: bool = False  # trajectories record the probability mass that top_p / top_k kept
    negative_rewards: bool = False  # some weighted sum of the reward components can be below 0


def resolve(config: AlgorithmConfig, setting: Setting | None = None) -> Choices:
    """The preset with its overrides, checked. Raises ConfigError naming the key, the value and the remedy."""
    if config.preset not in PRESETS:
        raise ConfigError(f"algorithm.preset: {config.preset!r} is unknown{_nearest(config.preset, list(PRESETS))}")
    allowed = [k for k in Choices.model_fields if k not in ("preset", "paper", "objective")]
    for key in config.overrides:
        if key not in allowed:
            raise ConfigError(f"algorithm.overrides.{key}: no such choice{_nearest(key, allowed)}")
    values = PRESETS[config.preset].model_dump() | config.overrides
    if values["aggregation"] == "constant" and values["length_constant"] is None and setting and setting.max_tokens:
        values["length_constant"] = float(setting.max_tokens)
    try:
        choices = Choices.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(p) for p in first["loc"])
        raise ConfigError(f"algorithm.overrides.{key}: {first['msg']} (got {first['input']!r})") from error
    refuse_contradictions(choices, setting or Setting())
    return choices


def refuse_contradictions(c: Choices, s: Setting) -> None:
    """Raise ConfigError for the first pair of choices that cannot both be meant."""
    for wrong, why in _contradictions(c, s):
        if wrong:
            raise ConfigError(f"algorithm ({c.preset}): {why}")


def _contradictions(c: Choices, s: Setting) -> list[tuple[bool, str]]:
    token_weights = c.correction in TOKEN_CORRECTIONS
    low, high = c.correction_low, c.correction_high
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
        (
            (s.top_p < 1 or s.top_k > 0) and not s.kept_mass,
            f"sampling.top_p {s.top_p} / top_k {s.top_k} renormalise the engine's log-probs, and no kept mass is "
            "recorded to undo it: every ratio would be biased; set top_p: 1.0 and top_k: 0",
        ),
        (
            c.mode == "bypass" and c.loss != "reinforce" and c.correction not in PURE_MASKS | {"none"},
            f"mode 'bypass' already takes the ratio to the engine's log-probs; correction {c.correction!r} would apply "
            "the same weight twice; set correction: none (or a pure mask) or mode: decoupled",
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


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=2)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else f"; known: {', '.join(sorted(known))}"
