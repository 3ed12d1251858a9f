"""Algorithm names -> explicit choices. The table in docs/algorithms.md is printed from here.

A preset holds what its paper says; where peers differ, preset_notes.py says how.
Unless a preset says otherwise the correction for asynchrony is the project's default: decoupled, token weights
min(pi_old / mu, 2) (truncated importance sampling). Sequence-level objectives take a sequence-level weight instead.
"""

from __future__ import annotations

import difflib

from pydantic import ValidationError

from learner.choices import Choices
from learner.config import AlgorithmConfig
from learner.contradictions import Setting, refuse_contradictions
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
            kl_coef=0.05, kl_kind="k1", kl_in="reward",
        ),
        _preset("grpo", "DeepSeekMath 2402.03300", kl_coef=0.04, aggregation="seq-mean-token-mean"),
        _preset("dr_grpo", "Dr.GRPO 2503.20783", advantage="group_mean", aggregation="constant"),
        _preset("dapo", "DAPO 2503.14476", clip_high=0.28, drop_zero_signal=True),
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
            trust_region_coef=1e-3, drop_zero_signal=True, **_TWO_POLICY,
        ),
        _preset(
            "ipo", "INTELLECT Policy Optimization, PRIME-RL docs", advantage="group_mean", loss="ipo",
            clip_low=0.3, clip_high=0.3, trust_region_coef=1e-3, drop_zero_signal=True, **_TWO_POLICY,
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
            "icepop", "IcePop, Ring-1T 2510.18855", correction="mis", correction_low=0.5,
            correction_high=5.0,
        ),
        _preset("a3po", "A-3PO 2512.06547", proximal="loglinear"),
        _preset("m2po", "M2PO 2510.01161", loss="importance", m2po_tau=0.04, **_TWO_POLICY),
        _preset("dpo", "DPO 2305.18290", objective="preference"),
        _preset("dpo_ipo", "IPO 2310.12036", objective="preference", preference_loss="ipo", length_normalized=True),
    )
}  # fmt: skip


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
    refuse_contradictions(choices, setting or Setting(), config)
    return choices


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=2)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else f"; known: {', '.join(sorted(known))}"
