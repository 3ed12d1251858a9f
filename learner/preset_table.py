"""The table of docs/algorithms.md, printed from the presets; `python -m learner.preset_table PAGE` rewrites it.

A test compares the page with `render()`, so that the page cannot say anything the code does not do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from learner.choices import Choices
from learner.preset_notes import PEERS
from learner.presets import PRESETS
from rollout.errors import ConfigError

BEGIN, END = "<!-- presets: begin -->", "<!-- presets: end -->"

EQUATIONS = {
    "ppo_clip": "max(-rA, -clip(r, 1-low, 1+high) A)",
    "gspo": "s = exp(mean log r); max(-sA, -clip(s) A) per answer",
    "gspo_token": "s = sg[exp(mean log r)] exp(l - sg l); max(-sA, -clip(s) A)",
    "sequence_clip": "R = exp(sum log r); max(-RA, -clip(R) A) per answer",
    "gmpo": "-A exp(mean of log r clipped at +high if A>0, at -low otherwise)",
    "cispo": "-sg[clip(r, min, max)] A l",
    "sapo": "-(4/tau) sigmoid(tau (r-1)) A",
    "dppo": "-rA unless pi-mu > high with A>0 or < -low with A<0",
    "ipo": "-rA unless pi-mu > high or < -low",
    "aipo": "-sg[min(r, max)] A l",
    "aipo_surrogate": "-min(r, max) A",
    "opmd": "tau/2 (A/tau - sum log r)^2 / len",
    "importance": "-rA",
    "reinforce": "-sg[w] A l",
}
ADVANTAGES = {
    "group_std": "(r - mean) / (std + eps)",
    "group_mean": "r - mean",
    "leave_one_out": "r - mean of the others",
    "batch_std": "(r - mean) / (std of the step + eps)",
    "batch_mean": "r - mean of the step",
    "maxrl": "(r - mean) / mean, 0 if mean <= 0",
    "opo": "r - length-weighted mean",
    "pass_at_k": "best - second best, for the best",
    "reinforce_pp": "returns, whitened over all tokens of the step",
    "reinforce_pp_baseline": "r - mean, whitened over all tokens of the step",
    "gae": "GAE, whitened over all tokens of the step",
}
PREFERENCE = {
    "sigmoid": "-log sigma(beta D)",
    "cdpo": "-(1-e) log sigma(beta D) - e log sigma(-beta D)",
    "robust": "[-(1-e) log sigma(beta D) + e log sigma(-beta D)] / (1-2e)",
    "ipo": "(D - 1/(2 beta))^2",
    "hinge": "max(0, 1 - beta D)",
}
ADVANTAGE_FIELDS = {
    "group_std": "advantage_eps advantage_ddof components",
    "batch_std": "advantage_eps advantage_ddof",
    "maxrl": "advantage_eps",
    "reinforce_pp": "gamma whiten_eps whiten_ddof",
    "reinforce_pp_baseline": "gamma whiten_eps whiten_ddof",
    "gae": "gamma lam whiten_eps whiten_ddof value_clip value_coef critic_learning_rate "
    "critic_weight_decay critic_grad_clip bootstrap_truncated",
}
LOSS_FIELDS = {
    "ppo_clip": "clip_low clip_high dual_clip staleness_clip",
    "gspo": "clip_low clip_high staleness_clip",
    "gspo_token": "clip_low clip_high staleness_clip",
    "sequence_clip": "clip_low clip_high staleness_clip",
    "gmpo": "clip_low clip_high staleness_clip",
    "cispo": "weight_min weight_max",
    "sapo": "tau_pos tau_neg",
    "dppo": "clip_low clip_high",
    "ipo": "clip_low clip_high",
    "aipo": "weight_max",
    "aipo_surrogate": "weight_max",
    "opmd": "tau",
}


def show(value: object) -> str:
    """A choice as the table prints it."""
    if value is None:
        return "none"
    return ("no", "yes")[value] if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def render() -> str:
    head = [
        "preset",
        "paper",
        "advantage",
        "loss per token or answer",
        "average",
        "regularisers",
        "asynchrony",
        "data",
        "peers differ",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in _row(c)) + " |" for c in PRESETS.values()]
    return "\n".join(lines)


def _row(c: Choices) -> list[str]:
    if c.objective == "preference":
        fields = "preference_loss preference_beta label_smoothing length_normalized"
        loss = f"{PREFERENCE[c.preference_loss]}; {_list(c, fields)}"
        return [f"`{c.preset}`", c.paper, "--", loss, "mean over pairs", "--", "--", "--", PEERS[c.preset]]
    advantage = (
        f"{c.advantage}: {ADVANTAGES[c.advantage]}; {_list(c, ADVANTAGE_FIELDS.get(c.advantage, ''), 'advantage_clip')}"
    )
    loss = f"{c.loss}: {EQUATIONS[c.loss]}; {_list(c, LOSS_FIELDS.get(c.loss, ''))}"
    correction = "mode proximal correction correction_low correction_high"
    return [
        f"`{c.preset}`",
        c.paper,
        advantage.rstrip("; "),
        loss.rstrip("; "),
        c.aggregation,
        _list(c, "kl_coef kl_kind kl_in" if c.kl_coef else "kl_coef", "kl_target entropy_coef trust_region_coef"),
        _list(c, correction, "opsm_delta m2po_tau"),
        _list(c, "drop_zero_signal", "mask_truncated overlong_cache"),
        PEERS[c.preset],
    ]


def _list(c: Choices, always: str, if_set: str = "") -> str:
    """`key: value` of the first fields, and of the second where they are switched on."""
    fields = [*always.split(), *(f for f in if_set.split() if getattr(c, f))]
    return ", ".join(f"{f}: {show(getattr(c, f))}" for f in fields)


def between_marks(page: str) -> str:
    """The table of a page. Raises ConfigError where the marks are missing."""
    if BEGIN not in page or END not in page:
        raise ConfigError(f"the page has no {BEGIN} ... {END}")
    return page.split(BEGIN)[1].split(END)[0].strip()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m learner.preset_table", description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    path = parser.parse_args(argv).page
    page = path.read_text(encoding="utf-8")
    old = between_marks(page)
    path.write_text(
        page.replace(old, render()) if old else page.replace(BEGIN, f"{BEGIN}\n{render()}"), encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
