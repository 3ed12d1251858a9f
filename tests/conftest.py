"""Shared by all tests: models made on the spot, once per session; hypothesis searches without a clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from actors.models import make_tiny_llama

# Machines are busy: pytest-timeout bounds each test, so that a slow example is never a failure.
settings.register_profile("headrace", deadline=None, max_examples=50)
settings.load_profile("headrace")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 0.1 M parameters that speaks bytes, float32."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")
