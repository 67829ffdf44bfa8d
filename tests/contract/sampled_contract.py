"""The contract of a sink where a kill takes seconds: ``make test`` takes a few of the cases that kill.

Tests that kill once and by name (`test_prepared_survives…`) run always.
"""

from __future__ import annotations

import zlib

import pytest

from holdfast.testing import SinkContract
from holdfast.testing.sinks import kills
from tests.tiers import ALL, cases

_CASES = {"delay_ms": kills.DELAYS_MS, "moment": kills.WORKER_DIES}


class SampledContract(SinkContract):
    """See the module; one case of each test that has several, and one kill of those that a case has."""

    @pytest.fixture(autouse=True)
    def _runs_in_this_tier(self, request: pytest.FixtureRequest) -> None:
        callspec = getattr(request.node, "callspec", None)
        for name, every in _CASES.items():
            if not ALL and callspec is not None and name in callspec.params:
                which = zlib.crc32(f"{request.cls.__name__} {request.node.originalname}".encode())
                if callspec.params[name] != every[which % len(every)]:
                    pytest.skip("only in make test-all")

    def _delays(self, moment: str) -> tuple[int, ...]:
        return tuple(cases(super()._delays(moment)))
