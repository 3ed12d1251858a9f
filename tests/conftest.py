"""Shared by all tests: models made on the spot, once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.models import make_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 0.1 M parameters that speaks bytes, float32."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")
