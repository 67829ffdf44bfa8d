"""Rows of RocksDB that were written with several schemas, in one look-up."""

from __future__ import annotations

import pyarrow as pa
import pytest

from holdfast.backends.rocksdb.codec.rows import decode_numbered, encode_values
from holdfast.errors import CorruptionError

OLD = pa.schema([("n", pa.int32())])
NEW = pa.schema([("n", pa.int64()), ("note", pa.large_string())])
NOTHING = pa.schema([])
SCHEMAS = (OLD, NOTHING, NEW)


def rows_of(number: int, *rows: dict[str, object]) -> list[bytes]:
    schema = SCHEMAS[number - 1]
    columns = [pa.array([row[f.name] for row in rows], f.type) for f in schema]
    batch = (
        pa.RecordBatch.from_arrays(columns, schema=schema)
        if columns
        else pa.RecordBatch.from_struct_array(pa.StructArray.from_buffers(pa.struct([]), len(rows), [None]))
    )
    return encode_values(batch, bytes([number])).to_pylist()


def decoded(rows: list[bytes | None]) -> list[dict[str, object]]:
    return decode_numbered(pa.array(rows, pa.large_binary()), SCHEMAS, NEW).to_pylist()


def test_each_row_is_decoded_with_its_own_schema() -> None:
    """In any order, absent rows among them; also where all rows have one schema."""
    old, new = rows_of(1, {"n": 1}, {"n": None}), rows_of(3, {"n": 2**40, "note": "x"}, {"n": 3, "note": None})
    [nothing] = rows_of(2, {})
    absent = {"n": None, "note": None}
    assert nothing == b"\2"
    assert decoded([new[1], None, old[0], nothing, new[0], old[1], None]) == [
        {"n": 3, "note": None},
        absent,
        {"n": 1, "note": None},
        absent,
        {"n": 2**40, "note": "x"},
        absent,
        absent,
    ]
    assert decoded([old[0], None]) == [{"n": 1, "note": None}, absent]
    assert decoded([None, None]) == [absent, absent]
    assert decoded([]) == []
    sliced = pa.array([old[0], None, new[0]], pa.large_binary()).slice(1)
    assert decode_numbered(sliced, SCHEMAS, NEW).to_pylist() == [absent, {"n": 2**40, "note": "x"}]


@pytest.mark.parametrize("row", [b"", b"\0\0", b"\4\0\0\0\0\0", b"\1\0", b"\2\0", b"\3"])
def test_bytes_that_are_no_row_are_damage(row: bytes) -> None:
    """An unknown number, none, or the bytes of another schema."""
    with pytest.raises(CorruptionError):
        decoded([rows_of(1, {"n": 1})[0], row])
    with pytest.raises(CorruptionError):
        decoded([row])
