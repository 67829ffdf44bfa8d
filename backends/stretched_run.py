"""A run that lies in a file as several stretches, looked up as one piece.

::

    stretch     rows            last hash       keys wanted, ascending
    0           0 … 131071      0x02a1…         ┐ one search of the last hashes cuts them by stretch,
    1           131072 …        0x0543…         │ one search a stretch finds their rows,
    2           …               0x07e8…         ┘ and one gather a column compares and returns them all

So what a look-up costs follows from its keys, not from the size of the run. What it needs of a file that is not in
memory, it asks for in three steps, each for all keys at once: hashes near where they should stand, as hashes are
spread evenly; then what lies at the rows; then the texts that this leads to.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa

from holdfast.backends.arrow.pieces import PiecedColumn, Places, pieced
from holdfast.backends.arrow.rows import BoolArray, IntArray, from_columns, rows_equal, take, to_bools
from holdfast.backends.local.page_cache import MappedFile
from holdfast.backends.run import Run
from holdfast.backends.schema import Keys

#: So many rows tell whether all are in memory.
_SAMPLE = 16
_HASH_BYTES = 8


class StretchedRun:
    """See the module. Safe for many threads.

    `parts` are the stretches, of one schema and ascending ranges of the hash; they lie in `memory`, a file from its
    beginning, which may be on disk as `file`.
    """

    def __init__(self, parts: Sequence[Run], memory: pa.Buffer, file: MappedFile | None = None) -> None:
        self._parts = list(parts)
        self.schema = parts[0].schema
        self._memory, self._file = memory, file
        self._starts = np.cumsum([0, *map(len, parts)])
        self._first_hashes, self._last_hashes = (
            np.array([part.hashes[end] for part in parts], np.uint64) for end in (0, -1)
        )
        self._hashes_at = np.array([part.hashes.ctypes.data - memory.address for part in parts], np.int64)
        if (
            self._hashes_at % _HASH_BYTES
        ).any() or not 0 <= self._hashes_at.min() <= self._hashes_at.max() < memory.size:
            self._file = None  # they do not lie in it

    @property
    def parts(self) -> list[Run]:
        """The stretches, for scans and merges."""
        if self._file is not None:
            self._file.expect_scans()
        return self._parts

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def ends(self) -> tuple[int, int]:
        """The first and the last hash."""
        return self._parts[0].ends[0], self._parts[-1].ends[1]

    @cached_property
    def _columns(self) -> list[PiecedColumn]:
        columns = zip(*(part.batch.columns for part in self._parts), strict=True)
        return [pieced(pieces, self._memory) for pieces in columns]

    def find(self, keys: Keys) -> IntArray:
        """Return for each key the row where it stands, or -1."""
        rows, is_hash = self._search(keys)
        asked = np.flatnonzero(is_hash)
        if self._file is not None:
            self._fetch_rows(rows[asked], self._file)
        wanted = keys.columns if len(asked) == len(keys) else take(keys.columns, asked)
        count = len(self.schema.key)
        stored = from_columns(self._take(2, count, rows[asked]), self.schema.key, len(asked))
        hit = rows_equal(stored, wanted)
        found = np.full(len(keys), -1, np.int64)
        found[asked[hit]] = rows[asked[hit]]
        missed = asked[~hit]
        if len(missed):  # another row of its hash, perhaps
            self._find_in_crowds(keys, missed, np.searchsorted(self._starts, rows[missed], side="right") - 1, found)
        return found

    def _search(self, keys: Keys) -> tuple[IntArray, BoolArray]:
        """Return the first row whose hash is not less than that of each key, and whether it has that hash."""
        near = None if self._file is None else self._rows_near(keys, self._file)
        if near is not None:
            return near
        rows, is_hash = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.bool_)
        bounds = np.concatenate([[0], np.searchsorted(keys.hashes, self._last_hashes, side="right")])
        for i in np.flatnonzero(np.diff(bounds)).tolist():
            here = slice(int(bounds[i]), int(bounds[i + 1]))
            hashes = self._parts[i].hashes
            places = np.searchsorted(hashes, keys.hashes[here])
            is_hash[here] = hashes[places] == keys.hashes[here]
            np.add(places, self._starts[i], out=rows[here])
        return rows, is_hash

    def _rows_near(self, keys: Keys, file: MappedFile) -> tuple[IntArray, BoolArray] | None:
        """Search as `_search` where hashes that are spread evenly should stand, if these are not in memory.

        None if they are in memory, or stand elsewhere.
        """
        stretches = np.minimum(np.searchsorted(self._last_hashes, keys.hashes), len(self._parts) - 1)
        counts, firsts = np.diff(self._starts)[stretches], self._first_hashes[stretches]
        spread = (self._last_hashes[stretches] - firsts).astype(np.float64)
        wanted = np.clip(keys.hashes, firsts, self._last_hashes[stretches])
        rows = (wanted - firsts) / np.maximum(spread, 1) * (counts - 1)
        # Of n numbers drawn evenly, hardly one stands farther from its place.
        low, high = (
            np.clip(rows + 2 * far, 0, counts - 1).astype(np.int64) for far in (-np.sqrt(counts), np.sqrt(counts))
        )
        at = self._hashes_at[stretches]
        begins, ends = (at + row * _HASH_BYTES for row in (low, high))
        if file.are_cached(begins):
            return None
        file.expect_look_ups()
        file.ask_for(begins, ends + _HASH_BYTES)
        hashes = np.frombuffer(self._memory, np.uint64, self._memory.size // _HASH_BYTES)
        at //= _HASH_BYTES
        if ((hashes[at + high] < wanted) | ((hashes[at + low] >= wanted) & (low > 0))).any():
            return None
        while (low < high).any():
            middle = (low + high) // 2
            is_less = hashes[at + middle] < wanted
            low, high = np.where(is_less, middle + 1, low), np.where(is_less, high, middle)
        return self._starts[stretches] + low, hashes[at + low] == keys.hashes

    def _fetch_rows(self, rows: IntArray, file: MappedFile) -> None:
        """Ask for all that belongs to some rows, if it is not in memory."""
        sample = self._places(np.unique(rows[:: max(1, len(rows) // _SAMPLE)]))
        if not len(sample.row) or all(
            file.are_cached(spans.begins)
            for column in self._columns[1:]
            for spans in (column.spans(sample), column.inner_spans(sample))
            if spans is not None
        ):
            return
        file.expect_look_ups()
        places = self._places(np.unique(rows))
        for step in ("spans", "inner_spans"):
            found = [spans for c in self._columns[1:] if (spans := getattr(c, step)(places)) is not None]
            if found:
                file.ask_for(*(np.concatenate(side) for side in zip(*found, strict=True)))

    def _find_in_crowds(self, keys: Keys, missed: IntArray, stretches: IntArray, found: IntArray) -> None:
        for i in np.unique(stretches).tolist():
            here = missed[stretches == i]
            rows = self._parts[i].find(keys.take(here))
            found[here] = np.where(rows < 0, rows, rows + self._starts[i])

    def deleted_at(self, rows: IntArray) -> BoolArray:
        """Tell which of `rows` are deletes."""
        return to_bools(self._take(1, 1, rows)[0])

    def values_at(self, rows: IntArray) -> pa.RecordBatch:
        """Return the values of `rows`, in any order."""
        first = 2 + len(self.schema.key)
        return from_columns(self._take(first, len(self.schema.value), rows), self.schema.value, len(rows))

    def _take(self, first: int, count: int, rows: IntArray) -> list[pa.Array]:
        """Return `count` columns of `rows`."""
        ascends = (rows[1:] > rows[:-1]).all()
        wanted, back = (rows, None) if ascends else np.unique(rows, return_inverse=True)
        places = self._places(wanted)
        columns = [column.take(places) for column in self._columns[first : first + count]]
        return columns if back is None else [column.take(pa.array(back)) for column in columns]

    def _places(self, rows: IntArray) -> Places:
        stretches = np.searchsorted(self._starts, rows, side="right") - 1
        return Places(stretches, rows - self._starts[stretches])
