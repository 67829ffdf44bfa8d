"""A state column that holds a list for each key, as a table with a row for each entry, and back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast import ShardBatch

_NEVER = np.iinfo(np.int64).max


def stored_entries(batch: ShardBatch, column: str) -> pa.Table:
    """Return the entries of all keys: their fields, and in ``key`` the number of the key."""
    lists = batch.state.get()[column].combine_chunks()
    keys = pc.list_parent_indices(lists).cast(pa.int64())
    return pa.Table.from_struct_array(pc.list_flatten(lists)).append_column("key", keys)


def store_entries(batch: ShardBatch, column: str, entries: pa.Table) -> None:
    """Store the entries of all keys, which are sorted by ``key``; a key without any has no state."""
    bounds = np.searchsorted(entries["key"].to_numpy(), np.arange(batch.keys.num_rows + 1))
    structs = entries.drop_columns(["key"]).to_struct_array().combine_chunks()
    is_empty = bounds[1:] == bounds[:-1]
    lists = pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), structs)
    batch.state.put(pa.table({column: lists}), where=~is_empty)
    batch.state.delete(where=is_empty)


def set_earliest(batch: ShardBatch, key: npt.NDArray[np.int64], times_ms: npt.NDArray[np.int64]) -> None:
    """Set the timer of each key to the earliest of its times, and take it away from a key without any.

    Timers of a `StatefulProcessor` are due at their time, those of a shard after it: hence one millisecond earlier.
    """
    earliest_ms = np.full(batch.keys.num_rows, _NEVER)
    np.minimum.at(earliest_ms, key, times_ms - 1)
    batch.timers.set(pa.array(earliest_ms, mask=earliest_ms == _NEVER))
