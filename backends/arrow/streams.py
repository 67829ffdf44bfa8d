"""Arrow IPC streams from storage, checked before anything in them is trusted.

Arrow allocates as much memory as a stream declares: each buffer of a compressed batch begins with its claimed
uncompressed length. So the reader sums these claims, and compares them with the size declared outside the stream,
before Arrow decompresses anything::

    message     metadata: position of each buffer in the body       a flatbuffer, which Arrow has verified
                body:     claim, int64 ‖ an LZ4 frame      claim, int64 ‖ …

Decompressed data is validated for memory safety; strings may hold any bytes, as in Spark.

Source of the layout: Arrow's ``Message.fbs`` and ``Schema.fbs``, format version 5.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc

from holdfast.backends.arrow.values import blind_type, validate_blind, viewed
from holdfast.backends.stored_file import EXPANSION_MAX
from holdfast.errors import CorruptionError

_CLAIM_BYTES = 8
# Field numbers of the tables Message and RecordBatch.
_MESSAGE_HEADER, _BATCH_BUFFERS, _BATCH_COMPRESSION = 2, 2, 3


def read_accepted(
    section: pa.Buffer,
    accept: Callable[[pa.Schema], object],
    *,
    source: str,
    table: str,
    trusted: bool = False,
    plain_bytes: int | None = None,
) -> list[pa.RecordBatch]:
    """Return the batches of a table's stream once `accept` admits its schema; check contents unless `trusted`."""
    with _reading(source, table):
        with ipc.open_stream(section) as reader:
            # Check the columns before the batches: the claims depend on them.
            columns = reader.schema.remove_metadata()
            accept(columns)
        if not trusted:
            return read_batches(section, columns, plain_bytes)
        with ipc.open_stream(section) as reader:
            return list(reader)


@contextmanager
def _reading(source: str, table: str) -> Iterator[None]:
    """Map Arrow's errors about bytes that are not a run, such as invalid UTF-8 in names."""
    try:
        yield
    except (ValueError, OSError, pa.ArrowException) as exc:
        raise CorruptionError(f"{source} holds no readable run: {exc}", table=table) from exc


def read_batches(section: pa.Buffer, schema: pa.Schema, plain_bytes: int | None) -> list[pa.RecordBatch]:
    """Return a stream's batches, checked, of at most `plain_bytes` uncompressed; the default is LZ4's maximum."""
    room = section.size * EXPANSION_MAX if plain_bytes is None else plain_bytes
    blind = pa.schema([field.with_type(blind_type(field.type)) for field in schema])
    batches = []
    for number, message in enumerate(ipc.MessageReader.open_stream(section)):
        if message.type != ("record batch" if number else "schema"):
            raise ValueError(f"a message of a different type: {message.type}")
        if message.metadata_version != ipc.MetadataVersion.V5:  # earlier versions store compression elsewhere
            raise ValueError("a message with a format version other than 5")
        if number:
            room -= _unpacked_bytes(message)
            if room < 0:
                raise ValueError("its buffers are larger than declared")
            batch = ipc.read_record_batch(message, blind)
            for column, field in zip(batch.columns, schema, strict=True):
                validate_blind(column, field.type)
            columns = [viewed(column, field.type) for column, field in zip(batch.columns, schema, strict=True)]
            batches.append(pa.RecordBatch.from_arrays(columns, schema=schema))
    return batches


def _unpacked_bytes(message: ipc.Message) -> int:
    """Return the uncompressed size that the buffers of a batch declare."""
    metadata, body = message.metadata, message.body
    try:
        batch = _target(metadata, _field(metadata, _u32(metadata, 0), _MESSAGE_HEADER))
        if not _field(metadata, batch, _BATCH_COMPRESSION):
            return body.size
        vector = _target(metadata, _field(metadata, batch, _BATCH_BUFFERS))
        buffers = np.frombuffer(metadata, "<i8", 2 * _u32(metadata, vector), vector + 4).reshape(-1, 2)
        return sum(_claim(body, offset, size) for offset, size in buffers.tolist() if size)
    except struct.error as exc:
        raise ValueError("its metadata points outside it") from exc


def _claim(body: pa.Buffer, offset: int, size: int) -> int:
    if not 0 <= offset <= offset + size <= body.size or size < _CLAIM_BYTES:
        raise ValueError("a buffer lies outside its batch")
    claimed: int = struct.unpack_from("<q", body, offset)[0]
    if claimed == -1:  # stored uncompressed, because compression would not make it smaller
        return size - _CLAIM_BYTES
    if not 0 <= claimed <= size * EXPANSION_MAX:
        raise ValueError("a buffer declares an impossible size")
    return claimed


def _u32(data: pa.Buffer, at: int) -> int:
    value: int = struct.unpack_from("<I", data, at)[0]
    return value


def _target(data: pa.Buffer, at: int) -> int:
    return at + _u32(data, at)


def _field(data: pa.Buffer, table: int, field: int) -> int:
    """Return the position of a field in a flatbuffer's table; 0 if it is absent."""
    places = table - struct.unpack_from("<i", data, table)[0]
    size: int = struct.unpack_from("<H", data, places)[0]
    entry = 4 + 2 * field
    at: int = struct.unpack_from("<H", data, places + entry)[0] if entry < size else 0
    return table + at if at else 0
