"""Schemas in the headers of stored files: base64 of Arrow's IPC form."""

from __future__ import annotations

import base64

import pyarrow as pa
import pyarrow.ipc as ipc


def encode_schema(schema: pa.Schema) -> str:
    """Return a schema as text."""
    return base64.b64encode(schema.serialize()).decode()


def decode_schema(text: str) -> pa.Schema:
    """Return the schema that `encode_schema` wrote.

    Raises
    ------
    TypeError, ValueError, OSError, pyarrow.ArrowException
        It is none, or a name in it, at any depth, is no text.
    """
    schema = ipc.read_schema(pa.py_buffer(base64.b64decode(text, validate=True)))
    for field in schema:
        _read_names(field)
    return schema


def _read_names(field: pa.Field) -> None:
    """Raise UnicodeDecodeError where a name is not UTF-8: Arrow takes it, and fails when somebody asks for it."""
    _ = field.name
    for i in range(field.type.num_fields):
        _read_names(field.type.field(i))
