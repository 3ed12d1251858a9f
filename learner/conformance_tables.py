"""Golden cases that are tables of rewards and advantages, with inputs of their own.

A row says in words which peer's convention it holds ("grpo_ddof1_eps1e-6 (verl,slime,SkyRL)"); its eps and ddof are
read from those words and passed as parameters. A row nobody can read is Unimplemented.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from learner import advantages, returns
from learner.advantages import Groups
from learner.conformance_inputs import NUMBER, Case, Document, Unimplemented, choices, dense, error, tensor

GDPO_EPS = 1e-4  # TRL's, which the multi_reward case was made with
OFFICIAL_EPS = 1e-6  # tajwarfahim/maxrl


def _one_group(rewards: Any) -> tuple[Tensor, Groups]:
    r = tensor(rewards)
    return r, Groups.of(r, torch.zeros(len(r), dtype=torch.long))


def trained(rewards: Any, group_ids: Tensor | None = None, mask: Tensor | None = None, **values: Any) -> Tensor:
    """advantages.compute as training calls it: [N], or [N, L] where a mask is given."""
    r = torch.as_tensor(rewards) if isinstance(rewards, Tensor) else tensor(rewards)
    groups = torch.zeros(len(r), dtype=torch.long) if group_ids is None else group_ids
    grid = torch.ones(len(r), 1, dtype=torch.bool) if mask is None else mask
    ids = torch.arange(len(r)).repeat_interleave(grid.shape[1])
    c = choices(**values)
    out = advantages.compute(c, rewards=r, group_ids=groups, mask=grid.reshape(-1), sequence_ids=ids).per_token
    return out.reshape(grid.shape) if mask is not None else out


def _table_row(label: str, rewards: Any) -> Tensor | float | bool:
    r, g = _one_group(rewards)
    grpo = re.match(rf"grpo_ddof(\d)_eps({NUMBER})", label)
    if grpo:
        return trained(rewards, advantage="group_std", advantage_ddof=int(grpo[1]), advantage_eps=float(grpo[2]))
    if label == "mean":
        return g.mean(r)[0]
    if label.startswith("dr_grpo"):
        return trained(rewards, advantage="group_mean")
    if label == "rloo":
        return trained(rewards, advantage="leave_one_out")
    if label.startswith("rloo == N/(N-1)"):
        scaled = advantages.group_mean(r, g) * len(r) / max(len(r) - 1, 1)
        return bool(torch.allclose(advantages.leave_one_out(r, g), scaled, rtol=0, atol=1e-12))
    if label.startswith("passk"):
        return trained(rewards, advantage="pass_at_k")
    if label.startswith("maxrl paper"):
        return trained(rewards, advantage="maxrl")
    if label.startswith("maxrl official"):
        eps = re.search(rf"mean\+({NUMBER})", label)
        return advantages.maxrl(r, g, float(eps[1]) if eps else OFFICIAL_EPS, guarded=False)
    raise Unimplemented(f"advantage_table row {label!r}")


def _advantage_table(name: str, case: Case, doc: Document) -> dict[str, float]:
    return {
        f"{row}: {label}": error(_table_row(label, entry["rewards"]), want)
        for row, entry in case["table"].items()
        for label, want in entry.items()
        if label != "rewards"
    }


def _two_groups_row(label: str, rewards: Any, ids: Tensor, mask: Tensor) -> Tensor:
    eps_found, ddof_found = re.search(rf"eps ?({NUMBER})", label), re.search(r"ddof(\d)", label)
    eps, ddof = float(eps_found[1]) if eps_found else 0.0, int(ddof_found[1]) if ddof_found else 1
    r = tensor(rewards)
    if label.startswith("group mean, group std"):
        return trained(r, ids, advantage="group_std", advantage_eps=eps, advantage_ddof=ddof)
    if label.startswith("group mean, batch std"):
        return trained(r, ids, advantage="batch_std", advantage_eps=eps, advantage_ddof=ddof)
    if label.startswith("group mean, no std"):
        return trained(r, ids, advantage="group_mean")
    if label.startswith("leave-one-out"):
        return trained(r, ids, advantage="leave_one_out")
    if label.startswith("MaxRL"):
        return trained(r, ids, advantage="maxrl")
    if label.startswith("batch mean only"):
        return trained(r, ids, advantage="batch_mean")
    if label.startswith("REINFORCE++"):
        kind = "reinforce_pp_baseline" if "baseline" in label else "reinforce_pp"
        return trained(r, ids, mask, advantage=kind, whiten_ddof=ddof)
    if label.startswith("AReaL"):
        a = trained(r, ids, mask, advantage="group_std", advantage_eps=eps, advantage_ddof=ddof)
        return returns.whiten(a, mask, eps, ddof, eps_in="std")
    if "RLOO normalize_advantages" in label:
        a = trained(r, ids, advantage="leave_one_out")
        return returns.whiten(a, torch.ones_like(a, dtype=torch.bool), eps, ddof, eps_in="std")
    raise Unimplemented(f"two_groups row {label!r}")


def _two_groups(name: str, case: Case, doc: Document) -> dict[str, float]:
    ids, mask = dense(case["group_ids"]), tensor(case["mask"]).bool()
    return {k: error(_two_groups_row(k, case["rewards"], ids, mask), want) for k, want in case["advantages"].items()}


def _maxrl_unbiasedness(name: str, case: Case, doc: Document) -> dict[str, float]:
    """Exact expectations over K ~ Binomial(N, p) of (1/N) sum_i A_i S_i, S = d log P(outcome) / dp."""
    p, n = float(case["p"]), int(case["N"])
    expected = {"E_success_average": 0.0, "E_centered_zero_when_K0": 0.0, "E_centered_if_K0_kept_minus1": 0.0}
    for k in range(n + 1):
        chance = math.comb(n, k) * p**k * (1 - p) ** (n - k)
        r = tensor([1.0] * k + [0.0] * (n - k))
        score = r / p - (1 - r) / (1 - p)
        deployed = trained(r, advantage="maxrl")
        success = r / r.mean() if k else torch.zeros_like(r)
        for key, a in {
            "E_success_average": success,
            "E_centered_zero_when_K0": deployed,
            "E_centered_if_K0_kept_minus1": deployed if k else -torch.ones_like(r),
        }.items():
            expected[key] += chance * float((a * score).mean())
    targets = {
        "target_gradient": sum((1 - p) ** (k - 1) for k in range(1, n + 1)),
        "target_gradient_order_N_minus_1": sum((1 - p) ** (k - 1) for k in range(1, n)),
    }
    return {k: error(v, case[k]) for k, v in (expected | targets).items() if k in case}


def _equal_rewards(name: str, case: Case, doc: Document) -> dict[str, float]:
    """In float32, whatever the eps, an all-equal group gives exactly 0."""
    errors = {}
    for label, entry in case["table"].items():
        count, value = re.fullmatch(rf"(\d+) x (-?{NUMBER})", label).groups()  # type: ignore[union-attr]
        r = torch.full((int(count),), float(value), dtype=torch.float32)
        g = Groups.of(r, torch.zeros(len(r), dtype=torch.long))
        for eps in [e for key in entry for e in re.findall(rf"eps=({NUMBER})", key)] or ["1e-6"]:
            raw = advantages.exact_zeros(advantages.group_std(r, g, float(eps), 1), g, r)
            errors[f"{label}: eps {eps}"] = error(raw, entry["expected"])
            through = trained(r, advantage="group_std", advantage_eps=float(eps))
            errors[f"{label}: compute, eps {eps}"] = error(through, entry["expected"])
    return errors


def _multi_reward(name: str, case: Case, doc: Document) -> dict[str, float]:
    parts, weights = tensor(case["components"]), tensor(case["weights"])
    ids = torch.zeros(len(parts), dtype=torch.long) if "group_ids" not in case else dense(case["group_ids"])
    total = parts @ weights
    eps = float(case.get("eps", GDPO_EPS))
    one = torch.ones(len(parts), dtype=torch.bool)
    shared: dict[str, Any] = {"rewards": total, "group_ids": ids, "mask": one, "sequence_ids": torch.arange(len(parts))}
    summed = advantages.compute(choices(advantage_eps=eps), **shared)
    apart = advantages.compute(
        choices(advantage_eps=eps, components="normalize_then_sum"),
        components=parts,
        component_weights=weights,
        **shared,
    )
    got = {
        "weighted_sum": total,
        "grpo_sum_then_normalize": summed.per_token,
        "gdpo_normalize_then_sum": apart.per_token,
    }
    return {k: error(v, case[k]) for k, v in got.items() if k in case}


def _dynamic_sampling(name: str, case: Case, doc: Document) -> dict[str, float]:
    """Which groups carry signal. A text instead of true/false describes how peers differ; ours drops a group of one."""
    errors = {}
    for label, want in case["examples"].items():
        metric = tensor(json.loads(label))
        kept = bool(advantages.keep_group(metric, torch.zeros(len(metric), dtype=torch.long))[0])
        errors[label] = error(kept, want if isinstance(want, bool) else len(metric) > 1)
    return errors


TABLES: dict[str, Callable[[str, Case, Document], dict[str, float]]] = {
    "advantage_table": _advantage_table,
    "two_groups": _two_groups,
    "maxrl_unbiasedness": _maxrl_unbiasedness,
    "equal_rewards_float32": _equal_rewards,
    "multi_reward": _multi_reward,
    "dynamic_sampling": _dynamic_sampling,
}
