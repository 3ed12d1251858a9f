"""Golden cases of PPO's critic, preference losses, controllers and shaping, with inputs of their own."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from learner import advantages, corrections, losses, preference, returns, shaping
from learner.conformance_inputs import NUMBER, Case, Document, choices, error, numbers, tensor
from learner.conformance_tables import trained
from learner.logprobs import chunked_logprobs
from learner.objective import policy_loss, value_loss
from learner.segments import Denominators, Segments


def _ppo_critic(name: str, case: Case, doc: Document) -> dict[str, float]:
    words, inputs = str(case["algo"]), case["inputs"]
    gamma, lam = numbers(name.split("/")[-1])
    beta = float(re.search(rf"beta=({NUMBER})", words)[1])  # type: ignore[index]
    value_clip = float(re.search(rf"value clip ({NUMBER})", words)[1])  # type: ignore[index]
    clip = case.get("config", {})
    c = choices(
        advantage="gae", gamma=gamma, lam=lam, kl_coef=beta, kl_kind="k1", kl_in="reward", value_clip=value_clip,
        clip_low=clip.get("lo", 0.2), clip_high=clip.get("hi", 0.2), value_coef=0.5,
    )  # fmt: skip
    mask = tensor(inputs["mask"]).bool()
    n, width = mask.shape
    flat, ids, groups = mask.reshape(-1), torch.arange(n).repeat_interleave(width), torch.arange(n)
    seq = Segments(ids, n, flat)
    logp_old, logp_ref = tensor(inputs["logp_old"]), tensor(inputs["logp_ref"])
    v_old, v = tensor(inputs["values_old"]), tensor(inputs["values_new"]).requires_grad_()
    k1 = losses.kl(logp_old, logp_ref, "k1").reshape(-1)
    adv = advantages.compute(
        c,
        rewards=tensor(inputs["score"]),
        group_ids=groups,
        mask=flat,
        sequence_ids=ids,
        token_kl=k1,
        values=v_old.reshape(-1),
    )
    assert adv.returns is not None
    logp = tensor(inputs["logp"]).requires_grad_()
    d = Denominators.count(flat, ids, groups)
    loss, metrics = policy_loss(
        c, logprobs=logp, old_logprobs=logp_old, behaviour_logprobs=logp_old, advantages=adv.per_token, mask=mask,
        group_ids=groups, denominators=d,
    )  # fmt: skip
    returned = adv.returns.reshape(mask.shape)
    critic, critic_metrics = value_loss(c, values=v, old_values=v_old, returns=returned, mask=mask, denominators=d)
    (loss + critic).backward()
    charge = torch.where(flat, beta * k1, 0.0)
    got: dict[str, Any] = {
        "token_rewards": returns.token_rewards(tensor(inputs["score"]), charge, seq).reshape(mask.shape),
        "advantages_raw": torch.where(mask, returned - v_old, 0.0),
        "returns": returned,
        "advantages_whitened": adv.per_token.reshape(mask.shape),
        "ratio": (logp.detach() - logp_old).exp(),
        "policy_loss": loss,
        "clip_fraction": metrics.finish()["policy/clip_fraction"],
        "dloss_dlogprob": logp.grad,
        "value_loss": critic,
        "value_clip_fraction": critic_metrics.finish()["critic/clip_fraction"],
        "dvalueloss_dvalue": v.grad,
    }
    return {k: error(x, case[k]) for k, x in got.items() if k in case}


def _dpo(name: str, case: Case, doc: Document) -> dict[str, float]:
    mask = doc.mask(name, case)
    n, width = mask.shape
    ids = torch.arange(n).repeat_interleave(width)
    seq = Segments(ids, n, mask.reshape(-1))
    pairs = torch.tensor(case["pairs"])
    chosen, rejected = pairs[:, 0], pairs[:, 1]
    logp, ref = doc.column("logp"), doc.column("logp_ref")

    def difference(average: bool) -> Tensor:
        return preference.log_ratio_difference(logp.reshape(-1), ref.reshape(-1), seq, chosen, rejected, average)

    errors = {
        "seq_logp": error(seq.sum(logp.reshape(-1)), case["seq_logp"]),
        "seq_ref_logp": error(seq.sum(ref.reshape(-1)), case["seq_ref_logp"]),
        "delta": error(difference(False), case["delta"]),
        "delta_per_token_avg": error(difference(True), case["delta_per_token_avg"]),
    }
    for key in ("sigmoid", "cdpo", "robust", "ipo_sum", "ipo_avg", "hinge"):
        if key not in case:
            continue
        c = choices(
            objective="preference",
            preference_loss=key.split("_")[0],
            preference_beta=case["beta"],
            label_smoothing=case["label_smoothing"] if key in ("cdpo", "robust") else 0.0,
            length_normalized=key.endswith("_avg"),
        )
        leaf = logp.clone().requires_grad_()
        loss, _ = preference.preference_loss(
            c, logprobs=leaf.reshape(-1), ref_logprobs=ref.reshape(-1), mask=mask.reshape(-1), sequence_ids=ids,
            n_sequences=n, chosen=chosen, rejected=rejected, pairs=float(len(pairs)),
        )  # fmt: skip
        loss.backward()
        errors[f"{key}.loss"] = error(loss, case[key]["loss"])
        errors[f"{key}.grad"] = error(leaf.grad if leaf.grad is not None else math.nan, case[key]["grad"])
    return errors


def _adaptive_kl(name: str, case: Case, doc: Document) -> dict[str, float]:
    coef, errors = float(case["init"]), {}
    for i, row in enumerate(case["trace"]):
        before = coef
        coef = losses.adaptive_kl(coef, row["kl"], case["target"], case["n_steps"], case["horizon"])
        errors[f"coef {i}"] = error(coef, row["coef"])
        if "err" in row:
            errors[f"err {i}"] = error((coef / before - 1) * case["horizon"] / case["n_steps"], row["err"])
    return errors


def _entropy(name: str, case: Case, doc: Document) -> dict[str, float]:
    """Logits h = z and W = identity go through the chunked head that training uses, one row at a time."""
    logits = tensor(case["logits"]).requires_grad_()
    eye = torch.eye(logits.shape[1], dtype=torch.float64)
    _, entropy = chunked_logprobs(logits, eye, torch.zeros(len(logits), dtype=torch.long), chunk=1)
    entropy.sum().backward()
    got: dict[str, Any] = {"entropy": entropy, "mean": entropy.mean(), "dH_dlogits": logits.grad}
    return {k: error(x, case[k]) for k, x in got.items() if k in case}


def _soft_overlong(name: str, case: Case, doc: Document) -> dict[str, float]:
    limit, cache = float(case["L_max"]), float(case["L_cache"])
    errors = {}
    for key, floor in {"table": -1.0, "verl_style_uncapped": None}.items():
        for length, want in case.get(key, {}).items():
            got = shaping.soft_overlong(tensor([float(length)]), limit, cache, floor=floor)[0]
            errors[f"{key} {length}"] = error(got, want)
    return errors


def _linear_length(name: str, case: Case, doc: Document) -> dict[str, float]:
    shaped = shaping.linear_length(tensor(case["rewards"]), tensor(case["out_tokens"]), case["weight"])
    return {
        "shaped": error(shaped, case["shaped"]),
        "advantages": error(trained(shaped, advantage="group_mean"), case["advantages"]),
    }


def _kimi_length(name: str, case: Case, doc: Document) -> dict[str, float]:
    return {"reward": error(shaping.kimi_length(tensor(case["lengths"]), tensor(case["correct"])), case["reward"])}


def _loglinear_prox(name: str, case: Case, doc: Document) -> dict[str, float]:
    logp, mu = doc.column("logp"), doc.column("logp_behave")
    now, then = tensor(case["v_theta"]), tensor(case["v_behave"])
    prox = corrections.loglinear_prox(logp, mu, now, then)
    alpha = corrections.loglinear_alpha(now, then)
    return {"alpha": error(alpha, case["alpha"]), "logp_prox": error(prox, case["logp_prox"])}


LEARNING: dict[str, Callable[[str, Case, Document], dict[str, float]]] = {
    "ppo_critic": _ppo_critic,
    "dpo": _dpo,
    "adaptive_kl_controller": _adaptive_kl,
    "entropy": _entropy,
    "dapo_soft_overlong": _soft_overlong,
    "length_penalty_primerl_linear": _linear_length,
    "length_reward_kimi_k1.5": _kimi_length,
    "areal_loglinear_prox": _loglinear_prox,
}
