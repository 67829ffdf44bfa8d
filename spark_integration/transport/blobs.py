"""Blobs: Arrow data in a single value of a Spark row, which carries many rows of packed input or output."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.ipc as ipc

#: The column that holds blobs.
BLOB = "__holdfast_blob"
#: Approximate maximum size.
BLOB_BYTES = 32 << 20
#: Beyond this, padding takes more memory than what it keeps from being gathered: some 60 bytes a row in Spark's worker.
PADDED_ROWS_MAX = 1 << 19


def write_blob(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> bytes:
    """Return batches as one Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def read_blob(blob: bytes | bytearray) -> pa.Table:
    """Return what `write_blob` wrote, without copying."""
    return ipc.open_stream(pa.py_buffer(blob)).read_all()
