"""The contract of a sink where a kill takes seconds: a quick run takes a few of the cases that kill, the long one all.

Tests that kill once and by name (`test_prepared_survives…`) run always.
"""

from __future__ import annotations

import pytest

from holdfast.testing import SinkContract
from holdfast.testing.sinks import kills
from tests.repetitions import LONG, sample, turn_of

_CASES = {"delay_ms": kills.DELAYS_MS, "moment": kills.WORKER_DIES}


class SampledContract(SinkContract):
    """See the module; one case of each test that has several, and one kill of those that a case has."""

    @pytest.fixture(autouse=True)
    def _has_its_turn(self, request: pytest.FixtureRequest) -> None:
        callspec = getattr(request.node, "callspec", None)
        for name, cases in _CASES.items():
            if not LONG and callspec is not None and name in callspec.params:
                turn = turn_of(f"{request.cls.__name__} {request.node.originalname}") % len(cases)
                if callspec.params[name] != cases[turn]:
                    pytest.skip("its turn comes in another quick run: tests/repetitions.py")

    def _delays(self, moment: str) -> tuple[int, ...]:
        return tuple(sample(super()._delays(moment)))
