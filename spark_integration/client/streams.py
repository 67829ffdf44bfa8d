"""How state travels between a worker and the state server: Arrow columns in slices of bounded size.

An exchange carries one kind of columns each way::

    get            ──▶ keys, a slice         ◀── exists, values of these keys, in slices     (slice by slice)
                                                 looked up piece by piece, within `PIECE_BYTES`
    scan_prefix    ──▶ prefixes, in slices   ◀── rows of runs, in slices
    scan                                     ◀── rows of runs, in slices
    apply, load    ──▶ bytes of runs, in slices

A run to be stored must arrive as one batch, so it travels as the bytes of its file form. Their number is announced
first, so that a broken connection is not taken for the end.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from holdfast.backends import local_files
from holdfast.backends.arrow.rows import from_columns
from holdfast.backends.base import Found, View
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.errors import InvalidArgumentError, UnavailableError

#: A message holds at most so many rows, and so many bytes unless one row has more.
SLICE_ROWS = 1 << 15
SLICE_BYTES = 4 << 20
#: Keys that a look-up reads at first, while nobody knows how large a table's rows are; each further piece has at most
#: `PIECE_GROWTH` times as many, and by the rows before it about `PIECE_BYTES`.
FIRST_KEYS, PIECE_GROWTH, PIECE_BYTES = 128, 16, 32 << 20
#: Buffers as small as this are copied together rather than sent one by one.
JOINED_BYTES = 64 << 10
#: Runs larger than this are received into a file, which the kernel may write back, not into memory.
FILE_BYTES = 16 << 20

BYTES = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])
_EXISTS = pa.field("exists", pa.bool_(), nullable=False)


def slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield `batch` in slices of bounded size, at least one; nothing is copied."""
    if batch.num_rows <= SLICE_ROWS and (batch.num_rows <= 1 or batch.nbytes <= SLICE_BYTES):
        yield batch
        return
    half = min(SLICE_ROWS, (batch.num_rows + 1) // 2)
    for start in range(0, batch.num_rows, half):
        yield from slices(batch.slice(start, half))


def joined(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Return batches of one schema as one; copies only where there are several."""
    if len(batches) == 1:
        return batches[0]
    if not batches:
        return from_columns([pa.nulls(0, f.type) for f in schema], schema, 0)
    columns = [pa.concat_arrays([b.column(i) for b in batches]) for i in range(len(schema))]
    return from_columns(columns, schema, sum(b.num_rows for b in batches))


def key_columns(schema: TableSchema) -> pa.Schema:
    """Return the columns in which keys of a table travel."""
    return pa.schema([schema.columns.field(0), *(f.with_name(f"key.{f.name}") for f in schema.key)])


def encode_keys(schema: TableSchema, keys: Keys) -> pa.RecordBatch:
    """Return keys as columns."""
    return pa.RecordBatch.from_arrays([pa.array(keys.hashes), *keys.columns.columns], schema=key_columns(schema))


def decode_keys(schema: TableSchema, batch: pa.RecordBatch) -> Keys:
    """Return the keys that `encode_keys` wrote.

    Raises
    ------
    InvalidArgumentError
        The columns are not those of keys of the table.
    """
    if not batch.schema.equals(key_columns(schema)) or batch.column(0).null_count:
        raise InvalidArgumentError("a request to the state server has different keys than its table", table=schema.name)
    return Keys(batch.column(0).to_numpy(), from_columns(batch.columns[1:], schema.key, batch.num_rows))


def found_columns(schema: TableSchema) -> pa.Schema:
    """Return the columns in which the answer to a look-up travels."""
    return pa.schema([_EXISTS, *(f.with_name(f"value.{f.name}") for f in schema.value)])


def encode_found(schema: TableSchema, found: Found) -> pa.RecordBatch:
    """Return the answer to a look-up as columns."""
    columns = [pa.array(found.exists), *found.values.columns]
    return pa.RecordBatch.from_arrays(columns, schema=found_columns(schema))


def look_up(
    view: View, schema: TableSchema, asked: Iterable[pa.RecordBatch], piece_keys: dict[str, int]
) -> Iterator[pa.RecordBatch]:
    """Yield what a view has of keys that `encode_keys` wrote, as `encode_found` does, in pieces of bounded size.

    Parameters
    ----------
    view : View
        Of the shard.
    schema : TableSchema
        The table's.
    asked : iterable of pyarrow.RecordBatch
        The keys.
    piece_keys : dict of str to int
        How many keys of each table to read at once, by the rows that earlier look-ups have found; changed by this one.

    Raises
    ------
    InvalidArgumentError
        As of `decode_keys`.
    """
    most = piece_keys.get(schema.name, FIRST_KEYS)
    for batch in asked:
        start = 0
        while start < batch.num_rows:
            keys = decode_keys(schema, batch.slice(start, most))
            found = encode_found(schema, view.get(schema.name, keys))
            yield found
            start += len(keys)
            most = min(most * PIECE_GROWTH, SLICE_ROWS)
            if rows := found.column(0).true_count:  # keys without rows tell nothing about the size of rows
                most = piece_keys[schema.name] = max(1, min(most, rows * PIECE_BYTES // found.nbytes))


def decode_found(schema: TableSchema, batches: list[pa.RecordBatch]) -> Found:
    """Return the answer to a look-up from what `encode_found` wrote, in slices."""
    batch = joined(batches, found_columns(schema))
    exists: Any = batch.column(0).to_numpy(zero_copy_only=False)
    return Found(exists, from_columns(batch.columns[1:], schema.value, batch.num_rows))


class _Buffers:
    """A file that keeps what Arrow writes to it, without copying the columns."""

    closed = False

    def __init__(self) -> None:
        self.written: list[pa.Buffer] = []

    def write(self, data: bytes | pa.Buffer) -> int:
        """Take one buffer."""
        self.written.append(pa.py_buffer(data))
        return len(data)

    def flush(self) -> None:
        """Nothing waits."""


def encode_run(run: Run) -> list[pa.Buffer]:
    """Return the consecutive buffers of a run in its file form; its columns are not copied."""
    file = _Buffers()
    run.write(pa.PythonFile(file, mode="w"))
    return file.written


def byte_slices(buffers: Iterable[pa.Buffer]) -> Iterator[pa.RecordBatch]:
    """Yield bytes as batches of one column; large buffers are not copied, small ones are joined."""
    waiting: list[pa.Buffer] = []
    for buffer in buffers:
        if sum(b.size for b in waiting) + buffer.size <= JOINED_BYTES:
            waiting.append(buffer)
            continue
        yield _as_batch(pa.py_buffer(b"".join(waiting)))
        waiting = []
        for start in range(0, buffer.size, SLICE_BYTES):
            yield _as_batch(buffer.slice(start, min(SLICE_BYTES, buffer.size - start)))
    yield _as_batch(pa.py_buffer(b"".join(waiting)))


def _as_batch(data: pa.Buffer) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.Array.from_buffers(pa.uint8(), data.size, [None, data])], schema=BYTES)


def receive_runs(
    sizes: Mapping[str, int], received: Iterable[pa.RecordBatch], tables: Mapping[str, TableSchema], directory: Path
) -> dict[str, Run]:
    """Assemble runs from slices of their bytes, which arrive in the order of `sizes`.

    Parameters
    ----------
    sizes : mapping of str to int
        By table: the bytes of its run.
    directory : pathlib.Path
        For an unlinked temporary file, if the runs are too large for memory.

    Raises
    ------
    UnavailableError
        Bytes are missing: the connection broke.
    InvalidArgumentError
        There are more bytes than announced, or something else.
    """
    size = sum(sizes.values())
    if size <= FILE_BYTES:
        data = pa.allocate_buffer(size)
        _copy(size, received, pa.FixedSizeBufferWriter(data))
        return _read_runs(data, sizes, tables)
    with local_files.writing(directory), tempfile.TemporaryFile(dir=directory) as file:
        _copy(size, received, file)
        file.flush()
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    runs = _read_runs(pa.py_buffer(mapped), sizes, tables)
    return {table: _MappedRun(run.schema, run.batch, mapped) for table, run in runs.items()}


def _read_runs(data: pa.Buffer, sizes: Mapping[str, int], tables: Mapping[str, TableSchema]) -> dict[str, Run]:
    runs, start = {}, 0
    for table, size in sizes.items():
        runs[table] = Run.read(data.slice(start, size), tables[table], source="a request", trusted=True)
        start += size
    return runs


@dataclass(frozen=True)
class _MappedRun(Run):
    """A run in a file, of which no more than one chunk need be in memory when it is read in chunks."""

    mapped: mmap.mmap

    def chunks(self, rows: int, size_bytes: int) -> Iterator[Run]:
        for chunk in super().chunks(rows, size_bytes):
            yield chunk
            # Release what was read; it stays in the page cache.
            self.mapped.madvise(mmap.MADV_DONTNEED)


def _copy(size: int, received: Iterable[pa.RecordBatch], sink: Any) -> None:
    missing = size
    for batch in received:
        if not batch.schema.equals(BYTES) or batch.num_rows > missing:
            raise InvalidArgumentError("a request to the state server holds different bytes than it announced")
        sink.write(batch.column(0).to_numpy().data)
        missing -= batch.num_rows
    if missing:
        raise UnavailableError("the connection broke before the whole commit arrived", missing_bytes=missing)
