"""Which cases of the contracts ``make test`` has, and rows of an upsert by several columns.

Of the cases in which a kill takes seconds ``make test`` takes a few; tests that kill once and by name
(`test_prepared_survives…`) run always. Upserts by several columns, a boolean and nulls among them, meet most of what
can go wrong where one column cannot.
"""

from __future__ import annotations

import zlib

import pyarrow as pa
import pytest

from holdfast.testing import SinkContract, sink_contract
from tests.tiers import cases


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_the_others(items)


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


KEYS = ["flag", "key", "word"]


class SeveralKeys:
    """Rows for a `SinkContract` of a sink that upserts by `KEYS`."""

    def schema(self) -> pa.Schema:
        return pa.schema([("flag", pa.bool_()), ("key", pa.int64()), ("word", pa.string()), ("amount", pa.float64())])

    def rows(self, n: int, seed: int, attempt: int = 0) -> pa.Table:
        flags = [(None, True, False)[i % 3] for i in range(n)]
        keys = [i // 3 or None for i in range(n)]
        amounts = [attempt + i / 4 for i in range(n)]
        return pa.table([flags, keys, [f"seed {seed}"] * n, amounts], schema=self.schema())
