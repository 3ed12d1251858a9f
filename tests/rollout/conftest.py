"""What the tests of the real engine share: tiny models on disk, and the weights to send them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.models import make_tiny_llama

Weights = dict[str, torch.Tensor]


class Made:
    """Makes weights and model directories."""

    @staticmethod
    def load(path: Path) -> Weights:
        from safetensors.torch import load_file

        return load_file(path / "model.safetensors")

    @staticmethod
    def emitter(weights: Weights, version: int) -> Weights:
        """Weights of the same shapes under which every token, after any prompt, is the byte `version`.

        Every embedding is the same vector, no layer adds to it, and only row `version` of the output head answers it.
        """
        made = {}
        for name, tensor in weights.items():
            silent = name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight"))
            made[name] = torch.zeros_like(tensor) if silent else torch.ones_like(tensor)
        made["lm_head.weight"][version] = 1.0
        return made

    @staticmethod
    def reseeded(weights: Weights, seed: int) -> Weights:
        """Random weights of the same shapes and about the same size."""
        g = torch.Generator().manual_seed(seed)
        return {
            n: torch.ones_like(t) if "norm" in n else 0.05 * torch.randn(t.shape, generator=g).to(t.dtype)
            for n, t in weights.items()
        }

    @staticmethod
    def log_probs(path: Path, prompt: list[int], tokens: list[int], weights: Weights | None = None) -> np.ndarray:
        """Of `tokens` after `prompt`, by transformers in float32, under other weights than those of the directory."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        if weights is not None:
            model.load_state_dict(weights)
        ids = torch.tensor([prompt + tokens])
        with torch.no_grad():
            rows = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1], -1)
        return rows.gather(1, ids[0, len(prompt) :, None]).squeeze(1).numpy()

    @staticmethod
    def save(path: Path, source: Path, weights: Weights, **config: object) -> Path:
        """A model directory like `source` with other weights and some configuration keys changed."""
        from safetensors.torch import save_file

        shutil.copytree(source, path, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(
            {n: t.contiguous() for n, t in weights.items()}, path / "model.safetensors", metadata={"format": "pt"}
        )
        text = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**text, **config}))
        return path


@pytest.fixture(scope="session")
def made() -> type[Made]:
    return Made


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that speaks bytes, untied head, float32."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", seed=0)


@pytest.fixture(scope="session")
def emitter_dir(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with weights that emit the byte 0: version 0."""
    return Made.save(tmp_path_factory.mktemp("models") / "emitter", tiny_dir, Made.emitter(Made.load(tiny_dir), 0))


@pytest.fixture(scope="session")
def tied_dir(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with its output head tied to the embeddings, as SmolLM2 has it."""
    weights = Made.reseeded(Made.load(tiny_dir), 1)
    del weights["lm_head.weight"]
    return Made.save(tmp_path_factory.mktemp("models") / "tied", tiny_dir, weights, tie_word_embeddings=True)
