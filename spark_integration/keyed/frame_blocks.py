"""Cuts and reads many small frames by their blocks: the arrays, one for each dtype, in which pandas keeps columns.

A public way costs a small frame 10 to 20 µs, as much as all else that is done for a key. So pandas' private names are
used here, and nowhere else, as long as pandas has all of them. Without them the public ways give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import pandas as pd

from holdfast.backends.arrow.rows import IntArray

Array = np.ndarray[Any, np.dtype[Any]] | pd.api.extensions.ExtensionArray

#: pandas' private names, as attributes of a frame and of one of its blocks.
PRIVATE = ("_from_mgr", "_mgr.axes", "_mgr.blocks", "_mgr.get_slice")
PRIVATE_OF_BLOCKS = ("mgr_locs.as_array", "values")
_BLOCKS, _GET_SLICE, _FROM_MANAGER = map(attrgetter, ("_mgr.blocks", "_mgr.get_slice", "_from_mgr"))


def lacking() -> list[str]:
    """Return the private names that pandas has no longer."""
    frame = pd.DataFrame({"n": [0]})
    gone = [name for name in PRIVATE if not _has(frame, name)]
    return gone or [name for name in PRIVATE_OF_BLOCKS if not _has(_BLOCKS(frame)[0], name)]


def _has(owner: Any, name: str) -> bool:
    try:
        attrgetter(name)(owner)
    except AttributeError:
        return False
    return True


@cache
def _has_blocks() -> bool:
    return not lacking()


def consecutive(frame: pd.DataFrame, sizes: IntArray) -> Iterator[pd.DataFrame]:
    """Cut a frame into consecutive frames, each with an index that starts at 0.

    Frames share index and labels, which are immutable except for their names; a name that a function sets is undone.
    """
    in_blocks = _has_blocks() and _has(frame, "_mgr.blocks")
    cut = _cut_blocks(frame) if in_blocks else _cut_groups(frame, sizes)
    index = {size: pd.RangeIndex(size) for size in set(sizes.tolist())}
    labels = frame.columns
    for start, end in pairwise([0, *np.cumsum(sizes).tolist()]):
        size = end - start
        yield cut(slice(start, end), index[size])
        if index[size].name is not None:
            index[size] = pd.RangeIndex(size)
        if labels.name is not None:
            labels.name = None


def _cut_blocks(frame: pd.DataFrame) -> Callable[[slice, pd.Index[Any]], pd.DataFrame]:
    get_slice, from_manager = _GET_SLICE(frame), _FROM_MANAGER(frame)

    def cut(rows: slice, index: pd.Index[Any]) -> pd.DataFrame:
        manager = get_slice(rows, 1)
        manager.axes[1] = index
        part: pd.DataFrame = from_manager(manager, manager.axes)
        return part

    return cut


def _cut_groups(frame: pd.DataFrame, sizes: IntArray) -> Callable[[slice, pd.Index[Any]], pd.DataFrame]:
    groups = iter(frame.groupby(np.repeat(np.arange(len(sizes)), sizes), sort=False))

    def cut(rows: slice, index: pd.Index[Any]) -> pd.DataFrame:
        _, part = next(groups)
        part.index = index
        return part

    return cut


def blocks_of(frame: pd.DataFrame) -> tuple[tuple[bytes, ...], list[Array]]:
    """Return the blocks of a frame.

    Returns
    -------
    places : tuple of bytes
        For each block, which columns it holds: positions as numpy's ``intp``.
    blocks : list of arrays
        A row for each of these columns, or one-dimensional.
    """
    if not _has_blocks():
        arrays = column_arrays(frame)
        return _one_by_one(arrays), arrays
    try:
        blocks = _BLOCKS(frame)
    except AttributeError:  # a function has set pandas' option mode.data_manager
        arrays = column_arrays(frame)
        # A block of one column has two dimensions, its array alone has one: a block without columns tells them apart.
        return (*_one_by_one(arrays), b""), [*arrays, np.empty((0, len(frame)))]
    return tuple([block.mgr_locs.as_array.tobytes() for block in blocks]), [block.values for block in blocks]


def _one_by_one(arrays: list[Array]) -> tuple[bytes, ...]:
    return tuple(np.intp(at).tobytes() for at in range(len(arrays)))


def column_arrays(frame: pd.DataFrame) -> list[Array]:
    """Return the arrays of a frame's columns, by pandas' public methods."""
    arrays = [frame.iloc[:, place].array for place in range(frame.shape[1])]
    return [a.to_numpy() if isinstance(a, pd.arrays.NumpyExtensionArray) else a for a in arrays]


def joined_columns(places: tuple[bytes, ...], frames: list[list[Array]]) -> list[Array]:
    """Concatenate the blocks of frames that have the same dtypes in the same places; return the columns.

    Parameters
    ----------
    places : tuple of bytes
    frames : list of lists of arrays
        As `blocks_of` returns both.
    """
    columns: dict[int, Array] = {}
    for of_block, blocks in zip(places, zip(*frames, strict=True), strict=True):
        columns |= zip(np.frombuffer(of_block, np.intp).tolist(), _joined(blocks), strict=True)
    return [columns[at] for at in range(len(columns))]


def _joined(blocks: tuple[Any, ...]) -> list[Array]:
    """Return the columns of blocks that are concatenated."""
    first = blocks[0]
    if first.ndim == 1:
        return [concatenated(blocks)]
    if isinstance(first.dtype, np.dtype):
        return list(np.concatenate([np.asarray(block) for block in blocks], axis=1))
    return [concatenated(tuple(block[row] for block in blocks)) for row in range(len(first))]


def concatenated(columns: tuple[Any, ...]) -> Array:
    """Concatenate arrays of the same dtype."""
    if isinstance(columns[0].dtype, np.dtype):
        # Much cheaper per frame than pd.concat; the result is the same, since all dtypes are.
        return np.concatenate([np.asarray(column) for column in columns])
    return pd.concat([pd.Series(column) for column in columns], ignore_index=True).array
