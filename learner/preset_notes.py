"""Where peers differ from each preset, in words: a column of the table in docs/algorithms.md."""

from __future__ import annotations

PEERS = {
    "ppo": (
        "Whitening: verl ddof 1, OpenRLHF ddof 0, AReaL and slime optional. Value clip .5 (verl, OpenRLHF, AReaL) "
        "or .2; slime leaves out the 0.5. lam 1 everywhere but TRL. Masked tokens: verl skips them as here, "
        "OpenRLHF zeroes them."
    ),
    "grpo": (
        "eps 1e-6 (verl, slime, SkyRL), 1e-4 (TRL), 1e-9 (OpenRLHF), 1e-5 (AReaL); PRIME-RL and Tinker use no "
        "std. Group of one: verl and SkyRL pass the raw reward through. Aggregation: verl, OpenRLHF, AReaL "
        "default to token-mean. TRL: beta 0, and k3 times the ratio."
    ),
    "dr_grpo": (
        "The constant: verl falls back to the padded width, AReaL has none. TRL's dr_grpo keeps the std unless "
        "switched off."
    ),
    "dapo": (
        "verl and cosmos-rl clip dually (c = 3) unless told not to. Dynamic sampling: verl tests std == 0 "
        "exactly, slime and SkyRL 1e-6; here max - min <= 1e-6 of the metric. verl's and AReaL's overlong "
        "punishment has no lower cap."
    ),
    "gspo": (
        "verl's actor, AReaL and cosmos-rl average over tokens (longer answers weigh more); verl and SkyRL keep "
        "clip .2 unless overridden, AReaL's recipe uses .4. The geometric weight for asynchrony is our choice; "
        "OpenRLHF takes the engine's log-probs as denominator instead."
    ),
    "gspo_token": "As gspo; verl, SkyRL and Tinker implement GSPO in this form.",
    "cispo": (
        "The cap is absolute here and in TRL and Tinker; verl's [1-low, 1+high] is [.8, 1.2] by default, SkyRL's "
        "and slime's are offsets from 1. Ratio to the engine's log-probs (SkyRL: cispo_anchor rollout)."
    ),
    "sapo": "AReaL averages over tokens and refuses the decoupled form.",
    "gmpo": (
        "verl uses clip_ratio .2 in log space and averages per micro-batch; in TRL an empty answer adds a constant."
    ),
    "rloo": (
        "The paper's action is the whole answer (rloo_sequence); verl, OpenRLHF, AReaL, SkyRL and PRIME-RL put "
        "the advantage on PPO's token kernel, as here. One answer: verl passes r, OpenRLHF divides by 0. TRL: "
        "beta .05."
    ),
    "rloo_sequence": (
        "TRL's form; two answers and beta .05 by default there. The sequence weight for asynchrony is our choice."
    ),
    "reinforce_pp": (
        "Whitening: verl ddof 1 with eps in the root, OpenRLHF ddof 0. SkyRL restarts the return at masked tokens."
    ),
    "reinforce_pp_baseline": "OpenRLHF ddof 0; slime subtracts the KL per token.",
    "maxrl": (
        "Official code and SkyRL: mean + 1e-6, so a lone answer gets 1e6 r (SkyRL: r) and negative means flip "
        "signs; PRIME-RL as here. The deployed form is unbiased for order N-1, not N."
    ),
    "dppo": "PRIME-RL's default since March 2026; verl has the policy term only.",
    "ipo": "Not the preference loss of that name. PRIME-RL's August snapshot: threshold .1; its later docs .3.",
    "aipo": (
        "Two codings that differ above the cap: this one (gradient capped, CISPO on the engine's log-probs) and "
        "the surrogate."
    ),
    "aipo_surrogate": "cosmos-rl's coding: no gradient above the cap.",
    "opmd": "OpenKimi: tau .01 and other baselines.",
    "reinforce": "verl's bypass mode with loss_type reinforce weighs whole answers (correction: seq_tis).",
    "lite_ppo": "TRL: scale_rewards batch.",
    "opo": "verl ships it with the raw reward for a group of one.",
    "pass_at_k": "verl ships it as grpo_passk.",
    "gdpo": "verl whitens over tokens instead of answers.",
    "icepop": "slime, NeMo-RL, OpenRLHF and verl agree on .5 to 5; AReaL has an upper bound only.",
    "a3po": "AReaL's prox_logp_method loglinear, on top of any of its estimators.",
    "m2po": "In AReaL with eps_clip 0; here the cut is that of the whole step on all ranks.",
    "dpo": "TRL's label_smoothing does nothing for sigmoid; OpenRLHF's gives cDPO.",
    "dpo_ipo": "TRL and AReaL divide each log-ratio by its length, as here; OpenRLHF uses sums.",
}
