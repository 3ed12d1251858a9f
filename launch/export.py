"""`headrace export D --out HF_DIR [--adapter]`: trained weights as a directory that transformers and vLLM load.

the last version of a finished run   the run has written it already (D/model): copied
any other version                    out of its checkpoint: float32 masters into the model, adapters merged, cast
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from launch.config import RunConfig, load
from launch.run_dir import RunDirectory
from rollout.errors import ConfigError

if TYPE_CHECKING:
    from learner.policy import PolicyModule


def export(run: RunDirectory, out: Path, version: int | None = None) -> str:
    """Write `out`; returns what was written, in words. Raises ConfigError where `out` is there, or nothing to write."""
    _refuse_to_replace(out)
    config = load(run.config_path)
    final = run.path / "model"
    if final.is_dir() and version in (None, config.run.steps):
        making = out.with_name(f".{out.name}.making")
        shutil.rmtree(making, ignore_errors=True)
        shutil.copytree(final, making)
        making.rename(out)
        return f"{out}: version {config.run.steps}, the run's last"
    path = _checkpoint(run, version)
    _from_checkpoint(config, path, out)
    return f"{out}: version {int(path.name[1:])}, from {path}"


def export_adapter(run: RunDirectory, out: Path, version: int | None = None) -> str:
    """Write the adapters of a checkpoint alone, as peft keeps them: what `--lora-modules` of vLLM and peft load."""
    _refuse_to_replace(out)
    config = load(run.config_path)
    if not config.topology.learner.lora_rank:
        raise ConfigError(f"--adapter: {run.path} trained all weights (topology.learner.lora_rank is 0); leave it out")
    path = _checkpoint(run, version)
    import torch

    policy = _policy(config, path)
    making = out.with_name(f".{out.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    policy.model.to(getattr(torch, config.model.dtype)).save_pretrained(str(making))
    making.rename(out)
    return f"{out}: the adapters of version {int(path.name[1:])}, from {path}; they belong to {config.model.path}"


def _refuse_to_replace(out: Path) -> None:
    if out.exists():
        raise ConfigError(f"--out {out}: exists; name a new directory")


def _checkpoint(run: RunDirectory, version: int | None) -> Path:
    from learner import checkpoint

    if version is None:
        newest, passed_over = checkpoint.latest(run.checkpoints)
        if newest is None:
            why = f" ({passed_over[0]})" if passed_over else ""
            raise ConfigError(f"{run.path}: has no whole checkpoint{why}; checkpoint.every says when the first is made")
        return newest
    path = checkpoint.path_of(run.checkpoints, version)
    try:
        checkpoint.read_manifest(path)
    except checkpoint.TornCheckpoint as error:
        there = ", ".join(str(int(p.name[1:])) for p in sorted(run.checkpoints.glob("v*"))) or "none"
        raise ConfigError(f"--version {version}: {error}; checkpoints there: {there}") from None
    return path


def _from_checkpoint(config: RunConfig, path: Path, out: Path) -> None:
    import torch

    from learner import export as model_directory
    from learner.weights import named_weights

    policy, dtype = _policy(config, path), getattr(torch, config.model.dtype)
    with torch.no_grad():
        named = ((weight.name, weight.whole().to(dtype)) for weight in named_weights(policy))
        model_directory.write(out, Path(config.model.path), named, config.model.dtype)


def _policy(config: RunConfig, path: Path) -> PolicyModule:
    """The model in float32 with the masters of a checkpoint."""
    import torch

    from learner import checkpoint
    from learner.policy import load_policy

    exact = config.topology.learner.model_copy(
        update={"compute_dtype": "float32", "attention": "auto", "gradient_checkpointing": False}
    )
    policy = load_policy(config.model.path, exact, torch.device("cpu"))
    params = dict(policy.named_parameters())
    with torch.no_grad():
        for key, tensor in checkpoint.tensors(path, checkpoint.read_manifest(path, digests=False)):
            name = key.removeprefix("policy/master/")
            if name != key and name in params:  # a value head is the critic's, and stays behind
                params[name].copy_(tensor)
    return policy
