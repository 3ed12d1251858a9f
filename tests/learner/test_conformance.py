"""The command that replays golden files: all 110 golden cases pass, a wrong number or an unknown case fails the run,
numbers are read from the file and never from the code, and masked NaN changes nothing."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from learner import conformance

GOLDEN = Path(__file__).parent / "golden.json"


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(GOLDEN.read_text())
    return loaded


def test_every_golden_case_is_reproduced(golden: dict[str, Any]) -> None:
    outcomes = conformance.run(golden)
    assert len(outcomes) == len(golden["cases"]) == 110
    assert [o.name for o in outcomes if not o.passed] == []
    assert max(o.worst for o in outcomes) < 1e-12


def test_every_gradient_of_the_file_is_compared(golden: dict[str, Any]) -> None:
    """The policy, KL, PPO, entropy and DPO cases all state gradients; a replay that forgets them would show here."""
    outcomes = {o.name: o for o in conformance.run(golden)}
    stated = [n for n, c in golden["cases"].items() if "dloss_dlogprob" in c or "dH_dlogits" in c or "sigmoid" in c]
    assert len(stated) == 97
    assert [n for n in stated if outcomes[n].gradient_error is None] == []


@pytest.mark.parametrize("key", ["loss", "dloss_dlogprob", "advantages", "clip_fraction"])
def test_one_wrong_number_fails_its_case_alone(golden: dict[str, Any], key: str) -> None:
    broken = copy.deepcopy(golden)
    case = broken["cases"]["dapo/ragged"]
    if isinstance(case[key], list):
        case[key][0][0] += 2e-9
    else:
        case[key] += 2e-9
    assert [o.name for o in conformance.run(broken) if not o.passed] == ["dapo/ragged"]


def test_wrong_numbers_in_tables_are_seen(golden: dict[str, Any]) -> None:
    """Every number of every case, changed one at a time in a sample of places, is noticed."""
    for path in (
        ("advantage_table", "table", "half", "rloo", 0),
        ("two_groups", "advantages", "MaxRL", 2),
        ("maxrl_unbiasedness", "E_success_average"),
        ("equal_rewards_float32", "table", "7 x 0.1", "expected", 3),
        ("dapo_soft_overlong", "verl_style_uncapped", "40"),
        ("ppo_critic/gamma0.99_lam0.95", "returns", 0, 1),
        ("ppo_critic/gamma1.0_lam1.0", "dvalueloss_dvalue", 1, 1),
        ("dpo", "ipo_avg", "grad", 2, 2),
        ("adaptive_kl_controller", "trace", 2, "coef"),
        ("entropy", "dH_dlogits", 1, 0),
        ("multi_reward", "gdpo_normalize_then_sum", 3),
        ("length_penalty_primerl_linear", "advantages", 0),
        ("length_reward_kimi_k1.5", "reward", 1),
        ("areal_loglinear_prox", "logp_prox", 2, 2),
        ("offpolicy/full/opsm_delta0.1", "keep", 1),
        ("kl/ragged/k3_x_ratio", "per_token", 0, 0),
    ):
        broken = copy.deepcopy(golden)
        holder: Any = broken["cases"]
        for step in path[:-1]:
            holder = holder[step]
        holder[path[-1]] += 2e-9
        assert [o.name for o in conformance.run(broken) if not o.passed] == [path[0]], path


def test_an_unknown_family_quantity_or_row_is_unimplemented_and_fails(golden: dict[str, Any]) -> None:
    strange = copy.deepcopy(golden)
    strange["cases"] = {
        "quantum/full": golden["cases"]["dapo/full"],
        "offpolicy/full/teleport_C2": golden["cases"]["offpolicy/full/tis_token_C2"],
        "dapo/full": golden["cases"]["dapo/full"] | {"entanglement": 1.0},
        "two_groups": golden["cases"]["two_groups"] | {"advantages": {"by moonlight": [0.0] * 8}},
        "grpo/full/token-mean": {
            "algo": "nothing stated",
            "config": {"lo": 0.2},
            "mask": golden["inputs"]["masks"]["full"],
        },
    }
    outcomes = conformance.run(strange)
    assert all(o.note.startswith("unimplemented") and not o.passed for o in outcomes), outcomes


def test_numbers_come_from_the_file_and_not_from_the_code(golden: dict[str, Any]) -> None:
    """Another clip width in the config, another cap in the name: the old expectation no longer holds."""
    changed = copy.deepcopy(golden)
    cases = {
        "dapo/full": {"config": {"lo": 0.2, "hi": 0.05, "agg": "token-mean"}},
        "cispo/full/max2_low0": {"config": {"lo_abs": 0.0, "hi_abs": 1.1, "agg": "token-mean"}},
        "sapo/full/token-mean": {"config": {"tp": 2.0, "tn": 1.05, "agg": "token-mean"}},
    }
    changed["cases"] = {k: changed["cases"][k] | v for k, v in cases.items()}
    changed["cases"]["offpolicy/full/tis_token_C1.5"] = golden["cases"]["offpolicy/full/tis_token_C2"]
    changed["cases"]["offpolicy/full/icepop_0.5_7"] = golden["cases"]["offpolicy/full/icepop_0.5_5"]
    changed["cases"]["ppo_critic/gamma0.9_lam0.95"] = golden["cases"]["ppo_critic/gamma0.99_lam0.95"]
    outcomes = conformance.run(changed)
    assert len(outcomes) == 6
    assert not any(o.passed for o in outcomes)
    assert all(o.errors for o in outcomes), "failed for another reason than a number"


def test_a_case_may_bring_its_own_inputs(golden: dict[str, Any]) -> None:
    """Shared inputs are replaced by junk; the case's own rewards, groups and log-probs are the ones replayed."""
    inputs = golden["inputs"]
    own = {k: inputs[k] for k in ("rewards", "group_ids", "logp", "logp_old", "logp_behave", "logp_ref")}
    junk = {k: [[-1.0] * 3] * 4 for k in own if k.startswith("logp")} | {"rewards": [0.0] * 4, "masks": inputs["masks"]}
    for nested in (own, {"inputs": own}):
        moved = {"inputs": junk, "meta": golden["meta"]}
        moved["cases"] = {
            k: golden["cases"][k] | nested for k in ("dapo/ragged", "offpolicy/full/tis_seq_C2", "kl/full/k3")
        }
        assert [o.name for o in conformance.run(moved) if not o.passed] == []


def test_nan_at_masked_positions_changes_nothing(golden: dict[str, Any]) -> None:
    """The file's padding may hold anything: the ragged cases still come out exactly."""
    poisoned = copy.deepcopy(golden)
    mask = golden["inputs"]["masks"]["ragged"]
    for name in ("logp", "logp_old", "logp_behave", "logp_ref"):
        for i, row in enumerate(mask):
            for t, m in enumerate(row):
                if not m:
                    poisoned["inputs"][name][i][t] = float("nan")
    unmasked = {"ratio", "logp_prox"}  # stated for padding too; undefined there now
    poisoned["cases"] = {
        k: {a: b for a, b in c.items() if a not in unmasked} for k, c in golden["cases"].items() if "/ragged" in k
    }
    assert [(o.name, dict(o.errors)) for o in conformance.run(poisoned) if not o.passed] == []


def test_command_exit_codes_and_json(
    tmp_path: Path, golden: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert conformance.main([str(GOLDEN), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["passed"], summary["failed"], summary["unimplemented"]) == (110, 0, 0)
    assert summary["cases"]["gmpo/ragged"]["gradient_error"] < 1e-12

    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(golden | {"cases": {"dapo/full": golden["cases"]["dapo/full"] | {"loss": 1.0}}}))
    assert conformance.main([str(broken)]) == 1
    assert "FAIL  dapo/full" in capsys.readouterr().out

    for text in ("", "{}", "[1]", '{"cases": {}}'):
        broken.write_text(text)
        assert conformance.main([str(broken)]) == 2
    assert conformance.main([str(tmp_path / "missing.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
