"""Schemas in headers: read as they were written, and refused at once where Arrow would fail later."""

from __future__ import annotations

import base64

import pyarrow as pa
import pytest

from holdfast.backends.stored_schema import decode_schema, encode_schema

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
