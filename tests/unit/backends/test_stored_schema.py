"""Schemas in headers: read as they were written, and refused at once where Arrow would fail later."""

from __future__ import annotations

import base64

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.schema import TableSchema, decode_schema, decode_schemas, encode_schema, encode_schemas
from holdfast.errors import CorruptionError
from holdfast.testing.state_rows import TYPES, VALUE_TYPES

KEY = pa.schema([("user", pa.string())])
STATE = pa.schema([("n", pa.int64())])
NESTED = pa.schema([("n", pa.int64()), ("all", pa.list_(pa.map_(pa.string(), pa.struct([("inner", pa.date32())]))))])


def test_what_was_written_is_read() -> None:
    assert decode_schema(encode_schema(NESTED)).equals(NESTED)


@pytest.mark.parametrize("name", ["n", "inner"])
def test_a_name_that_is_no_text_is_refused_at_any_depth(name: str) -> None:
    """Arrow opens such a schema, and raises UnicodeDecodeError at the first look at the name, wherever that is."""
    data = base64.b64decode(encode_schema(NESTED))
    length = len(name).to_bytes(4, "little")
    spoiled = data.replace(length + name.encode(), length + b"\xf6" * len(name))
    assert spoiled != data
    with pytest.raises(ValueError, match="utf-8"):
        decode_schema(base64.b64encode(spoiled).decode())


@pytest.mark.parametrize("text", ["", "no base64!", base64.b64encode(b"no schema").decode()])
def test_what_is_no_schema_is_an_error_that_readers_expect(text: str) -> None:
    with pytest.raises((ValueError, OSError, pa.ArrowException)):
        decode_schema(text)


def test_schemas_of_every_type_come_back() -> None:
    """Their text would not: programs read state by these."""
    columns = pa.schema([(f"c{i}", t) for i, (t, *_) in enumerate([*TYPES, *VALUE_TYPES])])
    tables = {"state": TableSchema.of("state", KEY, columns), "bare": TableSchema.of("bare", KEY, pa.schema([]))}
    assert decode_schemas(encode_schemas(tables)) == tables


@given(st.lists(st.one_of(st.binary().map(lambda b: b.hex()), st.text(), st.none()), max_size=3))
def test_what_is_no_schema_is_corrupt(sides: list[str]) -> None:
    with pytest.raises(CorruptionError, match="state"):
        decode_schemas({"state": sides})


def test_a_schema_that_was_cut_is_corrupt() -> None:
    key, value = encode_schemas({"state": TableSchema.of("state", KEY, STATE)})["state"]
    for length in range(0, len(key), 4):
        with pytest.raises(CorruptionError):
            decode_schemas({"state": [key[:length], value]})
