"""Numbers of a list's elements, as a restored query goes on with them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.errors import CorruptionError
from holdfast.spark_integration.tables.entry_rows import first_number, renumbered

TABLE = TableSchema.of(
    "l.items", pa.schema([("user", pa.int64()), ("seq", pa.int64())]), pa.schema([("item", pa.int64())])
)


def elements(*numbers: int) -> Run:
    columns = [pa.array([7] * len(numbers)), pa.array(numbers, pa.int64())]
    keys = Keys(np.full(len(numbers), 5, np.uint64), pa.record_batch(columns, schema=TABLE.key))
    return Run.build(TABLE, keys, pa.record_batch([pa.array(range(len(numbers)))], schema=TABLE.value))


def test_numbers_become_smaller_and_stay_in_order() -> None:
    """Whatever was restored before: an earlier restore has left numbers below zero."""
    run = renumbered(elements(-(2**60), first_number(3), first_number(8) + 1), 7)
    assert run.keys.column(1).to_pylist() == [-(2**60) - 7 * 2**32, -4 * 2**32, 2**32 + 1]


@pytest.mark.parametrize(("number", "versions"), [(-(2**63), 1), (-(2**62), 2**31 - 1), (0, 2**31), (0, 2**61)])
def test_numbers_that_no_query_gives_are_damage(number: int, versions: int) -> None:
    """As of a manifest that somebody has altered: smaller ones would begin again at the largest."""
    with pytest.raises(CorruptionError, match="numbers that no query gives them"):
        renumbered(elements(number, 1), versions)
