"""Policy-gradient losses, one function per algorithm. Read this file first.

Legend (all tensors are flat: T answer tokens of a packed batch, see learner/segments.py)

    logp      [T]  log pi(y_t)      current policy, carries the gradient
    logp_old  [T]  log pi_old(y_t)  proximal policy: the learner's weights when the step began
    logp_mu   [T]  log mu(y_t)      behaviour policy: as sampled by the engine
    logp_ref  [T]  log pi_ref(y_t)  frozen reference
    base      [T]  what the ratio is taken to: logp_old (decoupled) or logp_mu (bypass); never carries a gradient
    A         [T]  advantage
    r         [T]  exp(logp - base)
    sg[x]          stop-gradient, x.detach()
    seq            Segments: seq.mean(x) is the mean over each answer's unmasked tokens, seq.spread() hands it back
    |y|            unmasked tokens of an answer

Every kernel returns (loss_t [T], clipped_t [T] bool). Losses are minimised; clipped_t marks tokens whose gradient the
rule cut (or whose detached weight it capped). Kernels neither average nor mask: `aggregate` in segments.py does both,
with denominators of the whole optimizer step. Callers put 0 at masked positions BEFORE any exp (objective.py), so that
no NaN or inf of a masked position reaches a value or a gradient. A sequence-level loss is spread over its tokens: with
"seq-mean-token-mean" that is exactly the mean over sequences. Numbers are checked against tests/learner/golden.json.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.segments import Segments

LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8; a log-ratio beyond it is clamped and has no gradient (as verl, SkyRL, OpenRLHF)

Width = float | Tensor  # a clip width, or one per token (staleness-adaptive)


def ratio(logp: Tensor, base: Tensor) -> Tensor:
    """r = exp(clamp(logp - base, +-20))."""
    return _exp(logp - base)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


# ------------------------------------------------------------ clipped ratios


def ppo_clip(
    logp: Tensor, base: Tensor, A: Tensor, clip_low: Width, clip_high: Width, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """PPO, Schulman et al. 1707.06347 eq. 7; DAPO's clip-higher (2503.14476 eq. 10) is clip_high > clip_low.

    L = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)
    dual clip, Ye et al. 1912.09729: for A < 0 also L <- min(L, -c A), c > 1 absolute.
    """
    r = ratio(logp, base)
    return _clipped_surrogate(r, A, 1 - clip_low, 1 + clip_high, dual_clip)


def gspo(
    logp: Tensor, base: Tensor, A: Tensor, seq: Segments, clip_low: Width, clip_high: Width
) -> tuple[Tensor, Tensor]:
    """GSPO, 2507.18071 eq. 5-7: one length-normalised ratio per answer.

    s_i = exp(1/|y_i| sum_t (logp - base)),  L_i = max(-s_i A_i, -clip(s_i, 1 - clip_low, 1 + clip_high) A_i)
    """
    s = seq.spread(_exp(seq.mean(logp - base)))
    return _clipped_surrogate(s, seq.spread(seq.mean(A)), 1 - clip_low, 1 + clip_high, None)


def gspo_token(
    logp: Tensor, base: Tensor, A: Tensor, seq: Segments, clip_low: Width, clip_high: Width
) -> tuple[Tensor, Tensor]:
    """GSPO-token, 2507.18071 eq. 13-14: GSPO's ratio with an advantage per token.

    s_{i,t} = sg[s_i] exp(logp - sg[logp]); equal to GSPO in value and gradient when A is constant over the answer.
    """
    s = seq.spread(_exp(seq.mean((logp - base).detach())))
    return _clipped_surrogate(s * (logp - logp.detach()).exp(), A, 1 - clip_low, 1 + clip_high, None)


def sequence_clip(
    logp: Tensor, base: Tensor, A: Tensor, seq: Segments, clip_low: Width, clip_high: Width
) -> tuple[Tensor, Tensor]:
    """RLOO's whole-answer action (Ahmadian et al. 2402.14740) with PPO's clip, as TRL's RLOOTrainer.

    R_i = exp(sum_t (logp - base)),  L_i = max(-R_i A_i, -clip(R_i, 1 - clip_low, 1 + clip_high) A_i)
    """
    r = seq.spread(_exp(seq.sum(logp - base)))
    return _clipped_surrogate(r, seq.spread(seq.mean(A)), 1 - clip_low, 1 + clip_high, None)


def gmpo(
    logp: Tensor, base: Tensor, A: Tensor, seq: Segments, clip_low: Width, clip_high: Width
) -> tuple[Tensor, Tensor]:
    """GMPO, 2507.20673: geometric mean of token ratios, clipped one-sidedly in log space.

    d = logp - base;  A > 0: d <- min(d, clip_high);  A <= 0: d <- max(d, -clip_low);  L_i = -exp(1/|y_i| sum_t d) A_i
    """
    s, clipped = gmpo_ratio(logp, base, A, seq, clip_low, clip_high)
    return -seq.spread(s) * seq.spread(seq.mean(A)), clipped


def gmpo_ratio(
    logp: Tensor, base: Tensor, A: Tensor, seq: Segments, clip_low: Width, clip_high: Width
) -> tuple[Tensor, Tensor]:
    """GMPO's clipped geometric-mean ratio of each answer [n], and where a token was clipped [T]."""
    d = logp - base
    a = seq.spread(seq.mean(A))
    low, high = (torch.as_tensor(x, dtype=d.dtype, device=d.device) for x in (clip_low, clip_high))
    clipped = torch.where(a > 0, d > high, d < -low)
    d = torch.where(clipped, torch.where(a > 0, high, -low), d)
    return _exp(seq.mean(d)), clipped


def _clipped_surrogate(r: Tensor, A: Tensor, low: Width, high: Width, dual_clip: float | None) -> tuple[Tensor, Tensor]:
    """max(-r A, -clip(r, low, high) A), no split gradient at a tie; clipped where the bound strictly wins."""
    low, high = (torch.as_tensor(x, dtype=r.dtype, device=r.device) for x in (low, high))
    bounded = torch.minimum(torch.maximum(r, low), high).detach()
    clipped = -bounded * A > -r * A
    loss = torch.where(clipped, -bounded * A, -r * A)
    if dual_clip is None:
        return loss, clipped
    return torch.where(dual_clipped(r, A, dual_clip), -dual_clip * A, loss), clipped


def dual_clipped(r: Tensor, A: Tensor, dual_clip: float) -> Tensor:
    """Where the dual clip binds: A < 0 and r > c. Counted apart from the ordinary clip."""
    return (A < 0) & (r > dual_clip)


# ------------------------------------------------------------ detached weights


def cispo(logp: Tensor, base: Tensor, A: Tensor, weight_min: float, weight_max: float) -> tuple[Tensor, Tensor]:
    """CISPO, MiniMax-M1 2506.13585: every token keeps a gradient, only its weight is capped.

    L = -sg[clip(r, weight_min, weight_max)] A logp.  The caps are ABSOLUTE ratios. The loss value means nothing.
    """
    r = ratio(logp, base).detach()
    return -r.clamp(weight_min, weight_max) * A * logp, (r < weight_min) | (r > weight_max)


def aipo(logp: Tensor, base: Tensor, A: Tensor, weight_max: float) -> tuple[Tensor, Tensor]:
    """AIPO, LlamaRL 2505.24034: L = -sg[min(r, weight_max)] A logp; above the cap the gradient stays, capped."""
    return cispo(logp, base, A, 0.0, weight_max)


def aipo_surrogate(logp: Tensor, base: Tensor, A: Tensor, weight_max: float) -> tuple[Tensor, Tensor]:
    """AIPO as cosmos-rl codes it: L = -min(r, weight_max) A; above the cap NO gradient, whatever A's sign."""
    r = ratio(logp, base)
    return -r.clamp(max=weight_max) * A, r > weight_max


def importance(logp: Tensor, base: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """Importance sampling, Tinker's `importance_sampling`: L = -r A, gradient -r A grad logp."""
    r = ratio(logp, base)
    return -r * A, torch.zeros_like(r, dtype=torch.bool)


def reinforce(logp: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """REINFORCE, Williams 1992: L = -A logp. Off policy its weight comes from corrections.py, detached."""
    return -A * logp, torch.zeros_like(logp, dtype=torch.bool)


# ------------------------------------------------------------ smooth gates, trust regions


def sapo(logp: Tensor, base: Tensor, A: Tensor, tau_pos: float, tau_neg: float) -> tuple[Tensor, Tensor]:
    """SAPO, 2511.20347: a sigmoid gate instead of a clip.

    L = -(4 / tau) sigmoid(tau (r - 1)) A,  tau = tau_pos if A > 0 else tau_neg;  dL/dlogp = -A at r = 1
    """
    r = ratio(logp, base)
    tau = torch.where(A > 0, torch.full_like(r, tau_pos), torch.full_like(r, tau_neg))
    return -(4 / tau) * torch.sigmoid(tau * (r - 1)) * A, torch.zeros_like(r, dtype=torch.bool)


def dppo(logp: Tensor, base: Tensor, A: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """DPPO-Binary-TV, 2602.04879: drop a token whose PROBABILITY moved too far in the direction A pushes it.

    D = pi - mu (sampled token);  dropped if (A > 0 and D > high) or (A < 0 and D < -low);  kept: L = -r A, unclipped
    """
    moved = (logp.exp() - base.exp()).detach()
    dropped = ((A > 0) & (moved > high)) | ((A < 0) & (moved < -low))
    r = ratio(logp, base)
    return torch.where(dropped, 0.0, -r * A), dropped


def ipo(logp: Tensor, base: Tensor, A: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """INTELLECT Policy Optimization (PRIME-RL; not the preference IPO): as dppo, but both sides for every A.

    dropped if pi - mu > high or pi - mu < -low;  kept: L = -r A
    """
    moved = (logp.exp() - base.exp()).detach()
    dropped = (moved > high) | (moved < -low)
    r = ratio(logp, base)
    return torch.where(dropped, 0.0, -r * A), dropped


def trust_region(logp: Tensor, base: Tensor) -> Tensor:
    """(logp - base)^2 on every token, Kimi-K2.5 2602.02276, PRIME-RL; gradient 2 (logp - base), towards base."""
    return (logp - base) ** 2


def opmd(logp: Tensor, base: Tensor, A: Tensor, seq: Segments, tau: float) -> tuple[Tensor, Tensor]:
    """Online policy mirror descent, Kimi k1.5 2501.12599 eq. 3, divided by |y| as OpenKimi 2602.05933.

    L_i = tau/2 (A_i / tau - sum_t (logp - base))^2 / |y_i|;  gradient -(A_i - tau log-ratio) grad log pi(y_i) / |y_i|
    """
    gap = seq.mean(A) / tau - seq.sum(logp - base)
    loss = 0.5 * tau * gap**2 / seq.count(logp.dtype).clamp(min=1)
    return seq.spread(loss), torch.zeros_like(logp, dtype=torch.bool)


# ------------------------------------------------------------ regularisers


def kl(logp: Tensor, logp_ref: Tensor, kind: str, r: Tensor | None = None) -> Tensor:
    """Estimators of KL(pi || pi_ref) from samples of pi (Schulman, joschu.net/blog/kl-approx), d = logp - logp_ref.

    k1 = d                    unbiased; its gradient has mean 0, so it belongs into the reward
    k2 = d^2 / 2              its gradient d grad logp is the on-policy reverse-KL gradient
    k3 = exp(-d) - 1 + d      >= 0, low variance; gradient (1 - exp(-d)) grad logp
    k3_ratio = r k3           DeepSeek-V3.2: r NOT detached, gradient r d grad logp, unbiased off policy
    """
    d = (logp - logp_ref).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d * d
    k3 = torch.expm1(-d) + d
    if kind == "k3":
        return k3
    if kind == "k3_ratio" and r is not None:
        return r * k3
    raise ValueError(f"KL estimator {kind!r}: know k1, k2, k3, and k3_ratio with a ratio")


def adaptive_kl(coef: float, observed: float, target: float, n_steps: float, horizon: float) -> float:
    """Ziegler et al. 1909.08593 sec. 2.2: coef (1 + clip(observed / target - 1, +-0.2) n_steps / horizon)."""
    error = min(max(observed / target - 1, -0.2), 0.2)
    return coef * (1 + error * n_steps / horizon)


def value_clip_loss(v: Tensor, v_old: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """PPO's critic (OpenAI baselines): L = max((v - R)^2, (clip(v, v_old +- clip) - R)^2); the 0.5 is the caller's."""
    near = torch.minimum(torch.maximum(v, v_old - clip), v_old + clip)
    plain, clipped = (v - returns) ** 2, (near - returns) ** 2
    return torch.where(clipped > plain, clipped, plain), clipped > plain
