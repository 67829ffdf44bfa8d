"""The contract of a sink where a kill takes seconds: ``make test`` takes a few of the cases that kill.

Tests that kill once and by name (`test_prepared_survives…`) run always.
"""

from __future__ import annotations

import zlib

import pytest

from holdfast.testing import SinkContract, sink_contract
from tests.tiers import cases

_CASES = {"delay_ms": sink_contract.DELAYS_MS, "moment": sink_contract.WORKER_DIES}


class SampledContract(SinkContract):
    """See the module; one case of each test that has several, and one kill of those that a case has."""

    def _delays(self, moment: str) -> tuple[int, ...]:
        return tuple(cases(super()._delays(moment)))


def mark_the_others(items: list[pytest.Item]) -> None:
    """Mark the cases that ``make test`` leaves out: of each test it keeps one, and not of every sink the same."""
    for item in items:
        if not (isinstance(item, pytest.Function) and item.cls and issubclass(item.cls, SampledContract)):
            continue
        given = item.callspec.params if hasattr(item, "callspec") else {}
        number = zlib.crc32(f"{item.cls.__name__} {item.originalname}".encode())
        if any(given[name] != every[number % len(every)] for name, every in _CASES.items() if name in given):
            item.add_marker(pytest.mark.all)
