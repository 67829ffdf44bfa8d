"""Reads rows of an immutable database, by point reads or by an ordered scan whose end is verified.

Two properties of rocksdict shape this module:

* Reading a list of keys releases the GIL; iterators hold it.
* An iterator that meets a damaged block ends as if its range had ended, so every end is checked.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from rocksdict import Rdict, ReadOptions

from holdfast.backends.arrow.rows import HashArray
from holdfast.backends.base import MAX_HASH
from holdfast.backends.rocksdb.codec.keys import KEY_HEADER_BYTES, decode_keys
from holdfast.backends.rocksdb.codec.rows import decode_numbered
from holdfast.backends.run import Run, TableSchema

CHUNK_KEYS = 8192
#: Limits on the rows and bytes of one run of a scan.
RUN_ROWS, RUN_BYTES = 65536, 32 << 20
#: Rows in the first run of a scan; each later run has `RUN_GROWTH` times as many, up to `RUN_ROWS`.
FIRST_RUN_ROWS, RUN_GROWTH = 16, 16
#: A scan beats point reads if it reads at most this many rows per wanted key.
SCAN_ROWS_PER_KEY = 3.3
_SAMPLE_ROWS = 256
#: Sample size to estimate a table's rows, and the factor to enlarge it by if most sampled rows share a hash.
COUNTED_ROWS, FURTHER = 1024, 16
# Hashes count as evenly spread if samples differ by less than this factor.
_EVEN = 1.5


class EncodedRows(NamedTuple):
    """Rows in key order."""

    keys: list[bytes]
    values: list[bytes]
    rest: bytes | None  #: The key at which the range continues; None if it has no more rows


class Span(NamedTuple):
    """A range of keys: from those that begin with `first` to those that begin with `last`."""

    first: bytes
    last: bytes

    def reaches(self, key: bytes) -> bool:
        """Return whether the span contains `key`, which is not before it."""
        return key[: len(self.last)] <= self.last


def read_rows(
    database: Rdict, start: bytes, end: bytes, most: int | None = None, *, fill_cache: bool = True
) -> EncodedRows:
    """Return the first rows of a key range: at most `most`, and at most one run's worth."""
    keys: list[bytes] = []
    values: list[bytes] = []
    size = 0
    options = _below(end, fill_cache=fill_cache)
    items: Iterator[tuple[bytes, bytes]] = database.items(from_key=start, read_opt=options)  # type: ignore[assignment]
    for key, value in islice(items, min(most or RUN_ROWS, RUN_ROWS)):
        keys.append(key)
        values.append(value)
        size += len(key) + len(value)
        if size >= RUN_BYTES:
            break
    return EncodedRows(keys, values, _rest(database, start, end, keys))


def _rest(database: Rdict, start: bytes, end: bytes, keys: list[bytes]) -> bytes | None:
    """Return the key at which a range continues after `keys`; raises if the iterator ended at a damaged block."""
    rest = keys[-1] + b"\0" if keys else start
    following = database.iter(_below(end))
    following.seek(rest)
    if following.valid():
        return rest
    following.status()
    return None


def key_range(table_id: int, first_hash: int, last_hash: int) -> tuple[bytes, bytes]:
    """Return the first key of a table's hash range, and the key just past its end."""
    table, next_table = bytes([table_id]), bytes([table_id + 1])
    end = next_table if last_hash == MAX_HASH else table + (last_hash + 1).to_bytes(8, "big")
    return table + first_hash.to_bytes(8, "big"), end


def get_rows(
    database: Rdict, table_id: int, keys: list[bytes], hashes: HashArray, rows_per_hash: float
) -> list[bytes | None]:
    """Return the values of `keys`, None if a key is absent. Keys ascend by hash; see `density` for `rows_per_hash`."""
    first, last = int(hashes[0]), int(hashes[-1])
    if rows_per_hash * (last - first + 1) > SCAN_ROWS_PER_KEY * len(keys):
        return database.get(keys)  # type: ignore[arg-type, return-value]
    rows = read_rows(database, *key_range(table_id, first, last), int(2 * SCAN_ROWS_PER_KEY * len(keys)))
    found: dict[bytes, bytes | None] = dict(zip(rows.keys, rows.values, strict=True))
    if rows.rest is not None:  # for example, one hash has very many rows
        left = [key for key in keys if key >= rows.rest]
        found.update(zip(left, database.get(left), strict=True))  # type: ignore[arg-type]
    return list(map(found.get, keys))


def density(database: Rdict, table_id: int, first_hash: int, last_hash: int) -> float:
    """Return the number of rows per hash in a range, from a sample; assumes that hashes are evenly spread.

    Infinite if the whole sample shares one hash, which may have any number of rows.
    """
    start, end = key_range(table_id, first_hash, last_hash)
    sample = _keys(database, start, end, _SAMPLE_ROWS)
    if len(sample) < _SAMPLE_ROWS:
        return len(sample) / (last_hash - first_hash + 1)
    if not _whole(sample):
        return math.inf
    return _SAMPLE_ROWS / (_hash(sample[-1]) - first_hash + 1)


def read_spans(database: Rdict, table_id: int, spans: list[Span], start: bytes | None) -> tuple[EncodedRows, int]:
    """Return a run's worth of rows in `spans`, which ascend, and the number of completed spans.

    `start` is the key at which the first span continues: the previous `EncodedRows.rest`.
    """
    keys: list[bytes] = []
    values: list[bytes] = []
    size, key, end = 0, b"", bytes([table_id + 1])
    found = database.iter(_below(end))
    for done, span in enumerate(spans):
        if key < span.first:  # else no row is between
            found.seek(max(start or b"", span.first))
            key = found.key() if found.valid() else end
        while span.reaches(key):
            if len(keys) >= RUN_ROWS or size >= RUN_BYTES:
                return EncodedRows(keys, values, key), done
            keys.append(key)
            values.append(found.value())
            size += len(key) + len(values[-1])
            found.next()
            key = found.key() if found.valid() else end
    if not found.valid():
        found.status()
    return EncodedRows(keys, values, None), len(spans)


def estimate_counts(database: Rdict, table_ids: Mapping[str, int]) -> dict[str, int]:
    """Estimate the number of rows by table name; exact for up to `COUNTED_ROWS`.

    Tables whose hashes are not evenly spread, such as time-ordered tables, share the rows left over by other tables.
    """
    found = {name: _estimate_rows(database, table_id) for name, table_id in table_ids.items()}
    counts = {name: rows for name, rows in found.items() if rows is not None}
    left = (database.property_int_value("rocksdb.estimate-num-keys") or 0) - sum(counts.values())
    return {name: counts.get(name, max(0, left) // max(1, len(found) - len(counts))) for name in found}


def _estimate_rows(database: Rdict, table_id: int) -> int | None:
    """Estimate a table's rows from samples at its beginning and middle; None if the samples differ too much."""
    start, end = key_range(table_id, 0, MAX_HASH)
    most = COUNTED_ROWS
    sample = _keys(database, start, end, most)
    if len(sample) == most and _whole(sample) < most / 2:
        most *= FURTHER
        sample = _keys(database, start, end, most)
    if len(sample) < most:
        _rest(database, start, end, sample)
        return len(sample)
    newest = database.iter(_below(end))
    newest.seek_to_last()
    if not newest.valid():
        newest.status()
        return len(sample)
    first, last = _hash(sample[0]), _hash(newest.key())
    middle = key_range(table_id, (first + last) // 2, MAX_HASH)[0]
    rows_per_hash = [_rows_per_hash(some) for some in (sample, _keys(database, middle, end, most))]
    if max(rows_per_hash) > _EVEN * min(rows_per_hash):
        return None
    return max(len(sample), round(sum(rows_per_hash) / 2 * (last - first + 1)))


def _rows_per_hash(sample: list[bytes]) -> float:
    """Return the number of rows per hash of ascending keys, without the last hash, whose rows may be incomplete."""
    return _whole(sample) / max(1, _hash(sample[-1]) - _hash(sample[0])) if sample else 0.0


def scanned(read: Callable[[bytes, bytes, int], tuple[Run, bytes | None]], start: bytes, end: bytes) -> Iterator[Run]:
    """Yield a key range in runs that start small and grow; `read` returns one run and the key to resume at."""
    rest: bytes | None = start
    most = FIRST_RUN_ROWS
    while rest is not None:
        run, rest = read(rest, end, most)
        most = min(most * RUN_GROWTH, RUN_ROWS)
        if len(run):
            yield run


def run_of(schema: TableSchema, rows: EncodedRows, stored: Sequence[pa.Schema]) -> Run:
    """Decode rows of one table into a run; `stored` are the value schemas that the rows were written with."""
    hashes, keys = decode_keys(pa.array(rows.keys, pa.large_binary()), schema.key)
    values = decode_numbered(pa.array(rows.values, pa.large_binary()), stored, schema.value)
    columns = [pa.array(hashes), pa.array(np.zeros(len(hashes), np.bool_)), *keys.columns, *values.columns]
    return Run(schema, pa.RecordBatch.from_arrays(columns, schema=schema.columns))


def to_list(rows: pa.LargeBinaryArray) -> list[bytes]:
    """Return binary rows as `bytes` objects for rocksdict."""
    return rows.to_pylist()


def _keys(database: Rdict, start: bytes, end: bytes, most: int) -> list[bytes]:
    """Return the first keys of a range; fewer than `most` mean the end of the range, or damage."""
    options = _below(end, fill_cache=False)
    return list(islice(database.keys(from_key=start, read_opt=options), most))  # type: ignore[arg-type]


def _whole(keys: list[bytes]) -> int:
    """Return how many of the ascending keys precede the last hash."""
    return bisect_left(keys, keys[-1][:KEY_HEADER_BYTES])


def _hash(key: bytes) -> int:
    return int.from_bytes(key[1:9], "big")


def _below(end: bytes, *, fill_cache: bool = True) -> ReadOptions:
    options = ReadOptions()
    options.set_iterate_upper_bound(end)
    options.fill_cache(fill_cache)  # type: ignore[call-arg]
    return options
