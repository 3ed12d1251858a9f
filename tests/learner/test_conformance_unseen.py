"""Golden files nobody has seen: a second implementation, in scalar Python with closed-form gradients written from the
definitions, makes files with random numbers, masks (holes, empty answers), sample counts, widths and groups; every
case of them must be replayed exactly."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from learner import conformance

Grid = list[list[float]]
Token = Callable[[float, float, float, float], tuple[float, float]]  # l, base, mu, A -> loss, dloss/dl


def clip_token(low: float, high: float, dual: float | None = None) -> Token:
    def f(l: float, base: float, mu: float, A: float) -> tuple[float, float]:  # noqa: E741
        r = math.exp(l - base)
        bounded = min(max(r, 1 - low), 1 + high)
        loss, grad = (-r * A, -r * A) if -r * A >= -bounded * A else (-bounded * A, 0.0)
        return (-dual * A, 0.0) if dual and A < 0 and loss > -dual * A else (loss, grad)

    return f


def cispo_token(low: float, high: float) -> Token:
    def f(l: float, base: float, mu: float, A: float) -> tuple[float, float]:  # noqa: E741
        w = min(max(math.exp(l - base), low), high)
        return -w * A * l, -w * A

    return f


def sapo_token(tau_pos: float, tau_neg: float) -> Token:
    def f(l: float, base: float, mu: float, A: float) -> tuple[float, float]:  # noqa: E741
        r, tau = math.exp(l - base), tau_pos if A > 0 else tau_neg
        s = 1 / (1 + math.exp(-tau * (r - 1)))
        return -4 / tau * s * A, -4 * s * (1 - s) * r * A

    return f


def trust_token(high: float, low: float, both_sides: bool, tau: float) -> Token:
    def f(l: float, base: float, mu: float, A: float) -> tuple[float, float]:  # noqa: E741
        moved = math.exp(l) - math.exp(mu)
        out = abs(moved) > high if both_sides else (A > 0 and moved > high) or (A < 0 and moved < -low)
        pg = 0.0 if out else -math.exp(l - mu) * A
        return pg + tau * (l - mu) ** 2, pg + 2 * tau * (l - mu)

    return f


def aipo_surrogate_token(rho: float) -> Token:
    def f(l: float, base: float, mu: float, A: float) -> tuple[float, float]:  # noqa: E741
        r = math.exp(l - mu)
        return (-r * A, -r * A) if r <= rho else (-rho * A, 0.0)

    return f


class World:
    """Random inputs and the scalar reference's answers. `full` has no holes; `ragged` has, and maybe empty rows."""

    def __init__(self, seed: int, groups: list[int], width: int, empty: bool) -> None:
        rnd = random.Random(seed)
        n = len(groups)

        def grid(low: float, high: float) -> Grid:
            return [[rnd.uniform(low, high) for _ in range(width)] for _ in range(n)]

        self.old, self.ref, self.l = grid(-3, -0.1), grid(-3, -0.1), grid(-3, -0.1)
        self.mu = [[x + rnd.uniform(-1, 1) for x in row] for row in self.old]
        self.groups, self.n, self.width = groups, n, width
        self.rewards = [rnd.choice([0.0, 0.0, 0.5, 1.0]) + rnd.random() / 8 for _ in range(n)]
        ragged = [[float(rnd.random() < 0.6) for _ in range(width)] for _ in range(n)]
        for i, row in enumerate(ragged):
            if not any(row) or i == n - 1:
                row[:] = [0.0] * width if empty else [1.0] + [0.0] * (width - 1)
        self.masks = {"full": [[1.0] * width for _ in range(n)], "ragged": ragged}
        self.L_max = 11.0

    # ---- advantages, one number per answer

    def members(self, i: int) -> list[float]:
        return [r for r, g in zip(self.rewards, self.groups, strict=True) if g == self.groups[i]]

    def advantage(self, kind: str) -> list[float]:
        out = []
        for i, r in enumerate(self.rewards):
            rs = self.members(i)
            n, mean = len(rs), sum(rs) / len(rs)
            if n < 2 or max(rs) - min(rs) <= 1e-6:
                out.append(0.0)
            elif kind == "std":
                out.append((r - mean) / math.sqrt(sum((x - mean) ** 2 for x in rs) / (n - 1)))
            elif kind == "mean":
                out.append(r - mean)
            elif kind == "rloo":
                out.append(r - (sum(rs) - r) / (n - 1))
            elif kind == "maxrl":
                out.append((r - mean) / mean)
        return out

    def whitened(self, values: list[float], mask: Grid) -> list[float]:
        flat = [v for v, row in zip(values, mask, strict=True) for m in row if m]
        mean = sum(flat) / len(flat)
        var = sum((x - mean) ** 2 for x in flat) / (len(flat) - 1)
        return [(v - mean) / math.sqrt(var + 1e-8) for v in values]

    # ---- averaging

    def weight(self, agg: str, mask: Grid, i: int) -> float:
        lengths = [sum(row) for row in mask]
        b = sum(x > 0 for x in lengths)
        return {
            "token-mean": 1 / max(sum(lengths), 1),
            "seq-mean-token-mean": 1 / (b * max(lengths[i], 1)),
            "seq-mean-token-sum": 1 / b,
            "dr-grpo": 1 / (b * self.L_max),
            "token-sum": 1.0,
        }[agg]

    def live(self, mask: Grid, i: int) -> list[int]:
        return [t for t in range(self.width) if mask[i][t]]

    def case(
        self, mask: str, A: list[float], agg: str, token: Token, weights: Grid | None = None, **config: Any
    ) -> dict[str, Any]:
        m, loss = self.masks[mask], 0.0
        grad = [[0.0] * self.width for _ in range(self.n)]
        for i in range(self.n):
            for t in self.live(m, i):
                value, slope = token(self.l[i][t], self.old[i][t], self.mu[i][t], A[i])
                scale = self.weight(agg, m, i) * (weights[i][t] if weights else 1.0)
                loss += scale * value
                grad[i][t] = scale * slope
        spread = [[a if on else 0.0 for on in row] for a, row in zip(A, m, strict=True)]
        return {
            "algo": "",
            "config": {"agg": agg, **config},
            "mask": m,
            "advantages": spread,
            "loss": loss,
            "dloss_dlogprob": grad,
        }

    def sequence_case(
        self,
        mask: str,
        A: list[float],
        f: Callable[[list[float], float, int], tuple[float, list[float]]],
        agg: str,
        **config: Any,
    ) -> dict[str, Any]:
        """f(log-ratios of the unmasked tokens, A, length) -> (L_i, dL_i/dl per token)."""
        m, loss = self.masks[mask], 0.0
        grad = [[0.0] * self.width for _ in range(self.n)]
        for i in range(self.n):
            at = self.live(m, i)
            if not at:
                continue
            value, slopes = f([self.l[i][t] - self.old[i][t] for t in at], A[i], len(at))
            scale = self.weight(agg, m, i) * len(at)  # spread over its tokens
            loss += scale * value
            for t, slope in zip(at, slopes, strict=True):
                grad[i][t] = scale * slope
        return {"algo": "", "config": config, "mask": m, "loss": loss, "dloss_dlogprob": grad}

    def behaviour_weights(self, mask: str, kind: str, low: float, high: float) -> Grid:
        m = self.masks[mask]
        out = [[0.0] * self.width for _ in range(self.n)]
        for i in range(self.n):
            at = self.live(m, i)
            logs = [self.old[i][t] - self.mu[i][t] for t in at]
            product, mean = math.exp(sum(logs)), math.exp(sum(logs) / max(len(logs), 1))
            for t, x in zip(at, logs, strict=True):
                w = math.exp(x)
                out[i][t] = {
                    "uncapped": w,
                    "tis": min(max(w, low), high),
                    "mis": w if low <= w <= high else 0.0,
                    "seq_tis": min(product, high),
                    "seq_mis": product if low <= product <= high else 0.0,
                    "geo_mis": w if low <= mean <= high else 0.0,
                }[kind]
        return out


def gspo_sequence(low: float, high: float, power: Callable[[int], float]) -> Callable[..., tuple[float, list[float]]]:
    def f(d: list[float], A: float, n: int) -> tuple[float, list[float]]:
        s = math.exp(sum(d) * power(n))
        bounded = min(max(s, 1 - low), 1 + high)
        if -s * A >= -bounded * A:
            return -s * A, [-s * A * power(n)] * n
        return -bounded * A, [0.0] * n

    return f


def gmpo_sequence(low: float, high: float) -> Callable[..., tuple[float, list[float]]]:
    def f(d: list[float], A: float, n: int) -> tuple[float, list[float]]:
        cut = [x > high if A > 0 else x < -low for x in d]
        s = math.exp(sum((high if A > 0 else -low) if c else x for x, c in zip(d, cut, strict=True)) / n)
        return -s * A, [0.0 if c else -s * A / n for c in cut]

    return f


def opmd_sequence(tau: float) -> Callable[..., tuple[float, list[float]]]:
    def f(d: list[float], A: float, n: int) -> tuple[float, list[float]]:
        gap = A / tau - sum(d)
        return 0.5 * tau * gap**2 / n, [-tau * gap / n] * n

    return f


def unseen(seed: int, groups: list[int], width: int, empty: bool) -> dict[str, Any]:
    w = World(seed, groups, width, empty)
    cases: dict[str, Any] = {}
    for m in ("full", "ragged"):
        std, mean = w.advantage("std"), w.advantage("mean")
        for agg in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "dr-grpo"):
            cases[f"grpo/{m}/{agg}"] = w.case(m, std, agg, clip_token(0.15, 0.25), lo=0.15, hi=0.25)
        cases[f"dapo/{m}"] = w.case(m, std, "token-mean", clip_token(0.1, 0.4), lo=0.1, hi=0.4)
        cases[f"dual_clip/{m}"] = w.case(m, std, "token-mean", clip_token(0.1, 0.4, 2.5), lo=0.1, hi=0.4, dual=2.5)
        cases[f"dr_grpo/{m}"] = w.case(m, mean, "dr-grpo", clip_token(0.2, 0.2), lo=0.2, hi=0.2)
        cases[f"rloo/{m}/token-mean"] = w.case(
            m, w.advantage("rloo"), "token-mean", clip_token(0.3, 0.3), lo=0.3, hi=0.3
        )
        cases[f"maxrl/{m}/token-mean"] = w.case(
            m, w.advantage("maxrl"), "token-mean", clip_token(0.2, 0.2), lo=0.2, hi=0.2
        )
        for family, base in (("reinforcepp", w.rewards), ("reinforcepp_baseline", mean)):
            A = w.whitened(base, w.masks[m])
            cases[f"{family}/{m}"] = w.case(m, A, "token-mean", clip_token(0.2, 0.2), lo=0.2, hi=0.2)
        cases[f"cispo/{m}/max3_low0.5"] = w.case(m, std, "token-mean", cispo_token(0.5, 3.0), lo_abs=0.5, hi_abs=3.0)
        for agg in ("token-mean", "seq-mean-token-mean"):
            cases[f"sapo/{m}/{agg}"] = w.case(m, std, agg, sapo_token(1.3, 0.7), tp=1.3, tn=0.7)
        f = gspo_sequence(0.02, 0.05, lambda n: 1 / n)
        cases[f"gspo/{m}/0.02_0.05"] = w.sequence_case(m, std, f, "seq-mean-token-mean", lo=0.02, hi=0.05)
        cases[f"gspo_tokenmean/{m}/0.02_0.05"] = w.sequence_case(m, std, f, "token-mean", lo=0.02, hi=0.05)
        cases[f"gmpo/{m}"] = w.sequence_case(m, std, gmpo_sequence(0.3, 0.6), "seq-mean-token-mean", lo=0.3, hi=0.6)
        f = gspo_sequence(0.2, 0.2, lambda n: 1.0)
        cases[f"rloo_sequence_action/{m}"] = w.sequence_case(
            m, w.advantage("rloo"), f, "seq-mean-token-mean", lo=0.2, hi=0.2
        )
        cases |= off_policy_cases(w, m, std, mean)
        cases |= kl_cases(w, m)
    return {
        "meta": {"Dr_GRPO_L_max": w.L_max},
        "inputs": {
            "logp": w.l, "logp_old": w.old, "logp_behave": w.mu, "logp_ref": w.ref, "rewards": w.rewards,
            "group_ids": w.groups, "masks": w.masks,
        },
        "cases": cases,
    }  # fmt: skip


def off_policy_cases(w: World, m: str, std: list[float], mean: list[float]) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    for name, kind, low, high in (
        ("decoupled_uncapped", "uncapped", 0.0, math.inf),
        ("tis_token_C1.7", "tis", 0.0, 1.7),
        ("tis_token_clip_0.6_1.5", "tis", 0.6, 1.5),
        ("mis_token_0.6_1.5", "mis", 0.6, 1.5),
        ("icepop_0.4_2.5", "mis", 0.4, 2.5),
        ("areal_token_mask_cap1.9", "mis", 0.0, 1.9),
        ("tis_seq_C1.4", "seq_tis", 0.0, 1.4),
        ("mis_seq_0.3_3", "seq_mis", 0.3, 3.0),
        ("trl_default_seq_mask_max2.5", "seq_mis", 0.0, 2.5),
        ("geo_mask_0.7_1.3_tokenIS", "geo_mis", 0.7, 1.3),
    ):
        weights = w.behaviour_weights(m, kind, low, high)
        case = w.case(m, std, "token-mean", clip_token(0.2, 0.28), weights, lo=0.2, hi=0.28)
        case["config"]["agg"] += ", ORIGINAL token count in the denominator"
        case["behav_weight"] = weights
        tokens = [(i, t) for i in range(w.n) for t in w.live(w.masks[m], i)]
        if kind.endswith("mis"):
            case["filtered_fraction"] = sum(weights[i][t] == 0 for i, t in tokens) / len(tokens)
        cases[f"offpolicy/{m}/{name}"] = case

    def on_mu(token: Token) -> Token:
        return lambda logp, base, mu, A: token(logp, mu, mu, A)

    cases[f"offpolicy/{m}/bypass_ppo_clip"] = w.case(m, std, "token-mean", on_mu(clip_token(0.1, 0.3)), lo=0.1, hi=0.3)
    cases[f"offpolicy/{m}/aipo_rho1.5"] = w.case(m, std, "token-mean", on_mu(cispo_token(0.0, 1.5)), rho=1.5)
    cases[f"offpolicy/{m}/aipo_surrogate_rho1.5"] = w.case(m, std, "token-mean", aipo_surrogate_token(1.5), rho=1.5)
    cases[f"offpolicy/{m}/importance_sampling_tinker"] = w.case(m, std, "token-sum", aipo_surrogate_token(math.inf))
    cases[f"offpolicy/{m}/primerl_default_dppo"] = w.case(
        m, std, "token-mean", trust_token(0.25, 0.15, False, 0.01), lo=0.15, hi=0.25, kl_tau=0.01
    )
    cases[f"offpolicy/{m}/primerl_ipo_0.2"] = w.case(
        m, std, "token-mean", trust_token(0.2, 0.2, True, 0.02), thr=0.2, kl_tau=0.02
    )
    cases[f"offpolicy/{m}/opmd_tau0.3"] = w.sequence_case(m, mean, opmd_sequence(0.3), "seq-mean-token-mean", tau=0.3)
    drift = [
        sum(w.mu[i][t] - w.l[i][t] for t in w.live(w.masks[m], i)) / max(len(w.live(w.masks[m], i)), 1)
        for i in range(w.n)
    ]
    cases[f"offpolicy/{m}/opsm_delta0.2"] = {
        "algo": "", "seq_kl": drift,
        "keep": [float(not (a < 0 and d > 0.2)) for a, d in zip(mean, drift, strict=True)],
    }  # fmt: skip
    return cases


def kl_cases(w: World, m: str) -> dict[str, Any]:
    cases = {}
    for kind in ("k1", "k2", "k3", "k3_x_ratio"):

        def f(l: float, base: float, ref: float, A: float, kind: str = kind) -> tuple[float, float]:  # noqa: E741
            d, r = l - ref, math.exp(l - base)
            k3 = math.exp(-d) - 1 + d
            return {
                "k1": (d, 1.0), "k2": (d * d / 2, d), "k3": (k3, 1 - math.exp(-d)), "k3_x_ratio": (r * k3, r * d),
            }[kind]  # fmt: skip

        swapped, w.mu = w.mu, w.ref
        case = w.case(m, [0.0] * w.n, "token-mean", f)
        w.mu = swapped
        cases[f"kl/{m}/{kind}"] = {k: case[k] for k in ("algo", "mask", "loss", "dloss_dlogprob")}
    return cases


@pytest.mark.parametrize(
    ("seed", "groups", "width", "empty"),
    [
        (0, [0, 0, 0, 0], 3, False),
        (1, [0, 0, 0, 1, 1, 1, 1], 5, False),
        (2, [4, 4, 4, 9, 9, 9, 2, 2], 9, True),
        (3, [0, 1, 0, 1, 0, 1, 1, 0], 6, True),  # groups interleaved
        (4, [0, 0, 1], 4, False),  # a group of one
        (5, [0, 0], 1, False),  # one token each
    ],
)
def test_unseen_files_are_replayed_exactly(seed: int, groups: list[int], width: int, empty: bool) -> None:
    document = unseen(seed, groups, width, empty)
    outcomes = conformance.run(document)
    assert len(outcomes) == len(document["cases"]) == 80
    assert [(o.name, o.note, {k: e for k, e in o.errors.items() if e > 1e-9}) for o in outcomes if not o.passed] == []
