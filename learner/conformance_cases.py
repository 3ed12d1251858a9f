"""Families of golden cases -> what training would call. Each replay returns {quantity: absolute error}.

name                       config / name holds                    replayed by
grpo dapo dr_grpo ...      lo, hi, agg, dual, lo_abs, tp, ...      _policy_case: compute + policy_loss + backward
offpolicy/MASK/SPEC        the numbers in SPEC                     OFF_POLICY: SPEC -> Choices, then as above
kl/MASK/KIND               KIND                                    policy_loss with A = 0 and kl_coef = 1
tables, PPO, DPO, ...      their own inputs                        conformance_tables.py
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from learner import advantages, corrections, losses
from learner.choices import Choices
from learner.conformance_inputs import INPUTS, NUMBER, Case, Document, Unimplemented, choices, error, numbers
from learner.conformance_learning import LEARNING
from learner.conformance_tables import TABLES
from learner.objective import TokenTerms, policy_loss, token_terms
from learner.segments import Denominators, Segments

AGGREGATIONS = {"dr-grpo": "constant", "token-sum": "sum"}


OWN_INPUTS = TABLES | LEARNING
KNOWN_KEYS = {
    family: frozenset(keys.split())
    for family, keys in {
        "advantage_table": "table",
        "two_groups": "rewards group_ids mask advantages",
        "maxrl_unbiasedness": "p N target_gradient target_gradient_order_N_minus_1 E_success_average "
        "E_centered_zero_when_K0 E_centered_if_K0_kept_minus1",
        "equal_rewards_float32": "table rule",
        "multi_reward": "components weights group_ids eps weighted_sum grpo_sum_then_normalize gdpo_normalize_then_sum",
        "dynamic_sampling": "keep_rule examples",
        "ppo_critic": "inputs token_rewards advantages_raw returns advantages_whitened ratio policy_loss clip_fraction "
        "dloss_dlogprob value_loss value_clip_fraction dvalueloss_dvalue",
        "dpo": "beta label_smoothing pairs mask seq_logp seq_ref_logp delta delta_per_token_avg sigmoid cdpo robust "
        "ipo_sum ipo_avg hinge",
        "adaptive_kl_controller": "init target horizon n_steps trace",
        "entropy": "logits entropy mean dH_dlogits",
        "dapo_soft_overlong": "L_max L_cache table verl_style_uncapped",
        "length_penalty_primerl_linear": "rewards out_tokens weight shaped advantages",
        "length_reward_kimi_k1.5": "lengths correct reward",
        "areal_loglinear_prox": "v_theta v_behave alpha logp_prox",
    }.items()
}


def replay(name: str, case: Case, doc: Document) -> dict[str, float]:
    """Errors of every number in the case. Raises Unimplemented for a family or quantity nobody knows."""
    family, doc = name.split("/")[0], doc.of(case)
    if family in OWN_INPUTS:
        unknown = set(case) - KNOWN_KEYS[family] - {"algo", "config", "note", "cross_checked_with"}
        if unknown:
            raise Unimplemented(f"quantity {sorted(unknown)[0]!r}")
        return OWN_INPUTS[family](name, case, doc)
    if family == "offpolicy" and name.split("/")[-1].startswith("opsm"):
        return _opsm_case(name, case, doc)
    if family == "offpolicy":
        return _policy_case(name, case, doc, _off_policy(name.split("/")[-1], _config(case, doc)))
    if family in FAMILIES:
        return _policy_case(name, case, doc, FAMILIES[family](name, _config(case, doc)))
    raise Unimplemented(f"family {family!r}")


# ------------------------------------------------------------ name + config -> Choices


def _config(case: Case, doc: Document) -> dict[str, Any]:
    """The case's config, and what some cases say only in words (`algo`: "clip 0.2, k3 in loss, beta=0.04, ...")."""
    algo = str(case.get("algo", ""))
    words: dict[str, Any] = {"length_constant": doc.length_constant}
    for key, pattern in {
        "clip": rf"clip (?:\+-)?({NUMBER})",
        "beta": rf"beta=({NUMBER})",
        "length_constant": rf"L_max=({NUMBER})",
        "gamma": rf"gamma=({NUMBER})",
    }.items():
        found = re.search(pattern, algo)
        if found:
            words[key] = float(found.group(1))
    for kind in ("seq-mean-token-mean", "seq-mean-token-sum", "prompt-mean", "token-mean"):
        if kind in algo:
            words["agg"] = kind
            break
    return words | dict(case.get("config", {}))


def _clip(k: dict[str, Any]) -> dict[str, Any]:
    low = k.get("lo", k.get("clip"))
    if low is None:
        raise Unimplemented("no clip width in config or algo")
    return {"clip_low": low, "clip_high": k.get("hi", low)}


def _agg(k: dict[str, Any], default: str | None = None) -> dict[str, Any]:
    """ "token-mean, ORIGINAL token count in the denominator" -> token-mean."""
    word = str(k["agg"]).split(",")[0].strip() if "agg" in k else default
    if word is None:
        raise Unimplemented("no aggregation in config or algo")
    return {"aggregation": AGGREGATIONS.get(word, word), "length_constant": k.get("L_max", k.get("length_constant"))}


def _ppo_clip(advantage: str) -> Callable[[str, dict[str, Any]], Choices]:
    return lambda name, k: choices(
        advantage=advantage,
        dual_clip=k.get("dual"),
        gamma=k.get("gamma", 1.0),
        **_clip(k),
        **_agg(k, name.split("/")[-1]),
    )


def _sequence(loss: str, default: str = "seq-mean-token-mean", **more: Any) -> Callable[[str, dict[str, Any]], Choices]:
    return lambda name, k: choices(loss=loss, **more, **_clip(k), **_agg(k, default))


FAMILIES: dict[str, Callable[[str, dict[str, Any]], Choices]] = {
    "grpo": _ppo_clip("group_std"),
    "dapo": _ppo_clip("group_std"),
    "dual_clip": _ppo_clip("group_std"),
    "dr_grpo": _ppo_clip("group_mean"),
    "maxrl": _ppo_clip("maxrl"),
    "rloo": _ppo_clip("leave_one_out"),
    "reinforcepp": _ppo_clip("reinforce_pp"),
    "reinforcepp_baseline": _ppo_clip("reinforce_pp_baseline"),
    "gspo": _sequence("gspo"),
    "gspo_tokenmean": _sequence("gspo", "token-mean"),
    "gspo_token": _sequence("gspo_token"),
    "gmpo": _sequence("gmpo"),
    "rloo_sequence_action": _sequence("sequence_clip", advantage="leave_one_out"),
    "cispo": lambda name, k: choices(
        loss="cispo", weight_min=k["lo_abs"], weight_max=k["hi_abs"], **_agg(k, "token-mean")
    ),
    "sapo": lambda name, k: choices(loss="sapo", tau_pos=k["tp"], tau_neg=k["tn"], **_agg(k, name.split("/")[-1])),
    "kl": lambda name, k: choices(
        kl_coef=1.0, kl_kind=name.split("/")[-1].replace("k3_x_ratio", "k3_ratio"), **_agg(k, "token-mean")
    ),
    "grpo_with_kl": lambda name, k: choices(kl_coef=k["beta"], kl_kind="k3", **_clip(k), **_agg(k)),
}


def _band(spec: str) -> dict[str, Any]:
    low, high = numbers(spec)
    return {"correction_low": low, "correction_high": high}


def _cap(spec: str) -> dict[str, Any]:
    return {"correction_high": numbers(spec)[-1]}


_TWO_POLICY = {"mode": "bypass"}
OFF_POLICY: list[tuple[str, Callable[[str, dict[str, Any]], dict[str, Any]]]] = [
    (r"decoupled_uncapped", lambda s, k: {"correction": "uncapped", **_clip(k)}),
    (r"tis_token_C.*", lambda s, k: {"correction": "tis", **_cap(s), **_clip(k)}),
    (r"tis_token_clip_.*", lambda s, k: {"correction": "tis", **_band(s), **_clip(k)}),
    (r"(mis_token|icepop)_.*", lambda s, k: {"correction": "mis", **_band(s), **_clip(k)}),
    (r"areal_token_mask_cap.*", lambda s, k: {"correction": "mis", **_cap(s), **_clip(k)}),
    (r"tis_seq_C.*", lambda s, k: {"correction": "seq_tis", **_cap(s), **_clip(k)}),
    (r"mis_seq_.*", lambda s, k: {"correction": "seq_mis", **_band(s), **_clip(k)}),
    (r"(trl_default_)?seq_mask_max.*", lambda s, k: {"correction": "seq_mis", **_cap(s), **_clip(k)}),
    (r"geo_mask_.*_tokenIS", lambda s, k: {"correction": "geo_mis", **_band(s), **_clip(k)}),
    (r"geo_mask_.*", lambda s, k: {"correction": "geo_mask", **_band(s), **_clip(k)}),
    (r"bypass_ppo_clip", lambda s, k: {**_TWO_POLICY, **_clip(k)}),
    (
        r"bypass_reinforce_seqTIS.*",
        lambda s, k: {**_TWO_POLICY, "loss": "reinforce", "correction": "seq_tis", **_cap(s)},
    ),
    (r"aipo_surrogate_rho.*", lambda s, k: {**_TWO_POLICY, "loss": "aipo_surrogate", "weight_max": k["rho"]}),
    (r"aipo_rho.*", lambda s, k: {**_TWO_POLICY, "loss": "aipo", "weight_max": k["rho"]}),
    (r"importance_sampling.*", lambda s, k: {**_TWO_POLICY, "loss": "importance"}),
    (
        r"primerl_default_dppo",
        lambda s, k: {**_TWO_POLICY, "loss": "dppo", "trust_region_coef": k["kl_tau"], **_clip(k)},
    ),
    (
        r"primerl_ipo_.*",
        lambda s, k: {
            **_TWO_POLICY, "loss": "ipo", "trust_region_coef": k["kl_tau"], "clip_low": k["thr"], "clip_high": k["thr"],
        },
    ),
    (
        r"opmd_tau.*",
        lambda s, k: {
            "loss": "opmd", "tau": k["tau"], "agg": "seq-mean-token-mean",
            "advantage": "leave_one_out" if "leave" in str(k.get("baseline")) else "group_mean",
        },
    ),
]  # fmt: skip


def _off_policy(spec: str, k: dict[str, Any]) -> Choices:
    for pattern, build in OFF_POLICY:
        if re.fullmatch(pattern, spec):
            values = build(spec, k)
            return choices(**_agg(k, values.pop("agg", None)), **values)
    raise Unimplemented(f"off-policy case {spec!r}")


# ------------------------------------------------------------ Choices -> errors


def _policy_case(name: str, case: Case, doc: Document, c: Choices) -> dict[str, float]:
    """compute -> policy_loss -> backward, exactly as a step of training with one micro-batch."""
    mask, groups = doc.mask(name, case), doc.group_ids()
    n, width = mask.shape
    flat_mask, ids = mask.reshape(-1), torch.arange(n).repeat_interleave(width)
    adv = advantages.compute(c, rewards=doc.rewards(), group_ids=groups, mask=flat_mask, sequence_ids=ids)
    A = torch.zeros_like(adv.per_token) if name.startswith("kl/") else adv.per_token
    logp = doc.column("logp").requires_grad_()
    columns: dict[str, Any] = {
        "logprobs": logp,
        "old_logprobs": doc.column("logp_old"),
        "behaviour_logprobs": doc.column("logp_behave"),
        "ref_logprobs": doc.column("logp_ref"),
        "advantages": A.reshape(n, width),
    }
    denominators = Denominators.count(flat_mask, ids, groups)
    loss, metrics = policy_loss(c, mask=mask, group_ids=groups, denominators=denominators, **columns)
    loss.backward()
    terms = token_terms(c, mask=mask, group_ids=groups, sequence_ids=None, **columns)
    got = _quantities(c, terms, A, metrics.finish(), loss.detach())
    base = columns["behaviour_logprobs" if c.mode == "bypass" else "old_logprobs"]
    got["ratio"] = [(logp.detach() - base).exp()]
    got["dloss_dlogprob"] = [logp.grad if logp.grad is not None else torch.zeros_like(logp)]
    return _compare(case, got, mask.shape)


def _quantities(c: Choices, t: TokenTerms, A: Tensor, metrics: dict[str, float], loss: Tensor) -> dict[str, list[Any]]:
    """What a case may state -> training's number for it (two where a file may give it per token or per sequence)."""
    b, seq, live = t.batch, t.batch.seq, t.batch.live
    lengths = seq.count()
    log_ratio = (b.logp - t.base).detach()
    sequence_ratio = (seq.sum(log_ratio) if c.loss == "sequence_clip" else seq.mean(log_ratio)).exp()
    if c.loss == "gmpo":
        sequence_ratio, _ = losses.gmpo_ratio(b.logp.detach(), t.base, b.A, seq, c.clip_low, c.clip_high)
    kept = max(int(t.kept.sum()), 1)
    return {
        "loss": [loss],
        "advantages": [A, seq.mean(A)],
        "per_token_loss": [torch.where(live, t.policy + t.kl + t.regulariser, 0.0)],
        "per_token": [torch.where(live, t.kl, 0.0)],
        "clip_fraction": [metrics["policy/clip_fraction"]],
        "clip_fraction_token": [metrics["policy/clip_fraction"]],
        "clip_fraction_seq": [float((seq.mean(t.clipped.double()) > 0.5).sum()) / max(int((lengths > 0).sum()), 1)],
        "dual_clip_fraction": [metrics.get("policy/dual_clip_fraction", 0.0)],
        "filtered_fraction": [metrics["correction/filtered_fraction"]],
        "behav_weight": [torch.where(t.kept, t.weight, 0.0)],
        "seq_weight": [seq.mean(t.weight)],
        "seq_ratio": [sequence_ratio],
        "loss_if_denominator_is_kept_tokens": [loss * int(live.sum()) / kept],
    }


def _opsm_case(name: str, case: Case, doc: Document) -> dict[str, float]:
    """Off-policy sequence masking: which answers stay (only the sign of A matters)."""
    delta = case.get("config", {}).get("delta", numbers(name.split("/")[-1])[-1])
    mask, groups = doc.mask(name, case), doc.group_ids()
    n, width = mask.shape
    ids = torch.arange(n).repeat_interleave(width)
    c = choices(advantage="group_mean", opsm_delta=delta)
    adv = advantages.compute(c, rewards=doc.rewards(), group_ids=groups, mask=mask.reshape(-1), sequence_ids=ids)
    logp, mu = (torch.where(mask, doc.column(k), 0.0).reshape(-1) for k in ("logp", "logp_behave"))
    keep, drift = corrections.opsm(logp, mu, adv.per_token, Segments(ids, n, mask.reshape(-1)), delta)
    return _compare(case, {"seq_kl": [drift], "keep": [keep.double()]}, mask.shape)


NOT_NUMBERS = INPUTS | {"algo", "config", "mask", "note", "cross_checked_with", "inputs"}


def _compare(case: Case, got: dict[str, list[Any]], shape: torch.Size) -> dict[str, float]:
    """The error of every number the case states; a quantity nobody knows is Unimplemented, never skipped."""
    errors = {}
    for key, want in case.items():
        if key in NOT_NUMBERS:
            continue
        if key not in got:
            raise Unimplemented(f"quantity {key!r}")
        errors[key] = min(error(_shaped(x, want, shape), want) for x in got[key])
    if not errors:
        raise Unimplemented("the case states no number")
    return errors


def _shaped(x: Any, want: Any, shape: torch.Size) -> Any:
    """A flat [B L] tensor in the [B, L] form of the file."""
    per_token = isinstance(x, Tensor) and isinstance(want, list) and bool(want) and isinstance(want[0], list)
    return x.reshape(shape) if per_token and x.numel() == shape.numel() else x
