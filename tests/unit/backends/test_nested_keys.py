"""Keys of structs and lists: what may be null inside of them is no part of a table's schema."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.backends.evolution import key_changes
from holdfast.backends.run import Keys, TableSchema

NULLS: dict[str, Any] = {"point": {"a": None, "note": "x"}, "pairs": [None, {"a": None}]}


def table(*, nullable: bool) -> TableSchema:
    point = pa.struct([pa.field("a", pa.int64(), nullable), pa.field("note", pa.string(), nullable)])
    pair = pa.struct([pa.field("a", pa.float64(), nullable)])
    key = pa.schema([("point", point), ("pairs", pa.list_(pa.field("element", pair, nullable)))])
    return TableSchema.of("t", key, pa.schema([("n", pa.int64())]))


def keys_of(*keys: dict[str, Any]) -> Keys:
    of = table(nullable=True)
    # Equal hashes, so that keys are compared.
    return Keys.of(of, np.zeros(len(keys), np.int64), pa.Table.from_pylist(list(keys), schema=of.key))


def test_it_is_one_schema() -> None:
    loose, strict = table(nullable=True), table(nullable=False)
    assert loose == strict
    assert not key_changes(loose, strict)
    assert keys_of(NULLS).columns.to_pylist() == [NULLS]
