"""Choices + tensors -> one scalar to call backward() on, and metrics that add up. This is where choices meet kernels.

    logprobs, ... [T]  ->  drop what is masked or not finite  ->  kernel (losses.py)  x  weight (corrections.py)
                       ->  + KL, - entropy, + trust region  ->  aggregate with the step's denominators

The walk is the same for every algorithm; only the kernel and the numbers differ. Padded [B, L] input is flattened.
Losses of micro-batches ADD UP to the loss of the step (denominators are global), and so do the metrics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner import corrections, losses
from learner.choices import SEQUENCE_RATIO_LOSSES, Choices
from learner.metric_sums import MetricSums
from learner.segments import Denominators, Reduce, Segments, aggregate, alone, token_weights, upcast


def policy_loss(
    choices: Choices,
    *,
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    denominators: Denominators,
    sequence_ids: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    staleness: Tensor | None = None,
    keep: Tensor | None = None,
    kl_coef: float | None = None,
) -> tuple[Tensor, MetricSums]:
    """Loss (0-d, with a graph even when nothing is trainable) and summable metrics of one micro-batch.

    flat     every per-token tensor [T], sequence_ids [T] in 0..B-1, group_ids [B]
    padded   every per-token tensor [B, L], sequence_ids None, group_ids [B]
    mask     tokens that count (the denominators were counted from it); keep: of these, the ones that may give loss
             (False for answers whose reward failed: original count, no loss). Default: all.
    old_logprobs None means logprobs.detach(): one update per batch, so that the ratio is exactly 1.
    staleness [T] learner version - version of the token; kl_coef overrides choices.kl_coef (adaptive controller).
    """
    if choices.m2po_tau is not None and keep is None:
        raise ValueError("m2po_tau chooses tokens over the whole step: pass keep=step_keep(...)")
    terms = token_terms(
        choices if kl_coef is None else choices.model_copy(update={"kl_coef": kl_coef}),
        logprobs=logprobs,
        behaviour_logprobs=behaviour_logprobs,
        advantages=advantages,
        mask=mask,
        group_ids=group_ids,
        sequence_ids=sequence_ids,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        entropy=entropy,
        staleness=staleness,
        keep=keep,
    )
    counted = Segments(terms.batch.seq.ids, len(group_ids), terms.batch.counted)
    weights = token_weights(choices.aggregation, counted, group_ids, denominators, choices.length_constant)
    policy = aggregate(terms.policy * terms.weight, weights, terms.kept)
    kl = aggregate(terms.kl, weights, terms.batch.live)
    loss = policy + kl + aggregate(terms.regulariser, weights, terms.batch.live)
    totals = {"loss/policy": policy, "loss/kl": kl, "loss/total": loss}
    return loss, _metrics(choices, terms) + MetricSums.of(total=totals)


def step_keep(
    choices: Choices,
    *,
    scored: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    behaviour_logprobs: Tensor,
    old_logprobs: Tensor | None = None,
    truncated: Tensor | None = None,
    reduce: Reduce = alone,
) -> Tensor:
    """Which tokens of one rank's WHOLE step may give loss, [T] bool; cut it like any column and pass it as `keep`.

    scored [N] from advantages.compute; truncated [N] is dropped when choices.mask_truncated (overlong filtering: such
    an answer still counts in its group's mean and in the denominators). M2PO's choice needs the whole step: made here.
    """
    keep = mask.bool() & scored[sequence_ids]
    if choices.mask_truncated and truncated is not None:
        keep = keep & ~truncated[sequence_ids].bool()
    if choices.m2po_tau is not None:
        if old_logprobs is None:
            raise ValueError("m2po_tau needs old_logprobs: the learner's log-probs before the step")
        log_w = upcast(old_logprobs.detach()) - upcast(behaviour_logprobs)
        finite = keep & torch.isfinite(log_w)
        keep = corrections.m2po(log_w, finite, choices.m2po_tau, reduce) | (keep & ~finite)
    return keep


@dataclass(frozen=True)
class Batch:
    """Flat tensors with 0 wherever there is no loss. `live`: tokens with loss; `counted`: the mask given."""

    logp: Tensor
    old: Tensor
    mu: Tensor
    ref: Tensor | None
    entropy: Tensor | None
    A: Tensor
    staleness: Tensor
    counted: Tensor
    live: Tensor
    nonfinite: Tensor
    seq: Segments


def _clean(logp: Tensor, mask: Tensor, x: dict[str, Tensor], ids: Tensor, n: int) -> Batch:
    """Mask before any arithmetic. A trainable token with a NaN or inf in any column is dropped and counted."""
    logp = upcast(logp)
    wanted = mask & x["keep"].bool() if "keep" in x else mask
    names = [k for k in x if k not in ("keep", "staleness")]
    finite = torch.isfinite(logp.detach())
    for name in names:
        finite = finite & torch.isfinite(x[name].detach())
    live = wanted & finite
    fill = {k: torch.where(live, upcast(x[k]).to(logp.dtype), 0.0) for k in names}
    logp = torch.where(live, logp, 0.0)
    stale = x.get("staleness")
    return Batch(
        logp=logp,
        old=fill["old_logprobs"].detach() if "old_logprobs" in fill else logp.detach(),
        mu=fill["behaviour_logprobs"].detach(),
        ref=fill["ref_logprobs"].detach() if "ref_logprobs" in fill else None,
        entropy=fill.get("entropy"),
        A=fill["advantages"].detach(),
        staleness=torch.zeros_like(logp) if stale is None else torch.where(live, stale.to(logp.dtype), 0.0),
        counted=mask,
        live=live,
        nonfinite=wanted & ~finite,
        seq=Segments(ids, n, live),
    )


@dataclass(frozen=True)
class TokenTerms:
    """The parts of the loss before averaging, [T] each: kept * weight * policy + live * (kl + regulariser)."""

    policy: Tensor
    clipped: Tensor
    weight: Tensor
    kept: Tensor
    kl: Tensor
    regulariser: Tensor
    batch: Batch
    base: Tensor


def token_terms(
    c: Choices,
    *,
    logprobs: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    sequence_ids: Tensor | None,
    **columns: Tensor | None,
) -> TokenTerms:
    """Everything up to the average; arguments as policy_loss."""
    if sequence_ids is None:
        if logprobs.dim() != 2:
            raise ValueError("policy_loss: flat [T] input needs sequence_ids")
        rows, width = logprobs.shape
        sequence_ids = torch.arange(rows, device=logprobs.device).repeat_interleave(width)
    flat = {k: x.reshape(-1) for k, x in columns.items() if x is not None}
    b = _clean(logprobs.reshape(-1), mask.reshape(-1).bool(), flat, sequence_ids, len(group_ids))
    if c.proximal == "loglinear":
        if "staleness" not in flat:
            raise ValueError("proximal 'loglinear' needs the staleness of each token")
        b = replace(b, old=corrections.loglinear_prox(b.logp, b.mu, b.staleness, torch.zeros_like(b.staleness)))
    base = b.mu if c.mode == "bypass" else b.old
    policy, clipped = _kernel(c, b, base)
    log_w = (b.logp.detach() if c.mode == "bypass" else b.old) - b.mu
    weight, kept = corrections.correct(c.correction, log_w, b.seq, c.correction_low, c.correction_high)
    if c.opsm_delta is not None:
        keep_sequence, _ = corrections.opsm(b.logp, b.mu, b.A, b.seq, c.opsm_delta)
        kept = kept & b.seq.spread(keep_sequence)
    return TokenTerms(policy, clipped, weight, kept & b.live, _kl(c, b), _regulariser(c, b), b, base)


def _kl(c: Choices, b: Batch) -> Tensor:
    """kl_coef KL(pi || pi_ref) per token; exactly 0 where none is asked for in the loss."""
    if not c.kl_coef or c.kl_in != "loss":
        return torch.zeros_like(b.logp)
    if b.ref is None:
        raise ValueError(f"kl_coef is {c.kl_coef} but no ref_logprobs were given")
    return c.kl_coef * losses.kl(b.logp, b.ref, c.kl_kind, losses.ratio(b.logp, b.old))


def _regulariser(c: Choices, b: Batch) -> Tensor:
    """trust_region_coef (log pi/mu)^2 - entropy_coef H, per token; exactly 0 where neither is asked for."""
    total = torch.zeros_like(b.logp)
    if c.trust_region_coef:
        total = total + c.trust_region_coef * losses.trust_region(b.logp, b.mu)
    if c.entropy_coef:
        if b.entropy is None:
            raise ValueError(f"entropy_coef is {c.entropy_coef} but no entropy was given")
        total = total - c.entropy_coef * b.entropy
    return total


def _kernel(c: Choices, b: Batch, base: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each token, by name."""
    low: losses.Width = c.clip_low
    high: losses.Width = c.clip_high
    if c.staleness_clip:  # one width per answer where there is one ratio per answer
        age = b.seq.spread(b.seq.mean(b.staleness)) if c.loss in SEQUENCE_RATIO_LOSSES else b.staleness
        low, high = (corrections.staleness_width(x, age, c.staleness_clip) for x in (c.clip_low, c.clip_high))
    match c.loss:
        case "ppo_clip":
            return losses.ppo_clip(b.logp, base, b.A, low, high, c.dual_clip)
        case "gspo":
            return losses.gspo(b.logp, base, b.A, b.seq, low, high)
        case "gspo_token":
            return losses.gspo_token(b.logp, base, b.A, b.seq, low, high)
        case "sequence_clip":
            return losses.sequence_clip(b.logp, base, b.A, b.seq, low, high)
        case "gmpo":
            return losses.gmpo(b.logp, base, b.A, b.seq, low, high)
        case "cispo":
            return losses.cispo(b.logp, base, b.A, c.weight_min, c.weight_max)
        case "sapo":
            return losses.sapo(b.logp, base, b.A, c.tau_pos, c.tau_neg)
        case "dppo":
            return losses.dppo(b.logp, base, b.A, c.clip_low, c.clip_high)
        case "ipo":
            return losses.ipo(b.logp, base, b.A, c.clip_low, c.clip_high)
        case "aipo":
            return losses.aipo(b.logp, base, b.A, c.weight_max)
        case "aipo_surrogate":
            return losses.aipo_surrogate(b.logp, base, b.A, c.weight_max)
        case "opmd":
            return losses.opmd(b.logp, base, b.A, b.seq, c.tau)
        case "importance":
            return losses.importance(b.logp, base, b.A)
        case "reinforce":
            return losses.reinforce(b.logp, b.A)


def _metrics(c: Choices, t: TokenTerms) -> MetricSums:
    b, live, now = t.batch, t.batch.live, t.batch.logp.detach()
    means = {
        "policy/kl": (corrections.mismatch_k3(now - b.old), live),  # of the update: old policy || current
        "policy/kl_behaviour": (corrections.mismatch_k3(now - b.mu), live),  # engine's policy || current
        "policy/ratio_mean": (losses.ratio(now, t.base), live),
        "policy/clip_fraction": (t.clipped, live),
        "correction/mismatch_k3": (corrections.mismatch_k3(b.old - b.mu), live),  # engine's policy || old policy
        "correction/weight_mean": (t.weight, live),
        "correction/filtered_fraction": (live & ~t.kept, live),
        "staleness/token_mean": (b.staleness, live),
    }
    if c.dual_clip is not None:
        means["policy/dual_clip_fraction"] = (losses.dual_clipped(losses.ratio(now, t.base), b.A, c.dual_clip), live)
    if b.entropy is not None:
        means["policy/entropy"] = (b.entropy, live)
    if b.ref is not None:
        means["policy/kl_ref"] = (losses.kl(now, b.ref, "k3"), live)
    return MetricSums.of(
        mean=means,
        total={"tokens/kept": t.kept.sum(), "tokens/nonfinite": b.nonfinite.sum()},
        ess={"correction/ess": (losses.ratio(b.old, b.mu), live)},
        log_ratio={"correction/ratio": (b.old - b.mu, live), "policy/ratio": (now - t.base, live)},
    )


def value_loss(
    choices: Choices, *, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, denominators: Denominators
) -> tuple[Tensor, MetricSums]:
    """PPO critic: value_coef * token-mean of the clipped squared error, any shape, global token denominator."""
    mask = mask.bool()
    finite = mask & torch.isfinite(values.detach()) & torch.isfinite(returns) & torch.isfinite(old_values)
    v, v_old, target = (torch.where(finite, upcast(x), 0.0) for x in (values, old_values.detach(), returns.detach()))
    per_token, clipped = losses.value_clip_loss(v, v_old, target, choices.value_clip)
    loss = choices.value_coef * torch.where(finite, per_token, 0.0).sum() / max(denominators.tokens, 1.0)
    means = {
        "critic/clip_fraction": (clipped, finite),
        "critic/value_mean": (v, finite),
        "critic/return_mean": (target, finite),
        "critic/squared_error": ((v - target) ** 2, finite),
    }
    return loss, MetricSums.of(mean=means, total={"critic/loss": loss, "critic/nonfinite": (mask & ~finite).sum()})
