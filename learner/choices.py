"""Every choice an update rests on, explicit and frozen. Importable without torch.

A preset (learner/presets.py) is one filled-in `Choices`; the kernels in losses.py, advantages.py and corrections.py
never see it: objective.py and advantages.compute read it and pass plain numbers down.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollout.config import Section

AdvantageKind = Literal[
    "group_std", "group_mean", "leave_one_out", "batch_std", "batch_mean", "maxrl", "opo", "pass_at_k",
    "reinforce_pp", "reinforce_pp_baseline", "gae",
]  # fmt: skip
LossKind = Literal[
    "ppo_clip", "gspo", "gspo_token", "sequence_clip", "gmpo", "cispo", "sapo", "dppo", "ipo", "aipo", "aipo_surrogate",
    "opmd", "importance", "reinforce",
]  # fmt: skip
CorrectionKind = Literal[
    "none", "uncapped", "tis", "mis", "mask", "seq_tis", "seq_mis", "seq_mask", "geo_tis", "geo_mis", "geo_mask",
]  # fmt: skip
AggregationKind = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant", "prompt-mean", "sum"]
KlKind = Literal["k1", "k2", "k3", "k3_ratio"]
PreferenceKind = Literal["sigmoid", "cdpo", "robust", "ipo", "hinge"]

SEQUENCE_LOSSES = frozenset({"gspo", "sequence_clip", "gmpo", "opmd"})
SEQUENCE_RATIO_LOSSES = SEQUENCE_LOSSES | {"gspo_token"}
TOKEN_CORRECTIONS = frozenset({"uncapped", "tis", "mis", "mask", "geo_mis"})  # geo_mis: survivors keep token weights
PURE_MASKS = frozenset({"mask", "seq_mask", "geo_mask"})  # drop, never weight
BATCH_BASELINES = frozenset({"reinforce_pp", "batch_mean", "gae"})  # an all-equal group still differs from the rest
TOKEN_ADVANTAGES = frozenset({"gae", "reinforce_pp", "reinforce_pp_baseline"})


class Choices(Section):
    """One filled-in value: `PRESETS["dapo"]`. Names say what a number is: an absolute cap or an offset from 1."""

    preset: str
    objective: Literal["policy", "preference"] = "policy"
    paper: str = ""

    # advantages
    advantage: AdvantageKind = "group_std"
    advantage_eps: float = Field(1e-6, ge=0, description="added to the standard deviation (or MaxRL's mean)")
    advantage_ddof: int = Field(1, ge=0, le=1, description="1: sample, 0: population standard deviation")
    advantage_clip: float | None = Field(None, gt=0, description="advantages are limited to +- this")
    components: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    gamma: float = Field(1.0, gt=0, le=1)
    lam: float = Field(1.0, ge=0, le=1)
    whiten_eps: float = Field(1e-8, ge=0, description="inside the root of token whitening")
    whiten_ddof: int = Field(1, ge=0, le=1)
    value_clip: float = Field(0.2, gt=0, description="PPO critic: largest move of a value away from the old one")
    value_coef: float = Field(0.5, ge=0, description="weight of the squared value error")
    critic_learning_rate: float = Field(1e-5, gt=0, description="of a critic with its own trunk")
    critic_weight_decay: float | None = Field(None, ge=0, description="None: the policy's")
    critic_grad_clip: float | None = Field(None, gt=0, description="None: the policy's")
    bootstrap_truncated: bool = Field(
        True, description="a truncated answer's last token sees the critic's value after it"
    )

    # policy loss
    loss: LossKind = "ppo_clip"
    clip_low: float = Field(
        0.2, ge=0, description="offset below 1 (log-space width for gmpo, TV threshold for dppo, ipo)"
    )
    clip_high: float = Field(
        0.2, ge=0, description="offset above 1 (log-space width for gmpo, TV threshold for dppo, ipo)"
    )
    dual_clip: float | None = Field(None, gt=1, description="absolute ratio bound for negative advantages; None: off")
    staleness_clip: float = Field(0.0, description="clip width is multiplied by (1 + staleness)^this; 0: off")
    weight_min: float = Field(0.0, ge=0, description="cispo: absolute lower cap of the detached weight")
    weight_max: float = Field(5.0, gt=0, description="cispo, aipo: absolute upper cap of the weight")
    tau_pos: float = Field(1.0, gt=0, description="sapo temperature for positive advantages")
    tau_neg: float = Field(1.05, gt=0, description="sapo temperature for the others")
    tau: float = Field(0.1, gt=0, description="opmd regularisation")
    trust_region_coef: float = Field(0.0, ge=0, description="weight of (log pi/mu)^2 on every token")
    aggregation: AggregationKind = "token-mean"
    length_constant: float | None = Field(
        None, gt=0, description="aggregation 'constant': L_max, the generation budget"
    )

    # regularisers
    kl_coef: float = Field(0.0, ge=0)
    kl_kind: KlKind = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_target: float | None = Field(None, gt=0, description="adaptive coefficient: the KL per token aimed at")
    kl_horizon: float = Field(10_000, gt=0)
    entropy_coef: float = Field(0.0, description="loss -= this * entropy")

    # asynchrony
    mode: Literal["decoupled", "bypass"] = Field(
        "decoupled", description="bypass: ratios are taken to the engine's log-probs"
    )
    proximal: Literal["exact", "loglinear"] = Field(
        "exact", description="loglinear (A-3PO): between the engine's and the current log-probs, by the token's age"
    )
    correction: CorrectionKind = "tis"
    correction_low: float | None = Field(None, ge=0, description="lower bound of the weight; None: no bound")
    correction_high: float | None = Field(2.0, gt=0, description="upper bound of the weight; None: no bound")
    opsm_delta: float | None = Field(None, description="off-policy sequence masking; None: off")
    m2po_tau: float | None = Field(None, gt=0, description="second-moment bound of log weights; None: off")

    # which groups and answers are trained on
    drop_zero_signal: bool = Field(
        False, description="DAPO dynamic sampling on the metric: all-equal groups are replaced"
    )
    max_refills: int = Field(10, ge=0, description="replacement rounds before a step goes ahead without signal")
    mask_truncated: bool = Field(False, description="overlong filtering: a truncated answer gives no loss")
    overlong_cache: int | None = Field(
        None, gt=0, description="soft overlong punishment starts this far before the limit"
    )
    overlong_factor: float = Field(1.0, ge=0)

    # preference learning
    preference_loss: PreferenceKind = "sigmoid"
    preference_beta: float = Field(0.1, gt=0)
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    length_normalized: bool = Field(False, description="divide each sequence's log-ratio by its length")

    @property
    def needs_reference(self) -> bool:
        """A frozen reference policy is read."""
        return self.objective == "preference" or self.kl_coef > 0

    @property
    def needs_critic(self) -> bool:
        """A value function is read and trained."""
        return self.advantage == "gae"

    def needs_old_logprobs(self, updates: int) -> bool:
        """Proximal log-probs must exist before the first backward; in a step's only update they equal its own."""
        before = self.m2po_tau is not None or (self.kl_coef > 0 and self.kl_in == "reward")
        return before or (updates > 1 and self.proximal == "exact")

    @property
    def needs_entropy(self) -> bool:
        """The entropy needs a gradient (it is always reported)."""
        return self.entropy_coef != 0
