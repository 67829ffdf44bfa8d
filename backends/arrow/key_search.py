"""Finding keys among the rows of a run: by hash, and among rows that share a hash by key.

::

    rows of the run                 keys asked for
    0x01…  "ann"                    0x1f… "bob"      first row of its hash: found at once
    0x1f…  "bob"   ┐ a crowd:       0x1f… "dan"      another row of its hash, or none: see `_find_in_crowds`
    0x1f…  "cem"   │ rows that
    0x1f…  "dan"   ┘ share a hash

By chance, crowds are rare. Some tables have large ones on purpose: timers due at one time, the elements of a list. So
no step goes through them row by row.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.rows import HashArray, IntArray, from_columns, order_rows, rows_equal, take, to_bools


def rows_of(hashes: HashArray, wanted: HashArray) -> IntArray:
    """Return which of `hashes`, which ascend, are among `wanted`, which ascend and do not repeat."""
    starts = np.searchsorted(hashes, wanted, side="left")
    counts = np.searchsorted(hashes, wanted, side="right") - starts
    rows: IntArray = np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    return rows


def find_sorted(hashes: HashArray, keys: pa.RecordBatch, wanted: HashArray, wanted_keys: pa.RecordBatch) -> IntArray:
    """Return for each wanted key the row where it stands, or -1.

    Both hashes ascend, and `keys` has no row twice.
    """
    found = np.full(len(wanted), -1, np.int64)
    places = np.searchsorted(hashes, wanted)
    inside = np.flatnonzero(places < len(hashes))
    inside = inside[hashes[places[inside]] == wanted[inside]]
    places = places[inside]
    hit = rows_equal(take(keys, places), take(wanted_keys, inside))
    found[inside[hit]] = places[hit]
    missed, places = inside[~hit], places[~hit] + 1
    in_crowd = places < len(hashes)
    in_crowd[in_crowd] = hashes[places[in_crowd]] == wanted[missed[in_crowd]]
    missed = missed[in_crowd]
    if len(missed):
        found[missed] = _find_in_crowds(hashes, keys, wanted[missed], take(wanted_keys, missed))
    return found


def _find_in_crowds(
    hashes: HashArray, keys: pa.RecordBatch, wanted: HashArray, wanted_keys: pa.RecordBatch
) -> IntArray:
    """As `find_sorted`, in one pass.

    Cost: a sort of those wanted keys and rows of their hashes whose columns occur on the other side. It takes no order
    within a hash for granted: backends differ in it.
    """
    rows, asked = rows_of(hashes, _distinct(wanted)), np.arange(len(wanted))
    for stored, sought in zip(keys.columns, wanted_keys.columns, strict=True):
        if _is_plain(stored.type):
            rows, asked = _both_have(stored, rows, sought, asked)
    found = np.full(len(wanted), -1, np.int64)
    if len(rows) and len(asked):
        pairs = zip(take(keys, rows).columns, take(wanted_keys, asked).columns, strict=True)
        both = from_columns([pa.concat_arrays(pair) for pair in pairs], keys.schema, len(rows) + len(asked))
        order = order_rows(np.concatenate([hashes[rows], wanted[asked]]), both)
        # Of one key, rows come before wanted ones: its first place tells its row, if it has one.
        firsts = order.rows[order.first][np.cumsum(order.first) - 1]
        is_asked = (order.rows >= len(rows)) & (firsts < len(rows))
        found[asked[order.rows[is_asked] - len(rows)]] = rows[firsts[is_asked]]
    return found


def _distinct(hashes: HashArray) -> HashArray:
    """Return ascending hashes without repeats."""
    is_new = np.ones(len(hashes), np.bool_)
    np.not_equal(hashes[1:], hashes[:-1], out=is_new[1:])
    return hashes[is_new]


def _is_plain(t: pa.DataType) -> bool:
    """Tell whether Arrow's hash tables know values of a type, and find equal what we do: no floats, nothing nested."""
    types = pa.types
    is_binary = types.is_large_string(t) or types.is_large_binary(t) or types.is_fixed_size_binary(t)
    return bool(types.is_integer(t) or is_binary or types.is_temporal(t))


def _both_have(stored: pa.Array, rows: IntArray, sought: pa.Array, asked: IntArray) -> tuple[IntArray, IntArray]:
    """Return those of `rows` whose value is among those of `asked`, and the other way round; null is a value."""
    mine, others = stored.take(pa.array(rows)), sought.take(pa.array(asked))
    is_sought = to_bools(pc.is_in(mine, value_set=others))
    is_stored = to_bools(pc.is_in(others, value_set=mine.filter(pa.array(is_sought))))
    return rows[is_sought], asked[is_stored]
