"""Tables and keys: what fits is converted, and what does not is refused by name."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from holdfast.backends.run import Keys, TableSchema
from holdfast.backends.schema import find_table, require_declared
from holdfast.errors import InvalidArgumentError, NotFoundError, SchemaMismatchError
from holdfast.testing.state_rows import COUNTS, PAIRS, TABLES


def test_what_a_table_cannot_be() -> None:
    """A schema that would lose data is refused when it is made."""
    with pytest.raises(InvalidArgumentError, match="at least one key column"):
        TableSchema.of("t", pa.schema([]), pa.schema([("n", pa.int64())]))
    with pytest.raises(InvalidArgumentError, match=r"unique.*a"):
        TableSchema.of("t", pa.schema([("a", pa.int64()), ("a", pa.int64())]), pa.schema([]))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"m": [1]}), "do not fit"),
        (pa.table({"n": [1], "m": [1]}), "do not fit"),
        (pa.table({"n": ["12"]}), r"a different type.*given=string"),
        (pa.table({"n": [1.5]}), "cannot be stored"),
        (pa.table({"n": pa.array([2**63], pa.uint64())}), "cannot be stored"),
        (pa.table([pa.array([1]), pa.array([1])], names=["n", "n"]), "do not fit"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(table: pa.Table, message: str) -> None:
    """The error names table and column, and nothing is truncated."""
    with pytest.raises(SchemaMismatchError, match=message) as caught:
        COUNTS.conform(table, "value")
    assert caught.value.facts["table"] == "counts"


def test_columns_in_another_order_or_in_chunks_fit() -> None:
    """Names decide, not positions; chunks and dictionaries are unpacked."""
    table = pa.table(
        {
            "name": pa.chunked_array([["a"], [], ["b", None]]).dictionary_encode(),
            "right": pa.array([-0.0, None, 1], pa.float32()),
            "left": pa.array([1, 2, 3], pa.int8()),
        }
    )
    keys = Keys.of(PAIRS, np.arange(3), table)
    assert keys.columns.schema == PAIRS.key
    assert keys.columns.to_pylist()[0] == {"left": 1, "right": 0.0, "name": "a"}
    with pytest.raises(InvalidArgumentError, match="one hash for each key"):
        Keys.of(PAIRS, np.arange(2), table)


def test_what_stands_under_a_name_is_found_or_the_names_are_listed() -> None:
    """A misspelled table is refused wherever a table is named, with what could be meant."""
    assert find_table(TABLES, "counts") is TABLES["counts"]
    with pytest.raises(NotFoundError, match=r"no such table.*table=count tables=.*counts"):
        find_table(TABLES, "count")


def test_stored_tables_must_be_declared() -> None:
    """State is never dropped because the operator forgot a table; declaring one more is fine."""
    require_declared(["counts"], TABLES)
    with pytest.raises(SchemaMismatchError, match=r"does not declare.*older"):
        require_declared(["counts", "older"], TABLES)
