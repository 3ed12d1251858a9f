"""Proves that set-up knows a ready environment, and names what is absent, of another version, or damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launch import setup_env
from launch.setup_env import Environment, canonical, locked


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A real, empty virtual environment: pip is all that it holds."""
    env = Environment(tmp_path_factory.mktemp("env") / "venv")
    env.create()
    return env


def pip_of(env: Environment) -> tuple[Path, str]:
    """Where pip lies in an environment, and its version."""
    (info,) = env.path.glob("lib/python*/site-packages/pip-*.dist-info")
    return info.parent / "pip", info.name.removeprefix("pip-").removesuffix(".dist-info")


def test_the_lock_pins_every_package_once() -> None:
    pins = locked()
    assert len(pins) > 100 and pins["torch"] == "2.13.0" and all(pins.values())
    assert not {"torchvision", "torchaudio", "torchcodec"} & pins.keys()


def test_names_are_compared_as_indexes_do() -> None:
    assert canonical("Ruamel_YAML.clib") == "ruamel-yaml-clib"


def test_a_new_environment_runs_and_a_half_made_one_does_not(environment: Environment, tmp_path: Path) -> None:
    assert environment.runs()
    half = Environment(tmp_path / "half")
    (half.path / "bin").mkdir(parents=True)
    assert not half.runs()
    shutil.copy("/bin/false", half.python)
    assert not half.runs()


def test_absent_and_other_versions_are_wrong(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    _, version = pip_of(environment)
    monkeypatch.setattr(setup_env, "locked", lambda: {"pip": version, "ray": "2.60.0"})
    assert environment.wrong() == ["ray==2.60.0"]
    monkeypatch.setattr(setup_env, "locked", lambda: {"pip": "1.0"})
    assert environment.wrong() == ["pip==1.0"]


def test_a_truncated_or_missing_file_is_wrong(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    package, version = pip_of(environment)
    monkeypatch.setattr(setup_env, "locked", lambda: {"pip": version})
    file = package / "__main__.py"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    assert environment.wrong() == [f"pip=={version}"]
    file.unlink()
    assert environment.wrong() == [f"pip=={version}"]
    file.write_bytes(whole)
    assert environment.wrong() == []
