"""Converts a state column of lists to a table with a row per entry, and back."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from holdfast import ShardBatch

_NEVER = np.iinfo(np.int64).max


def stored_entries(batch: ShardBatch, column: str) -> pa.Table:
    """Return the entries of all keys: their fields, and the index of the key as ``key``."""
    lists = batch.state.get()[column].combine_chunks()
    keys = pc.list_parent_indices(lists).cast(pa.int64())
    return pa.Table.from_struct_array(pc.list_flatten(lists)).append_column("key", keys)


def with_stored(batch: ShardBatch, column: str, new: pd.DataFrame) -> pd.DataFrame:
    """Return the stored entries of all keys, followed by a new entry per row of the batch."""
    return pd.concat([stored_entries(batch, column).to_pandas(), new.assign(key=batch.groups.index)])


def store_entries(
    batch: ShardBatch, column: str, entries: pa.Table | pd.DataFrame, due_ms: pd.Series | None = None
) -> None:
    """Store the entries of all keys, sorted by ``key``; delete the state of keys without entries.

    With `due_ms`, set each key's timer to the earliest time of its entries.
    """
    entries = _table(entries)
    bounds = np.searchsorted(entries["key"].to_numpy(), np.arange(batch.keys.num_rows + 1))
    structs = entries.drop_columns(["key"]).to_struct_array().combine_chunks()
    is_empty = bounds[1:] == bounds[:-1]
    lists = pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), structs)
    batch.state.put(pa.table({column: lists}), where=~is_empty)
    batch.state.delete(where=is_empty)
    if due_ms is not None:
        # A `StatefulProcessor`'s timers fire at their time, a shard's timers after it.
        earliest_ms = np.full(batch.keys.num_rows, _NEVER)
        np.minimum.at(earliest_ms, entries["key"].to_numpy(), due_ms.to_numpy() - 1)
        batch.timers.set(pa.array(earliest_ms, mask=earliest_ms == _NEVER))


def with_keys(batch: ShardBatch, entries: pa.Table | pd.DataFrame) -> pa.Table:
    """Return entries after their key columns, which replace ``key``."""
    entries = _table(entries)
    shown = batch.keys.take(entries["key"])
    for name in entries.drop_columns(["key"]).column_names:
        shown = shown.append_column(name, entries[name])
    return shown


def _table(entries: pa.Table | pd.DataFrame) -> pa.Table:
    return pa.Table.from_pandas(entries, preserve_index=False) if isinstance(entries, pd.DataFrame) else entries
