"""The columns of a Parquet sink, stored when the first query opens it.

::

    _holdfast/<sink>/schema     kind "sink-schema": sink, columns: the Arrow schema as an IPC message, base64
"""

from __future__ import annotations

import base64
import binascii

import pyarrow as pa

from holdfast.backends import stored_file
from holdfast.errors import NotFoundError
from holdfast.snapshotter.fields import Fields
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.sinks.files.claims import FOLDER

KIND = "sink-schema"


def read_schema(storage: ObjectStorage, sink: str) -> pa.Schema | None:
    """Return the stored columns; None if there are none.

    Raises
    ------
    CorruptionError
        They are damaged.
    """
    key = _key(sink)
    source = f"{storage.url}/{key}"
    try:
        data = storage.get(key)
    except NotFoundError:
        return None
    stored = stored_file.decode(data, source=source, kind=KIND, plain_bytes_max=0)
    fields = Fields(stored.header, source, "sink", "columns")
    if fields.text("sink") != sink:
        fields.refuse("is of another sink")
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(fields.text("columns"), validate=True)))
    except (binascii.Error, pa.ArrowException, OSError, ValueError):
        fields.refuse("holds no schema")
    return schema.remove_metadata()


def put_schema(storage: ObjectStorage, sink: str, schema: pa.Schema) -> None:
    """Store the columns of the rows to come."""
    columns = base64.b64encode(schema.remove_metadata().serialize()).decode()
    storage.put(_key(sink), stored_file.encode(KIND, {"sink": sink, "columns": columns})[0])


def _key(sink: str) -> str:
    return f"{FOLDER}/{sink}/schema"
