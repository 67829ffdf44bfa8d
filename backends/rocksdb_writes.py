"""Writing rows in batches, and the memory of which keys were written when."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc as ipc
from rocksdict import Rdict, Snapshot, WriteBatch, WriteOptions

from holdfast.backends.arrow_rows import HashArray, take
from holdfast.backends.local_files import writing
from holdfast.backends.rocksdb_marker import MARKER_KEY, UNDO_PREFIX
from holdfast.backends.rocksdb_reads import CHUNK_KEYS, get_each, to_list
from holdfast.backends.rocksdb_rows import encode_keys, encode_values
from holdfast.backends.run import Run

#: A version that is larger is written in several batches; see `RowWriter`.
BATCH_BYTES = 32 << 20
#: Keys of changes that are kept in memory; more of them lie in files.
LOG_BYTES = 64 << 20


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
    """

    def __init__(self, database: Rdict, meanwhile: bytes | None) -> None:
        self._database = database
        self._meanwhile = meanwhile
        self._batch = WriteBatch(raw_mode=True)

    def put(self, keys: list[bytes], values: list[bytes]) -> None:
        """Set the values of keys."""
        deque(map(self._batch.put, keys, values), maxlen=0)
        self._write_if_large()

    def delete(self, keys: list[bytes]) -> None:
        """Delete keys; absent ones are fine."""
        deque(map(self._batch.delete, keys), maxlen=0)
        self._write_if_large()

    def write_run(self, keys: pa.LargeBinaryArray, run: Run) -> None:
        """Write and delete the rows of a run, whose encoded keys are `keys`."""
        for start in range(0, len(run), CHUNK_KEYS):
            deleted = run.deleted[start : start + CHUNK_KEYS]
            part = keys.slice(start, CHUNK_KEYS)
            values = run.values.slice(start, CHUNK_KEYS)
            if deleted.any():
                live = np.flatnonzero(~deleted)
                self.delete(to_list(part.filter(pa.array(deleted))))
                part, values = part.take(pa.array(live)), take(values, live)
            if len(part):
                self.put(to_list(part), to_list(encode_values(values)))

    def restore(self, keys: pa.LargeBinaryArray, snapshot: Snapshot) -> None:
        """Write back what keys had in a snapshot."""
        for part in _parts(keys):
            values = get_each(snapshot, part)
            self.delete([key for key, value in zip(part, values, strict=True) if value is None])
            live = [(key, value) for key, value in zip(part, values, strict=True) if value is not None]
            self.put([key for key, _ in live], [value for _, value in live])

    def keep_undo(self, keys: pa.LargeBinaryArray, snapshot: Snapshot) -> None:
        """Write undo rows: what keys had in a snapshot, without changing the rows themselves."""
        for part in _parts(keys):
            values = get_each(snapshot, part)
            self.put([UNDO_PREFIX + key for key in part], [b"\0" if v is None else b"\1" + v for v in values])

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
        self._database.write(self._batch, without_log())
        self._batch = WriteBatch(raw_mode=True)


def _parts(keys: pa.LargeBinaryArray) -> Iterator[list[bytes]]:
    for start in range(0, len(keys), CHUNK_KEYS):
        yield to_list(keys.slice(start, CHUNK_KEYS))


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

    @classmethod
    def of(cls, keys: list[bytes]) -> list[Self]:
        """Sort keys of any tables into parts."""
        parts = []
        for table_id, group in groupby(sorted(keys), itemgetter(0)):
            table = list(group)
            hashes = np.array([int.from_bytes(key[1:9], "big") for key in table], np.uint64)
            parts.append(cls(table_id, hashes, pa.array(table, pa.large_binary())))
        return parts


def encoded(table_id: int, run: Run) -> Written:
    """Return the keys of a run."""
    return Written(table_id, run.hashes, encode_keys(table_id, run.hashes, run.keys))


class ChangeLog:
    """Which keys were written since the oldest version that somebody may read, write by write.

    Parameters
    ----------
    folder : pathlib.Path
        For what is more than `LOG_BYTES`: nameless files that go with the process.

    Notes
    -----
    Threads: one writes (`append`, `trim`); any number read.
    """

    def __init__(self, folder: Path) -> None:
        self.position = 0
        self._folder = folder
        self._changes: tuple[tuple[int, list[Written]], ...] = ()

    def append(self, written: list[Written]) -> None:
        """Note what the next write touches, before it begins.

        Raises
        ------
        UnavailableError
            Local storage is full or failing.
        """
        if sum(w.size_bytes for _, change in self._changes for w in change) > LOG_BYTES:
            written = [_on_disk(w, self._folder) for w in written if len(w.hashes)]
        self._changes = (*self._changes, (self.position + 1, written))
        self.position += 1

    def since(self, position: int) -> list[Written]:
        """Return what was written after `position`; keys are repeated where they were written repeatedly."""
        return [written for at, change in self._changes if at > position for written in change]

    def undo_since(self, position: int) -> pa.Array:
        """Return the different keys of all tables written after `position`."""
        keys = [written.keys for written in self.since(position)]
        return pc.unique(pa.concat_arrays(keys)) if keys else pa.array([], pa.large_binary())

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


def _on_disk(written: Written, folder: Path) -> Written:
    """Return the same, mapped from a file that has no name."""
    batch = pa.RecordBatch.from_arrays([pa.array(written.hashes), written.keys], names=["hash", "key"])
    with writing(folder), TemporaryFile(dir=folder) as file:
        with ipc.new_stream(file, batch.schema) as stream:
            stream.write_batch(batch)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    with ipc.open_stream(pa.py_buffer(mapped)) as stream:
        batch = stream.read_next_batch()
    return Written(written.table_id, batch.column(0).to_numpy(), batch.column(1))
