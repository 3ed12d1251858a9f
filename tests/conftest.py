"""Settings of every test: hypothesis searches without a clock (the machine may be busy; pytest-timeout bounds each test)."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("headrace", deadline=None, max_examples=50)
settings.load_profile("headrace")
