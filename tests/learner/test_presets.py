"""Presets are explicit, resolve with overrides, and every contradiction is refused with the reason and a remedy; the
table in docs/algorithms.md is the one the presets print."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from learner import preset_table
from learner.choices import Choices
from learner.config import AlgorithmConfig
from learner.presets import PRESETS, Setting, resolve
from rollout.errors import ConfigError

Override = dict[str, float | int | str | bool | None]


def choose(preset: str, overrides: Override | None = None, **setting: object) -> Choices:
    return resolve(AlgorithmConfig(preset=preset, overrides=overrides or {}), Setting(**{"max_tokens": 64, **setting}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_resolves_as_it_stands(name: str) -> None:
    c = choose(name)
    assert c.preset == name and c.paper


def test_what_papers_say() -> None:
    assert (PRESETS["grpo"].aggregation, PRESETS["grpo"].kl_coef, PRESETS["grpo"].kl_kind) == (
        "seq-mean-token-mean",
        0.04,
        "k3",
    )
    assert (PRESETS["dapo"].clip_low, PRESETS["dapo"].clip_high, PRESETS["dapo"].aggregation) == (
        0.2,
        0.28,
        "token-mean",
    )
    assert PRESETS["dapo"].drop_zero_signal and not PRESETS["grpo"].drop_zero_signal
    assert PRESETS["dapo"].kl_coef == 0 and PRESETS["dapo"].dual_clip is None
    assert (PRESETS["gspo"].clip_low, PRESETS["gspo"].clip_high) == (3e-4, 4e-4)
    assert (PRESETS["cispo"].weight_min, PRESETS["cispo"].weight_max) == (0.0, 5.0)
    assert PRESETS["dr_grpo"].advantage == "group_mean" and PRESETS["dr_grpo"].aggregation == "constant"
    assert (PRESETS["sapo"].tau_pos, PRESETS["sapo"].tau_neg) == (1.0, 1.05)
    assert PRESETS["gmpo"].clip_high == 0.4 and PRESETS["ipo"].clip_high == 0.3


def test_the_default_for_asynchrony_is_decoupled_tis_two() -> None:
    for name in ("ppo", "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "maxrl", "sapo"):
        c = PRESETS[name]
        assert (c.mode, c.correction, c.correction_low, c.correction_high) == ("decoupled", "tis", None, 2.0), name


def test_overrides_change_one_choice_and_the_generation_budget_fills_dr_grpos_constant() -> None:
    assert choose("dapo", {"clip_high": 0.3}) == PRESETS["dapo"].model_copy(update={"clip_high": 0.3})
    assert choose("dr_grpo").length_constant == 64
    assert choose("dr_grpo", {"length_constant": 100}).length_constant == 100


def test_needs() -> None:
    assert PRESETS["grpo"].needs_reference and not PRESETS["dapo"].needs_reference
    assert PRESETS["ppo"].needs_critic and not PRESETS["grpo"].needs_critic
    assert PRESETS["m2po"].needs_old_logprobs(1) and not PRESETS["dapo"].needs_old_logprobs(1)
    assert PRESETS["dapo"].needs_old_logprobs(2) and not PRESETS["a3po"].needs_old_logprobs(2)
    assert PRESETS["dpo"].needs_reference


@pytest.mark.parametrize(
    ("preset", "overrides", "setting", "reason"),
    [
        ("gspo", {"correction": "tis"}, {}, "one ratio per sequence"),
        ("gspo", {"correction": "geo_mis", "correction_low": 0.5}, {}, "one ratio per sequence"),
        ("gmpo", {"m2po_tau": 0.04}, {}, "m2po_tau"),
        ("gspo", {"clip_high": 0.28}, {}, "3e-4"),
        ("gspo", {"advantage": "reinforce_pp"}, {}, "gspo_token"),
        ("maxrl", {}, {"negative_rewards": True}, "flips the sign"),
        ("maxrl", {"overlong_cache": 16}, {}, "negative"),
        ("maxrl", {"kl_coef": 0.1, "kl_in": "reward", "kl_kind": "k1"}, {}, "negative"),
        ("cispo", {"correction": "tis", "correction_high": 2.0}, {}, "twice"),
        ("dapo", {"mode": "bypass"}, {}, "twice"),
        ("a3po", {"mode": "bypass", "correction": "none"}, {}, "does not read"),
        ("dapo", {"correction_low": 3.0}, {}, "below correction_high"),
        ("dapo", {"correction": "mis", "correction_high": None}, {}, "drop nothing"),
        ("dapo", {"correction": "tis", "correction_high": None}, {}, "truncates"),
        ("dr_grpo", {}, {"max_tokens": None}, "length_constant"),
        ("dr_grpo", {"length_constant": 10}, {}, "cover the whole answer"),
        ("dapo", {"overlong_cache": 100}, {}, "above sampling.max_tokens"),
        ("grpo", {}, {"group_size": 1}, "group_size"),
        ("dapo", {"kl_coef": 0.1, "kl_kind": "k1"}, {}, "zero expected gradient"),
        ("dapo", {"kl_coef": 0.1, "kl_kind": "k3_ratio", "kl_in": "reward"}, {}, "loss term"),
        ("dapo", {"kl_target": 0.1}, {}, "which is 0"),
        ("reinforce_pp", {"drop_zero_signal": True}, {}, "does carry signal"),
        ("cispo", {"weight_min": 6.0}, {}, "absolute"),
        ("cispo", {"dual_clip": 3.0}, {}, "ppo_clip"),
        ("dapo", {"dual_clip": 1.1}, {}, "above 1"),
        ("cispo", {"staleness_clip": 0.5}, {}, "has none"),
        ("gdpo", {"advantage": "group_mean"}, {}, "normalises each component"),
        ("dpo", {"preference_loss": "cdpo"}, {}, "label_smoothing"),
        ("dpo", {"label_smoothing": 0.1}, {}, "no effect"),
        ("dapo", {"clip_hgih": 0.3}, {}, "did you mean 'clip_high'"),
        ("dapo", {"clip_high": "wide"}, {}, "clip_high"),
        ("dapo", {"clip_low": -0.1}, {}, "clip_low"),
        ("dapo", {"preset": "grpo"}, {}, "preset"),
        ("dappo", {}, {}, "did you mean 'dppo' or 'dapo'"),
        ("gradient_descent_from_mars", {}, {}, "known: "),
    ],
)
def test_contradictions_are_refused_with_the_reason(
    preset: str, overrides: Override, setting: dict[str, object], reason: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        choose(preset, overrides, **setting)
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_repeated_updates_are_refused_where_they_cannot_be_meant() -> None:
    with pytest.raises(ConfigError, match="a group is never divided"):
        resolve(AlgorithmConfig(mini_batches=9))
    with pytest.raises(ConfigError, match="one update of a step's pairs"):
        resolve(AlgorithmConfig(preset="dpo", epochs=2))
    resolve(AlgorithmConfig(preset="ppo", mini_batches=4, epochs=4))


@pytest.mark.parametrize(
    ("preset", "overrides", "setting"),
    [
        ("gspo", {"correction": "none"}, {}),
        ("gspo", {"correction": "seq_mask", "correction_high": 3.0}, {}),
        ("dapo", {"mode": "bypass", "correction": "none"}, {}),
        ("dapo", {"mode": "bypass", "correction": "mask", "correction_low": 0.5}, {}),
        ("maxrl", {"kl_coef": 0.01, "kl_in": "loss"}, {}),
        ("ppo", {}, {"group_size": 1}),
        ("dpo", {"preference_loss": "cdpo", "label_smoothing": 0.1}, {}),
    ],
)
def test_what_goes_together_is_allowed(preset: str, overrides: Override, setting: dict[str, object]) -> None:
    choose(preset, overrides, **setting)


def test_presets_do_not_need_torch() -> None:
    code = "import sys, learner.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_the_table_in_the_docs_is_the_one_the_presets_print() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert preset_table.between_marks(page) == preset_table.render(), (
        "run: python -m learner.preset_table docs/algorithms.md"
    )


def test_the_table_shows_every_choice_that_differs_from_the_default() -> None:
    table = preset_table.render()
    plain = Choices(preset="x")
    for name, c in PRESETS.items():
        row = next(line for line in table.splitlines() if line.startswith(f"| `{name}` "))
        for field in Choices.model_fields:
            value = getattr(c, field)
            if value != getattr(plain, field) and field not in ("preset", "objective"):
                shown = preset_table.show(value)
                assert shown in row, f"{name}: {field} = {shown} is not shown"
