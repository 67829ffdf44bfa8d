"""Creates, cuts and reads small frames through their blocks: the arrays, one per dtype, that store pandas' columns.

It also speeds up ``frame[label]`` on a cut frame: pandas first looks up the label in the frame's column cache, a dict,
and the cache of a cut frame creates a missing column.

On a small frame, pandas' public API takes 10 to 200 µs, longer than all other work for a key. So this module, and no
other, uses private names of pandas if all of them exist. If not, it uses the public API, with the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from operator import attrgetter
from typing import Any
from weakref import ref

import numpy as np
import pandas as pd

from holdfast.backends.arrow.rows import IntArray

Array = np.ndarray[Any, np.dtype[Any]] | pd.api.extensions.ExtensionArray

#: The function that reads the kind of manager for each new frame, in the module of the `CONSTRUCTORS`.
OPTION = "_get_option"
#: Private names of pandas that this module uses: attributes of pandas, of a frame and of a block.
PRIVATE_OF_PANDAS = (
    "Index._simple_new",
    "RangeIndex._simple_new",
    "_config.config._global_config",
    "core.frame",
    f"core.frame.{OPTION}",
    "core.nanops.nansum",
)
PRIVATE = (
    "_attrs",
    "_flags",
    "_get_item_cache",
    "_is_copy",
    "_item_cache",
    "columns._cache",
    "columns._engine",
    "_mgr.axes",
    "_mgr.blklocs",
    "_mgr.blknos",
    "_mgr.blocks",
    "_mgr.iget",
)
PRIVATE_OF_BLOCKS = ("iget", "mgr_locs.as_array", "refs", "values")
#: Functions that convert the arguments of ``pd.DataFrame`` to blocks, in the module that looks them up by name.
CONSTRUCTORS = ("arrays_to_mgr", "dict_to_mgr", "ensure_index", "nested_data_to_arrays")
_MANAGER, _BLOCKS, _AXES = map(attrgetter, ("_mgr", "_mgr.blocks", "_mgr.axes"))
_NEW, _CONFIGURATION = map(attrgetter, ("_simple_new", "_config.config._global_config"))
_TABLE_NAME = "_engine"
_TABLE, _CACHE = map(attrgetter, (_TABLE_NAME, "_cache"))
_CONSTRUCTING, _REDUCING = map(attrgetter, ("core.frame", "core.nanops"))
_COLUMNS, _NAME, _BLOCKS_NAME = "_item_cache", "_name", "blocks"
_MANAGER_NAME, _ATTRS, _FLAGS, _IS_COPY = "_mgr", "_attrs", "_flags", "_is_copy"
_CACHER = "_cacher"
_new, _get = object.__new__, dict.get


def lacking() -> list[str]:
    """Return the private names that the installed pandas lacks."""
    frame = pd.DataFrame({"n": [0]})
    of_pandas = (*PRIVATE_OF_PANDAS, *[f"core.frame.{name}" for name in CONSTRUCTORS])
    gone = [name for name in of_pandas if not _has(pd, name)]
    gone += [name for name in PRIVATE if not _has(frame, name)]
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


class Template:
    """The layout of a frame's blocks, from which frames with the same columns and dtypes are created."""

    def __init__(self, manager: Any) -> None:
        self._make = type(manager)
        self._labels: np.ndarray[Any, np.dtype[Any]] = manager.axes[0].to_numpy(copy=True)
        self.blocks = [(type(b), b.mgr_locs, b.mgr_locs.as_array.tolist(), b.values.dtype) for b in manager.blocks]
        self._new_labels, self._new_index = _NEW(pd.Index), _NEW(pd.RangeIndex)

    def filled(self, columns: list[Any], rows: int, labels: pd.Index[Any] | None = None) -> Any:
        """Return the block manager of a frame with these columns: sequences or arrays of `rows` values."""
        blocks = []
        for kind, place, positions, dtype in self.blocks:
            if dtype.hasobject:
                values = np.empty((len(positions), rows), dtype)
                for row, position in enumerate(positions):
                    values[row] = columns[position]
            else:
                values = np.array([columns[position] for position in positions], dtype)
            blocks.append(kind(values, place, 2))
        if labels is None:
            labels = self._new_labels(self._labels.copy())
        return self._make(tuple(blocks), [labels, self._new_index(range(rows))], False)


def new_labels(labels: np.ndarray[Any, np.dtype[Any]]) -> pd.Index[Any]:
    """Return an index of labels with its own array, which a function may modify."""
    found: pd.Index[Any] = _NEW(pd.Index)(labels.copy())
    return found


def constructing() -> Any:
    """Return the pandas module that has the `CONSTRUCTORS`."""
    return _CONSTRUCTING(pd)


def reducing() -> Any:
    """Return the pandas module that has ``nansum``."""
    return _REDUCING(pd)


def has_usual_options() -> bool:
    """Return whether pandas' options keep text as objects and columns in blocks."""
    configuration = _CONFIGURATION(pd)
    return not configuration["future"]["infer_string"] and configuration["mode"]["data_manager"] == "block"


def data_manager() -> Any:
    """Return the value of pandas' option ``mode.data_manager``."""
    return _CONFIGURATION(pd)["mode"]["data_manager"]


def anatomy(frame: pd.DataFrame | pd.Series[Any]) -> tuple[Any, ...]:
    """Return all parts of a frame or series for comparison; of a series, also its sum."""
    if isinstance(frame, pd.Series):
        return type(frame), list(vars(frame)), frame.sum(), anatomy(frame.to_frame())
    blocks = [(type(b), b.mgr_locs.as_array.tolist(), b.values.dtype, b.values.tolist()) for b in _BLOCKS(frame)]
    axes = [(type(axis), axis.dtype, axis.name, axis.tolist()) for axis in _AXES(frame)]
    return type(frame), type(_MANAGER(frame)), axes, blocks


def consecutive(frame: pd.DataFrame, sizes: IntArray) -> Iterator[pd.DataFrame]:
    """Cut a frame into consecutive frames, each with its own labels and an index that starts at 0."""
    in_blocks = _has_blocks() and _has(frame, "_mgr.blocks")
    cut = _cut_blocks(frame) if in_blocks else _cut_groups(frame, sizes)
    for start, end in pairwise([0, *np.cumsum(sizes).tolist()]):
        yield cut(slice(start, end))


def _cut_blocks(frame: pd.DataFrame) -> Callable[[slice], pd.DataFrame]:
    manager = _MANAGER(frame)
    make, new_index_of = type(manager), _NEW(pd.RangeIndex)
    whole = [(type(block), block.values, block.mgr_locs, block.values.ndim == 2) for block in manager.blocks]
    labels = _labels_for_each(frame.columns)
    columns = Columns(frame)

    def cut(rows: slice) -> pd.DataFrame:
        blocks = tuple(
            [kind(values[:, rows] if is_wide else values[rows], place, 2) for kind, values, place, is_wide in whole]
        )
        part = make(blocks, [next(labels), new_index_of(range(rows.stop - rows.start))], False)
        found: pd.DataFrame = _new(pd.DataFrame)
        _set_attributes(found, part, column_cache(found, columns, blocks))
        return found

    return cut


class Columns:
    """Creates the columns of frames that were cut from one frame, three times as fast as ``frame[label]``."""

    def __init__(self, frame: pd.DataFrame) -> None:
        manager = _MANAGER(frame)
        places = zip(range(frame.shape[1]), manager.blknos.tolist(), manager.blklocs.tolist(), strict=True)
        self._places = dict(zip(frame.columns, places, strict=True)) if frame.columns.is_unique else {}
        if self._places:
            column = manager.iget(0)
            self._manager, self._place = type(column), type(column.blocks[0].mgr_locs)

    def made(self, label: Any, frame_ref: ref[pd.DataFrame], blocks: tuple[Any, ...]) -> pd.Series[Any] | None:
        """Return a column of a frame made of `blocks`; None if the frame has changed, so that pandas must create it."""
        frame, found_at = frame_ref(), self._places.get(label)
        if frame is None or found_at is None:
            return None
        parts = vars(frame)
        manager = parts[_MANAGER_NAME]
        if getattr(manager, _BLOCKS_NAME, None) is not blocks:
            return None
        if parts[_ATTRS] or parts[_IS_COPY] is not None or not parts[_FLAGS].allows_duplicate_labels:
            return None
        at, number, row = found_at
        labels, index = manager.axes
        name = labels.values[at]
        if name != label:
            return None
        block = blocks[number]
        column = self._manager(type(block)(block.iget(row), self._place(slice(0, len(index))), 1, block.refs), index)
        found: pd.Series[Any] = _new(pd.Series)
        parts = _set_attributes(found, column, {})
        parts[_NAME] = name
        parts[_CACHER] = name, frame_ref
        return found


class _LazyColumns(dict[Any, Any]):
    """The column cache of a frame, which creates a missing column when pandas looks it up."""

    __slots__ = ("_blocks", "_columns", "_frame")

    def __init__(self, frame: pd.DataFrame, columns: Columns, blocks: tuple[Any, ...]) -> None:
        self._frame, self._columns, self._blocks = ref(frame), columns, blocks

    def get(self, label: Any, default: Any = None) -> Any:
        found = _get(self, label, default)
        if found is None:
            found = self._columns.made(label, self._frame, self._blocks)
            if found is not None:
                self[label] = found
        return found


def plain_columns(frame: pd.DataFrame, columns: Columns, blocks: tuple[Any, ...]) -> dict[Any, Any]:
    """Return a plain column cache: pandas creates the columns."""
    return {}


def lazy_columns(frame: pd.DataFrame, columns: Columns, blocks: tuple[Any, ...]) -> dict[Any, Any]:
    """Return a column cache in which `columns` creates the columns."""
    return _LazyColumns(frame, columns, blocks)


#: Creates the column cache of a cut frame; replaced together with pandas' functions.
column_cache = plain_columns


def _set_attributes(of: pd.DataFrame | pd.Series[Any], manager: Any, columns: dict[Any, Any]) -> dict[str, Any]:
    """Set and return the attributes of a new frame or series, as pandas' constructor does."""
    parts = vars(of)
    parts[_IS_COPY] = None
    parts[_MANAGER_NAME] = manager
    parts[_COLUMNS] = columns
    parts[_ATTRS] = {}
    parts[_FLAGS] = pd.Flags(of, allows_duplicate_labels=True)  # type: ignore[attr-defined]
    return parts


def _labels_for_each(labels: pd.Index[Any]) -> Iterator[pd.Index[Any]]:
    """Yield labels for each frame, with an array that a function may modify.

    All but the first share a lookup table, which takes 5 µs to build, until a function modifies an array. A frame with
    the shared table is still looked up by its old labels.
    """
    while labels.dtype != np.object_:  # a pandas option stores text in Arrow
        yield labels.copy(deep=True)
    own, new = labels.to_numpy(copy=True), _NEW(pd.Index)
    given, same = own.copy(), own.tobytes()  # the addresses of the objects
    yield new(given)
    table = _TABLE(new(own.copy()))
    while given.tobytes() == same:
        given = own.copy()
        found = new(given)
        _CACHE(found)[_TABLE_NAME] = table
        yield found
    while True:
        yield new_labels(own)


def _cut_groups(frame: pd.DataFrame, sizes: IntArray) -> Callable[[slice], pd.DataFrame]:
    groups = iter(frame.groupby(np.repeat(np.arange(len(sizes)), sizes), sort=False))

    def cut(rows: slice) -> pd.DataFrame:
        _, part = next(groups)
        part.index = pd.RangeIndex(rows.stop - rows.start)
        part.columns = frame.columns.copy(deep=True)
        return part

    return cut


def blocks_of(frame: pd.DataFrame) -> tuple[tuple[bytes, ...], list[Array]]:
    """Return each block's column positions, as ``intp`` bytes, and its values, one row per column."""
    if not _has_blocks():
        arrays = column_arrays(frame)
        return _one_by_one(arrays), arrays
    try:
        blocks = _BLOCKS(frame)
    except AttributeError:  # the function has set pandas' option mode.data_manager
        arrays = column_arrays(frame)
        # The empty block marks arrays of one dimension; the block of a single column has two.
        return (*_one_by_one(arrays), b""), [*arrays, np.empty((0, len(frame)))]
    return tuple([block.mgr_locs.as_array.tobytes() for block in blocks]), [block.values for block in blocks]


def _one_by_one(arrays: list[Array]) -> tuple[bytes, ...]:
    return tuple(np.intp(at).tobytes() for at in range(len(arrays)))


def column_arrays(frame: pd.DataFrame) -> list[Array]:
    """Return the arrays of a frame's columns through pandas' public API."""
    arrays = [frame.iloc[:, place].array for place in range(frame.shape[1])]
    return [a.to_numpy() if isinstance(a, pd.arrays.NumpyExtensionArray) else a for a in arrays]


def joined_columns(places: tuple[bytes, ...], frames: list[list[Array]]) -> list[Array]:
    """Concatenate the blocks of frames with the same dtypes at the same positions; return the columns."""
    columns: dict[int, Array] = {}
    for of_block, blocks in zip(places, zip(*frames, strict=True), strict=True):
        columns |= zip(np.frombuffer(of_block, np.intp).tolist(), _joined(blocks), strict=True)
    return [columns[at] for at in range(len(columns))]


def _joined(blocks: tuple[Any, ...]) -> list[Array]:
    first = blocks[0]
    if first.ndim == 1:
        return [concatenated(blocks)]
    if isinstance(first.dtype, np.dtype):
        return list(np.concatenate([np.asarray(block) for block in blocks], axis=1))
    return [concatenated(tuple(block[row] for block in blocks)) for row in range(len(first))]


def concatenated(columns: tuple[Any, ...]) -> Array:
    """Concatenate arrays of the same dtype."""
    if isinstance(columns[0].dtype, np.dtype):
        # Much faster than pd.concat, with the same result for equal dtypes.
        return np.concatenate([np.asarray(column) for column in columns])
    return pd.concat([pd.Series(column) for column in columns], ignore_index=True).array
