"""Writing rows in batches, and the log of which keys were written when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc as ipc
from rocksdict import Rdict, Snapshot, WriteBatch, WriteOptions

from holdfast.backends.arrow.rows import HashArray, take
from holdfast.backends.local_files import writing
from holdfast.backends.rocksdb.codec.binaries import offsets_of
from holdfast.backends.rocksdb.codec.keys import KEY_HEADER_BYTES, encode_keys
from holdfast.backends.rocksdb.codec.rows import encode_values
from holdfast.backends.rocksdb.marker import MARKER_KEY, UNDO_PREFIX, StoredTable
from holdfast.backends.rocksdb.reads import CHUNK_KEYS, get_each, to_list
from holdfast.backends.run import Run
from holdfast.errors import InvalidArgumentError

#: A version that is larger is written in several batches; see `RowWriter`.
BATCH_BYTES = 16 << 20
#: What is made into Python objects at a time, of at most `CHUNK_KEYS` rows.
CHUNK_BYTES = 4 << 20
#: Of a row's columns, and of its key or value as RocksDB has them. A row travels to the worker as one batch of columns,
#: which Arrow Flight refuses from 2 GiB on, headers included. Beyond 4 GiB RocksDB would leave it out of a batch, and
#: rocksdict cannot tell.
ROW_BYTES_MAX = 2**31 - (1 << 20)
#: Keys of changes that a database keeps in memory; more of them lie in files.
LOG_BYTES = 8 << 20
_LOG_ROWS = 1 << 16
_LOGGED = pa.schema([("hash", pa.uint64()), ("key", pa.large_binary())])
#: Of the names of those files; one that a kill leaves is removed when the database is opened.
CHANGES_PREFIX = "changes-"


def without_log() -> WriteOptions:
    """Return options that leave RocksDB's write-ahead log out: commits are durable elsewhere."""
    options = WriteOptions()
    options.disable_wal = True  # type: ignore[method-assign, assignment]
    return options


class RowWriter:
    """Writes the rows of one version: in one batch, or in several where they are many.

    Parameters
    ----------
    database : Rdict
    meanwhile : bytes, optional
        Marker of each batch but the last one: it says that the rows are no version, so a crash in between
        is noticed. None where the rows are not seen before the last batch anyway.

    Attributes
    ----------
    written_bytes : int
    """

    def __init__(self, database: Rdict, meanwhile: bytes | None) -> None:
        self._database = database
        self._meanwhile = meanwhile
        self._batch = WriteBatch(raw_mode=True)
        self.written_bytes = 0

    def put(self, keys: list[bytes], values: list[bytes]) -> None:
        """Set the values of keys."""
        deque(map(self._batch.put, keys, values), maxlen=0)
        self._write_if_large()

    def delete(self, keys: list[bytes]) -> None:
        """Delete keys; absent ones are fine."""
        deque(map(self._batch.delete, keys), maxlen=0)
        self._write_if_large()

    def write_run(self, table: StoredTable, run: Run) -> None:
        """Write and delete the rows of a run of a table that has its schema.

        Raises
        ------
        InvalidArgumentError
            A row is too large.
        """
        head = bytes([table.number_of(run.schema.value)])
        for part in run.chunks(CHUNK_KEYS, CHUNK_BYTES):
            if part.size_bytes > ROW_BYTES_MAX:
                _require_fitting(max(part.batch.slice(row, 1).nbytes for row in range(len(part))))
            keys, values = _short(encode_keys(table.id, part.hashes, part.keys)), part.values
            if part.deleted.any():
                live = np.flatnonzero(~part.deleted)
                self.delete(to_list(keys.filter(pa.array(part.deleted))))
                keys, values = keys.take(pa.array(live)), take(values, live)
            if len(keys):
                self.put(to_list(keys), to_list(_short(encode_values(values, head))))

    def restore(self, keys: pa.LargeBinaryArray, snapshot: Snapshot) -> None:
        """Write back what keys had in a snapshot."""
        for key, value in _rows_in(snapshot, keys):
            if value is None:
                self._batch.delete(key)
            else:
                self._batch.put(key, value)
            self._write_if_large()

    def keep_undo(self, keys: pa.LargeBinaryArray, snapshot: Snapshot) -> None:
        """Write undo rows: what keys had in a snapshot, without changing the rows themselves."""
        for key, value in _rows_in(snapshot, keys):
            self._batch.put(UNDO_PREFIX + key, b"\0" if value is None else b"\1" + value)
            self._write_if_large()

    def take_undo(self, keys: list[bytes], values: list[bytes]) -> list[bytes]:
        """Write back undo rows and delete them; return the keys that they are of."""
        plain = [key.removeprefix(UNDO_PREFIX) for key in keys]
        self.delete(keys)
        self.delete([key for key, value in zip(plain, values, strict=True) if value[:1] != b"\1"])
        live = [(key, value[1:]) for key, value in zip(plain, values, strict=True) if value[:1] == b"\1"]
        self.put([key for key, _ in live], [value for _, value in live])
        return plain

    def finish(self, marker: bytes) -> None:
        """Write what is left and, with it, `marker`."""
        self._write(marker)

    def _write_if_large(self) -> None:
        if self._batch.size_in_bytes() >= BATCH_BYTES:
            self._write(self._meanwhile)

    def _write(self, marker: bytes | None) -> None:
        if marker is not None:
            self._batch.put(MARKER_KEY, marker)
        self.written_bytes += self._batch.size_in_bytes()
        self._database.write(self._batch, without_log())
        self._batch = WriteBatch(raw_mode=True)


def _short(rows: pa.LargeBinaryArray) -> pa.LargeBinaryArray:
    """Return keys or values that RocksDB can store."""
    offsets = offsets_of(rows)
    if offsets[-1] - offsets[0] > ROW_BYTES_MAX:
        _require_fitting(int(np.diff(offsets).max()))
    return rows


def _require_fitting(longest_bytes: int) -> None:
    if longest_bytes > ROW_BYTES_MAX:
        raise InvalidArgumentError(
            "a row of state is larger than the backend 'rocksdb' takes: keep less under one key, or use the backend "
            "'filesystem'",
            size_bytes=longest_bytes,
            limit_bytes=ROW_BYTES_MAX,
        )


def _rows_in(snapshot: Snapshot, keys: pa.LargeBinaryArray) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield keys and their values in a snapshot one by one, None where a key is absent: rows may be large."""
    for start in range(0, len(keys), CHUNK_KEYS):
        part = to_list(keys.slice(start, CHUNK_KEYS))
        yield from zip(part, get_each(snapshot, part), strict=True)


class Written(NamedTuple):
    """Keys of one table that one write touched, ascending by hash.

    Attributes
    ----------
    table_id : int
    hashes : numpy.ndarray of uint64, shape (n,)
    keys : pyarrow.LargeBinaryArray, shape (n,)
    """

    table_id: int
    hashes: HashArray
    keys: pa.Array

    @property
    def size_bytes(self) -> int:
        """Bytes of both arrays."""
        return self.hashes.nbytes + self.keys.nbytes

    def keys_without(self, others: Iterable[Written]) -> pa.LargeBinaryArray:
        """Return the keys that are not among those of `others`."""
        found = np.zeros(len(self.keys), np.bool_)
        for other in others:
            if other.table_id == self.table_id and len(other.hashes):
                start = int(np.searchsorted(self.hashes, other.hashes[0], side="left"))
                end = int(np.searchsorted(self.hashes, other.hashes[-1], side="right"))
                near = pc.is_in(self.keys.slice(start, end - start), value_set=other.keys)
                found[start:end] |= near.to_numpy(zero_copy_only=False)
        return self.keys.filter(pa.array(~found))

    @classmethod
    def of(cls, keys: pa.Array) -> list[Self]:
        """Return the different ones among keys of any tables, table by table."""
        parts = []
        keys = pc.unique(keys)
        heads = _heads(keys)
        for table_id in np.unique(heads[:, 0]).tolist():
            rows = np.flatnonzero(heads[:, 0] == table_id)
            hashes = np.ascontiguousarray(heads[rows, 1:]).view(">u8").ravel().astype(np.uint64)
            order = np.argsort(hashes, kind="stable")
            parts.append(cls(table_id, hashes[order], keys.take(pa.array(rows[order]))))
        return parts


def _heads(keys: pa.Array) -> npt.NDArray[np.uint8]:
    """Return table id and hash of each key as bytes, shape (n, 9)."""
    _, offsets, data = keys.buffers()
    starts = np.frombuffer(offsets, np.int64)[keys.offset : keys.offset + len(keys)]
    if not len(keys):
        return np.empty((0, KEY_HEADER_BYTES), np.uint8)
    return np.frombuffer(data, np.uint8)[starts[:, None] + np.arange(KEY_HEADER_BYTES)]


def keys_written(table_id: int, run: Run) -> Iterator[Written]:
    """Yield the keys of a run, copied: they are kept longer than the run."""
    for part in run.chunks(_LOG_ROWS, CHUNK_BYTES):
        yield Written(table_id, part.hashes.copy(), encode_keys(table_id, part.hashes, part.keys))


class ChangeLog:
    """Which keys were written since the oldest version that somebody may read, write by write.

    Parameters
    ----------
    folder : pathlib.Path
        For what is more than `LOG_BYTES`: nameless files, which go with the process.

    Notes
    -----
    Threads: `append` and `trim` take turns, their caller sees to it; any number read meanwhile.
    """

    def __init__(self, folder: Path) -> None:
        self.position = 0
        self._folder = folder
        self._changes: tuple[tuple[int, list[Written]], ...] = ()

    def hold(self, written: Iterable[Written]) -> list[Written]:
        """Return keys as `append` takes them: beyond `LOG_BYTES` in all they are in a file.

        Raises
        ------
        UnavailableError
            Local storage is full or failing.
        """
        room = LOG_BYTES - sum(part.size_bytes for part in self.since(-1))
        held: list[Written] = []
        following = iter(written)
        for part in following:
            held.append(part)
            room -= part.size_bytes
            if room < 0:
                return held + _on_disk(following, self._folder)
        return held

    def append(self, written: list[Written]) -> None:
        """Note what the next write touches, before it begins."""
        self._changes = (*self._changes, (self.position + 1, written))
        self.position += 1

    def since(self, position: int) -> list[Written]:
        """Return what was written after `position`; keys are repeated where they were written repeatedly."""
        return [written for at, change in self._changes if at > position for written in change]

    def different_since(self, position: int) -> list[Written]:
        """Return the different keys written after `position`, table by table: what going back to it undoes."""
        changes = [change for at, change in self._changes if at > position]
        if len(changes) == 1:
            return changes[0]  # if it undid something itself, some keys are there twice, and that does no harm
        keys = [written.keys for change in changes for written in change]
        return Written.of(pa.concat_arrays(keys)) if keys else []

    def keys_since(self, position: int, table_id: int, first_hash: int, last_hash: int) -> list[bytes]:
        """Return the different keys of a table written after `position` whose hash is in a range."""
        found: set[bytes] = set()
        for written in self.since(position):
            if written.table_id == table_id:
                start = int(np.searchsorted(written.hashes, np.uint64(first_hash), side="left"))
                end = int(np.searchsorted(written.hashes, np.uint64(last_hash), side="right"))
                found.update(to_list(written.keys.slice(start, end - start)))
        return list(found)

    def trim(self, position: int) -> None:
        """Forget the writes up to `position`."""
        self._changes = tuple(change for change in self._changes if change[0] > position)


def _on_disk(parts: Iterable[Written], folder: Path) -> list[Written]:
    """Return the same, mapped from a file that has lost its name."""
    table_ids: list[int] = []
    with writing(folder), NamedTemporaryFile(dir=folder, prefix=CHANGES_PREFIX) as file:
        with ipc.new_stream(file, _LOGGED) as stream:
            for part in parts:
                table_ids.append(part.table_id)
                stream.write_batch(pa.RecordBatch.from_arrays([pa.array(part.hashes), part.keys], schema=_LOGGED))
        file.flush()
        with pa.memory_map(file.name) as mapped:
            data = mapped.read_buffer()
    with ipc.open_stream(data) as stream:
        batches = zip(table_ids, stream, strict=True)
        return [Written(table_id, batch.column(0).to_numpy(), batch.column(1)) for table_id, batch in batches]
