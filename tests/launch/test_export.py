"""Proves that what `headrace export` writes is what was trained: the run's last model as it is, any checkpoint through
the model's own names (adapters merged, or alone), and nothing at all where there is nothing whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.models import make_tiny_llama
from launch.config import load
from launch.export import export, export_adapter
from launch.run_dir import RunDirectory
from learner import checkpoint
from learner.policy import load_policy
from learner.weights import named_weights
from rollout.errors import ConfigError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", seed=0)


def write_checkpoint(run: RunDirectory, version: int) -> dict[str, torch.Tensor]:
    """A checkpoint of other weights than the model's, under the learner's names; returns what they come to."""
    torch.manual_seed(version)
    config = load(run.config_path)
    policy = load_policy(config.model.path, config.topology.learner, torch.device("cpu"))
    trained = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
    with torch.no_grad():
        for _, p in trained:
            p.copy_(torch.randn_like(p) * 0.1)
    state = [(f"policy/master/{name}", p.float()) for name, p in trained]
    state += [("policy/exp_avg/x", torch.ones(2)), ("rng/state/0", torch.get_rng_state())]
    checkpoint.write(checkpoint.path_of(run.checkpoints, version), iter(state), version, {}, writes=True)
    return {w.name: w.whole().detach().clone() for w in named_weights(policy)}


def loaded(path: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(path, dtype="auto").named_parameters())


@pytest.mark.parametrize("learner", [{}, {"lora_rank": 4}], ids=["full", "lora"])
def test_a_checkpoint_becomes_a_model(make_run: Any, tiny: Path, tmp_path: Path, learner: dict[str, Any]) -> None:
    over = {
        "model": {"path": str(tiny), "dtype": "float32"},
        "topology": {"learner": {"compute_dtype": "float32", **learner}},
    }
    run = make_run(over=over)
    older, newer = (write_checkpoint(run, version) for version in (4, 8))
    assert export(run, tmp_path / "new").startswith(f"{tmp_path}/new: version 8, from")
    export(run, tmp_path / "old", version=4)
    for folder, expected in (("old", older), ("new", newer)):
        got = loaded(tmp_path / folder)
        assert got.keys() == expected.keys() and len(got) > 10
        assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert (tmp_path / "new/tokenizer.json").is_file()


def test_adapters_alone_are_what_peft_loads(make_run: Any, tiny: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    learner = {"compute_dtype": "float32", "lora_rank": 4, "lora_alpha": 6.0}
    run = make_run(over={"model": {"path": str(tiny), "dtype": "float32"}, "topology": {"learner": learner}})
    merged = write_checkpoint(run, 8)
    assert "the adapters of version 8" in export_adapter(run, tmp_path / "adapter")
    assert (tmp_path / "adapter/adapter_model.safetensors").stat().st_size < tiny_bytes(tiny) / 2
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny, dtype="auto"), tmp_path / "adapter")
    got = dict(loaded.merge_and_unload().named_parameters())
    assert got.keys() == merged.keys() and all(torch.allclose(got[n], merged[n], atol=1e-6) for n in merged)
    with pytest.raises(ConfigError, match="exists; name a new directory"):
        export_adapter(run, tmp_path / "adapter")


def test_a_run_without_adapters_has_none_to_export(make_run: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trained all weights"):
        export_adapter(make_run(), tmp_path / "out")


def tiny_bytes(path: Path) -> int:
    return (path / "model.safetensors").stat().st_size


def test_the_model_of_a_finished_run_is_copied(make_run: Any, tmp_path: Path) -> None:
    run = make_run()
    (run.path / "model").mkdir()
    (run.path / "model/weights").write_text("w")
    assert "version 8, the run's last" in export(run, tmp_path / "out")
    assert (tmp_path / "out/weights").read_text() == "w" and not list(tmp_path.glob(".out*"))


def test_what_cannot_be_exported_is_refused(make_run: Any, tmp_path: Path) -> None:
    run = make_run()
    with pytest.raises(ConfigError, match="has no whole checkpoint"):
        export(run, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"--version 3: .*checkpoints there: none"):
        export(run, tmp_path / "out", version=3)
    with pytest.raises(ConfigError, match="exists; name a new directory"):
        export(run, run.path)
    assert not (tmp_path / "out").exists()
