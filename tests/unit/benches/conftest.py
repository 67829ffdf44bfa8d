"""Engines that no test of a run waits for."""

from __future__ import annotations

import pytest

from holdfast.benches.running import carrying_out
from tests.unit.benches.tiny_run import Engines


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    found = Engines()
    monkeypatch.setattr(carrying_out, "run_engine", found.run)
    return found
