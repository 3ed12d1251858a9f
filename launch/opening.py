"""Which run directory a `headrace run` uses, and whether what it is asked to do fits what is already there.

headrace run T.yaml                       a new directory, <run.dir>/<run.name>-NNN
headrace run T.yaml --run-dir D           a new run in D
headrace run T.yaml --run-dir D --resume  goes on in D; T may differ from its config.yaml in MAY_CHANGE only
headrace run T.yaml --resume              the newest run of that name
headrace run D --resume                   goes on with D's own config.yaml
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launch.config import RunConfig, load
from launch.run_dir import RunDirectory
from rollout.errors import ConfigError

MAY_CHANGE = (  # what a resumed run may be told anew: it alters when or where, never what is learnt from what
    "run.steps",
    "run.dir",
    "device",
    "topology.rollout",
    "topology.reward",
    "evaluate.every",
    "checkpoint",
    "observe",
    "weights",
)


def open_run(
    topology: str, overrides: Sequence[str], run_dir: str | None, resume: bool
) -> tuple[RunConfig, RunDirectory]:
    """The config and the directory it belongs in. Raises ConfigError before anything is written.

    A new numbered directory is made (empty) so that two runs started at once get two; nothing else is touched.
    """
    given = Path(topology)
    if given.is_dir():
        directory = RunDirectory.open(given)
        if run_dir is not None and Path(run_dir) != given:
            raise ConfigError(f"--run-dir {run_dir}: {given} is a run directory already; give the one or the other")
        if not resume:
            raise ConfigError(
                f"{given}: is a run directory; add --resume, or give {directory.config_path} to run it anew"
            )
        config = load(directory.config_path, overrides)
    else:
        config = load(given, overrides)
        found = _directory(config, run_dir, resume)
        if found is None:
            return config, RunDirectory.create(Path(config.run.dir), config.run.name)
        directory = found
    if resume:
        _refuse_other_run(config, load(directory.config_path), directory)
    return config, directory


def _directory(config: RunConfig, run_dir: str | None, resume: bool) -> RunDirectory | None:
    """The directory that was asked for; None where a new numbered one is to be made."""
    if resume:
        if run_dir is not None:
            return RunDirectory.open(run_dir)
        newest = RunDirectory.latest(Path(config.run.dir), config.run.name)
        if newest is None:
            raise ConfigError(
                f"--resume: {config.run.dir} has no run named {config.run.name}; give --run-dir, or leave it out"
            )
        return newest
    if run_dir is None:
        return None
    directory = RunDirectory(Path(run_dir))
    if directory.config_path.exists():
        raise ConfigError(f"--run-dir {run_dir}: holds a run already; add --resume to go on with it, or choose another")
    if directory.path.exists() and (not directory.path.is_dir() or any(directory.path.iterdir())):
        raise ConfigError(f"--run-dir {run_dir}: holds other files; name a new or an empty directory")
    return directory


def _refuse_other_run(config: RunConfig, before: RunConfig, directory: RunDirectory) -> None:
    for path, old, new in differences(before.model_dump(mode="json"), config.model_dump(mode="json")):
        if not any(path == free or path.startswith(f"{free}.") for free in MAY_CHANGE):
            raise ConfigError(
                f"--resume: {path} is {new!r}, but {directory.path} was begun with {old!r}; keep it, or start a new run"
            )


def differences(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted path, value in a, value in b) wherever two configs differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            yield from differences(a.get(key), b.get(key), f"{path}.{key}" if path else key)
    elif a != b:
        yield path, a, b
