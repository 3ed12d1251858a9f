"""From rewards to advantages. Critic-free group baselines here; per-token returns (PPO, REINFORCE++) in returns.py.

Legend
    rewards    [N]  one per answer, float; NaN = the reward failed or timed out (an error is never a zero)
    group_ids  [N]  which prompt an answer belongs to, 0..n_groups-1, any group sizes, any order
    scored     [N]  bool, the reward is finite; the others take no part in any statistic and get A = 0
    n, mean, std    of the scored answers of a group

Outcomes at the edges, the same for every estimator: a group of one scored answer, an all-equal
group (max - min <= 1e-6) and an unscored answer get A = 0 EXACTLY and are counted. Never rely on eps for that: in
float32 the mean of seven times 0.1 is off by one unit in the last place; divided by a std of that size it gives 0.8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from learner import returns
from learner.choices import TOKEN_ADVANTAGES, Choices
from learner.metric_sums import MetricSums
from learner.segments import Groups, Reduce, Segments, alone

# ------------------------------------------------------------ estimators, A [N]
# Each returns raw values; `finished` below puts the exact zeros in.


def group_std(r: Tensor, g: Groups, eps: float, ddof: int) -> Tensor:
    """GRPO, DeepSeekMath 2402.03300: A_i = (r_i - mean) / (std + eps)."""
    return group_mean(r, g) / (_group_std(r, g, ddof) + eps)


def group_mean(r: Tensor, g: Groups) -> Tensor:
    """Dr.GRPO, 2503.20783: A_i = r_i - mean."""
    return r - g.mean(r)


def leave_one_out(r: Tensor, g: Groups) -> Tensor:
    """RLOO, 2402.14740: A_i = r_i - mean of the others = n / (n - 1) (r_i - mean)."""
    n = g.size(r.dtype)[g.ids]
    return group_mean(r, g) * n / (n - 1).clamp(min=1)


def batch_std(r: Tensor, g: Groups, eps: float, ddof: int, reduce: Reduce = alone) -> Tensor:
    """LitePPO, 2508.08221: group mean, std of ALL rewards of the step: A_i = (r_i - mean) / (std_batch + eps)."""
    _, var = returns.moments(r, g.scored, ddof, reduce)
    return group_mean(r, g) / (var.sqrt() + eps)


def batch_mean(r: Tensor, g: Groups, reduce: Reduce = alone) -> Tensor:
    """OpenRLHF's flash_reinforce: A_i = r_i - mean of all rewards of the step."""
    mean, _ = returns.moments(r, g.scored, 0, reduce)
    return r - mean


def maxrl(r: Tensor, g: Groups, eps: float = 0.0, guarded: bool = True) -> Tensor:
    """MaxRL, 2602.02710, the deployed centred form: A_i = (r_i - mean) / (mean + eps), 0 for a group with mean <= 0.

    Its expectation is the gradient of the order-(N-1) truncation of log p, not of order N.
    guarded=False is the official code as it stands, to compare with: a negative mean flips signs and a lone answer
    gets r / eps. Training never uses it.
    """
    if not guarded:
        mean = torch.where(g.size(r.dtype)[g.ids] > 1, g.mean(r), 0.0)
        return (r - mean) / (mean + eps)
    mean = g.mean(r)
    usable = mean > 0
    return torch.where(usable, (r - mean) / torch.where(usable, mean + eps, torch.ones_like(mean)), 0.0)


def opo(r: Tensor, g: Groups, lengths: Tensor) -> Tensor:
    """OPO, 2505.23585: the variance-optimal baseline weighs rewards by length, A_i = r_i - sum l r / sum l."""
    length = lengths.to(r.dtype)
    return r - (g.sum(length * r) / g.sum(length).clamp(min=1))[g.ids]


def pass_at_k(r: Tensor, g: Groups) -> Tensor:
    """Pass@k training, 2503.19595: the best answer gets best - second best, the others 0 (a tie at the top gives 0)."""
    best = g.extreme(r, "amax")[g.ids]
    is_best = g.scored & (r == best)
    ties = Segments(g.ids, g.n, g.scored).sum(is_best.to(r.dtype))[g.ids]
    second = g.extreme(torch.where(is_best, torch.full_like(r, -torch.inf), r), "amax")[g.ids]
    lone = is_best & (ties == 1) & torch.isfinite(second)
    return torch.where(lone, best - second, 0.0)


def normalize_then_sum(
    components: Tensor, weights: Tensor, group_ids: Tensor, eps: float, ddof: int, reduce: Reduce = alone
) -> Tensor:
    """GDPO, 2601.05242: A = whiten_batch(sum_k w_k (r_k - mean_k) / (std_k + eps)); components [N, K], weights [K].

    A component that is equal across a group adds exactly 0 there. Batch whitening is (x - mean) / (std + eps).
    """
    total = torch.zeros_like(components[:, 0])
    for k, weight in enumerate(weights):
        r = components[:, k]
        g = Groups.of(r, group_ids)
        total = total + weight * exact_zeros(group_std(r, g, eps, ddof), g, r)
    scored = torch.isfinite(components).all(dim=1)
    return returns.whiten(total, scored, eps, ddof, reduce, eps_in="std")


def keep_group(metric: Tensor, group_ids: Tensor) -> Tensor:
    """DAPO's dynamic sampling, 2503.14476 eq. 11, keep [n_groups]: on the METRIC (accuracy), not on shaped rewards."""
    metric = metric.double()
    return Groups.of(metric, group_ids).informative(metric)


def _group_std(r: Tensor, g: Groups, ddof: int) -> Tensor:
    n = g.size(r.dtype)
    return (g.sum(group_mean(r, g) ** 2) / (n - ddof).clamp(min=1)).sqrt()[g.ids]


def exact_zeros(a: Tensor, g: Groups, r: Tensor) -> Tensor:
    return torch.where(g.scored & g.informative(r)[g.ids], a, 0.0)


# ------------------------------------------------------------ what training calls


@dataclass(frozen=True)
class Advantages:
    """`per_token` [T] goes to policy_loss; `scored` [N] says which answers may give loss; `returns` is PPO's target."""

    per_token: Tensor
    scored: Tensor
    metrics: MetricSums
    per_sequence: Tensor | None = None
    returns: Tensor | None = None


def compute(
    choices: Choices,
    *,
    rewards: Tensor,
    group_ids: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    components: Tensor | None = None,
    component_weights: Tensor | None = None,
    token_kl: Tensor | None = None,
    values: Tensor | None = None,
    bootstrap: Tensor | None = None,
    kl_coef: float | None = None,
    reduce: Reduce = alone,
) -> Advantages:
    """Advantages of one rank's whole step, computed in float64, before it is cut into micro-batches.

    rewards [N] (NaN: failed), group_ids [N]; mask, sequence_ids [T] with sequence_ids in 0..N-1, tokens in order.
    token_kl [T]  log pi_old - log pi_ref per token, charged to the reward when choices.kl_in == "reward"
    values [T]    the critic's values before the step;  bootstrap [N] its value after a TRUNCATED answer, 0 elsewhere
    reduce        adds tensors up over ranks; only batch-wide statistics use it
    """
    r = rewards.double()
    g = Groups.of(r, group_ids)
    seq = Segments(sequence_ids, len(rewards), mask.bool())
    charge = _kl_charge(choices, seq, token_kl, kl_coef)
    targets: Tensor | None = None
    per_sequence: Tensor | None = None
    if choices.advantage in TOKEN_ADVANTAGES:
        per_token, targets = _per_token(choices, r, g, seq, charge, values, bootstrap, reduce)
    else:
        per_sequence = _per_sequence(choices, r - seq.sum(charge), g, seq, components, component_weights, reduce)
        per_token = seq.spread(per_sequence)
    live = seq.mask & g.scored[sequence_ids]
    per_token = torch.where(live, per_token, 0.0)
    if choices.advantage_clip is not None:
        per_token = per_token.clamp(-choices.advantage_clip, choices.advantage_clip)
    return Advantages(per_token, g.scored, _counters(choices, r, g, seq, per_token, live), per_sequence, targets)


def _kl_charge(c: Choices, seq: Segments, token_kl: Tensor | None, kl_coef: float | None) -> Tensor:
    """What each token pays for its distance from the reference, [T]; 0 unless choices.kl_in is "reward"."""
    beta = (c.kl_coef if kl_coef is None else kl_coef) if c.kl_in == "reward" else 0.0
    nothing = torch.zeros(seq.ids.shape, dtype=torch.float64, device=seq.ids.device)
    if not beta:
        return nothing
    if token_kl is None:
        raise ValueError(f"KL coefficient {beta} is charged to the reward, but no token_kl was given")
    charge = beta * token_kl.double()
    return torch.where(seq.mask & torch.isfinite(charge), charge, nothing)


def _per_sequence(
    c: Choices,
    r: Tensor,
    g: Groups,
    seq: Segments,
    components: Tensor | None,
    component_weights: Tensor | None,
    reduce: Reduce,
) -> Tensor:
    if c.components == "sum_then_normalize":
        return _estimate(c, r, g, seq, reduce)
    if components is None or component_weights is None:
        raise ValueError("components 'normalize_then_sum' needs components [N, K] and component_weights [K]")
    parts, weights = components.double(), component_weights.double()
    a = normalize_then_sum(parts, weights, g.ids, c.advantage_eps, c.advantage_ddof, reduce)
    return torch.where(g.scored, a, 0.0)


def _estimate(c: Choices, r: Tensor, g: Groups, seq: Segments, reduce: Reduce) -> Tensor:
    by_name: dict[str, Callable[[], Tensor]] = {
        "group_std": lambda: group_std(r, g, c.advantage_eps, c.advantage_ddof),
        "group_mean": lambda: group_mean(r, g),
        "leave_one_out": lambda: leave_one_out(r, g),
        "batch_std": lambda: batch_std(r, g, c.advantage_eps, c.advantage_ddof, reduce),
        "batch_mean": lambda: batch_mean(r, g, reduce),
        "maxrl": lambda: maxrl(r, g, c.advantage_eps),
        "opo": lambda: opo(r, g, seq.count(r.dtype)),
        "pass_at_k": lambda: pass_at_k(r, g),
    }
    a = by_name[c.advantage]()
    if c.advantage == "batch_mean":  # no group baseline: an all-equal group still differs from the batch
        return torch.where(g.scored, a, 0.0)
    return exact_zeros(a, g, r)


def _per_token(
    c: Choices,
    r: Tensor,
    g: Groups,
    seq: Segments,
    charge: Tensor,
    values: Tensor | None,
    bootstrap: Tensor | None,
    reduce: Reduce,
) -> tuple[Tensor, Tensor | None]:
    """PPO and REINFORCE++: the answer's reward sits on its last unmasked token, KL on every token; then whitening."""
    live = Segments(seq.ids, seq.n, seq.mask & g.scored[seq.ids])
    score = r
    if c.advantage == "reinforce_pp_baseline":
        score = exact_zeros(group_mean(r, g), g, r)
    score = torch.where(g.scored, score, 0.0)
    rewards = returns.token_rewards(score, charge, live)
    if c.advantage == "gae":
        if values is None:
            raise ValueError("advantage 'gae' needs the critic's values")
        raw, targets = returns.gae(
            rewards, values.double(), live, c.gamma, c.lam, bootstrap if c.bootstrap_truncated else None
        )
    else:
        raw, targets = returns.discounted(rewards, live, c.gamma), None
    return returns.whiten(raw, live.mask, c.whiten_eps, c.whiten_ddof, reduce), targets


def _counters(c: Choices, r: Tensor, g: Groups, seq: Segments, per_token: Tensor, live: Tensor) -> MetricSums:
    size, some = g.size(r.dtype), torch.zeros(g.n, dtype=torch.bool, device=r.device).index_fill(0, g.ids, True)
    equal = (size > 1) & ~g.informative(r)
    total = {
        "groups/single": (some & (size == 1)).sum(),
        "groups/unscored": (some & (size == 0)).sum(),
        "groups/all_equal": equal.sum(),
        "answers/unscored": (~g.scored).sum(),
        "answers/empty": (seq.count() == 0).sum(),
        "answers/nonpositive_mean": ((g.mean(r) <= 0) & g.scored).sum() if c.advantage == "maxrl" else torch.zeros(()),
    }
    return MetricSums.of(
        mean={
            "reward/mean": (r, g.scored),
            "advantage/mean": (per_token, live),
            "advantage/abs": (per_token.abs(), live),
        },
        total=total,
    )
