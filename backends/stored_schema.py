"""Schemas in the headers of stored files and in messages: base64 of Arrow's IPC form."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.ipc as ipc

from holdfast.backends.schema import TableSchema
from holdfast.errors import CorruptionError


def encode_schemas(tables: Mapping[str, TableSchema]) -> dict[str, list[str]]:
    """Return by table its key schema and its value schema as text."""
    return {name: [encode_schema(side) for side in schema.sides()] for name, schema in tables.items()}


def decode_schemas(encoded: Mapping[str, Sequence[str]]) -> dict[str, TableSchema]:
    """Return the schemas that `encode_schemas` wrote.

    Raises `CorruptionError` if they are none.
    """
    try:
        return {name: TableSchema.of_sides(name, *map(decode_schema, sides)) for name, sides in encoded.items()}
    except (pa.ArrowException, OSError, ValueError, TypeError) as exc:
        raise CorruptionError(f"the schema of a state table cannot be read: {exc}", tables=list(encoded)) from exc


def encode_schema(schema: pa.Schema) -> str:
    """Return a schema as text."""
    return base64.b64encode(schema.serialize()).decode()


def decode_schema(text: str) -> pa.Schema:
    """Return the schema that `encode_schema` wrote.

    Raises `TypeError`, `ValueError`, `OSError`, `pyarrow.ArrowException` if it is none, a name in it, at any depth, is
    no text, or two columns have one name.
    """
    schema = ipc.read_schema(pa.py_buffer(base64.b64decode(text, validate=True)))
    for field in schema:
        _read_names(field)
    if len(set(schema.names)) < len(schema):
        raise ValueError("two columns have one name")
    return schema


def _read_names(field: pa.Field) -> None:
    """Raise UnicodeDecodeError where a name is not UTF-8: Arrow takes it, and fails when somebody asks for it."""
    _ = field.name
    for i in range(field.type.num_fields):
        _read_names(field.type.field(i))
