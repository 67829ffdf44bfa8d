"""Makes, cuts and reads small frames by their blocks: the arrays, one for each dtype, in which pandas keeps columns.

For ``frame[label]``, a cut frame's columns come from us, too: pandas first looks in a dict of the frame, and that dict
makes what is missing.

A public way costs a small frame 10 to 200 µs, more than all else that is done for a key. So only this module uses
pandas' private names, if pandas has all of them. Otherwise the public ways give the same.
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

#: By which each new frame asks for the kind of its manager, in the module of the `CONSTRUCTORS`.
OPTION = "_get_option"
#: pandas' private names, as attributes of pandas, of a frame and of one of its blocks.
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
#: Functions by which ``pd.DataFrame`` makes blocks of what it is given, in the module that looks them up by name.
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
    """Return the private names that this pandas lacks."""
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
    """A frame's blocks without values, as `manager` holds them: makes frames with the same columns and dtypes."""

    def __init__(self, manager: Any) -> None:
        self._make = type(manager)
        self._labels: np.ndarray[Any, np.dtype[Any]] = manager.axes[0].to_numpy(copy=True)
        self.blocks = [(type(b), b.mgr_locs, b.mgr_locs.as_array.tolist(), b.values.dtype) for b in manager.blocks]
        self._new_labels, self._new_index = _NEW(pd.Index), _NEW(pd.RangeIndex)

    def filled(self, columns: list[Any], rows: int, labels: pd.Index[Any] | None = None) -> Any:
        """Return the manager of a frame of `columns`: sequences, or arrays, of `rows` values."""
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
    """Return labels that share nothing: a function may write into their array."""
    found: pd.Index[Any] = _NEW(pd.Index)(labels.copy())
    return found


def constructing() -> Any:
    """Return the module that has the `CONSTRUCTORS`."""
    return _CONSTRUCTING(pd)


def reducing() -> Any:
    """Return the module that has ``nansum``."""
    return _REDUCING(pd)


def has_usual_options() -> bool:
    """Whether pandas' options leave text as objects, and columns in blocks."""
    configuration = _CONFIGURATION(pd)
    return not configuration["future"]["infer_string"] and configuration["mode"]["data_manager"] == "block"


def data_manager() -> Any:
    """Return pandas' option of this name."""
    return _CONFIGURATION(pd)["mode"]["data_manager"]


def anatomy(frame: pd.DataFrame | pd.Series[Any]) -> tuple[Any, ...]:
    """Return all parts of a frame, to compare them with another's; of a column also its sum."""
    if isinstance(frame, pd.Series):
        return type(frame), list(vars(frame)), frame.sum(), anatomy(frame.to_frame())
    blocks = [(type(b), b.mgr_locs.as_array.tolist(), b.values.dtype, b.values.tolist()) for b in _BLOCKS(frame)]
    axes = [(type(axis), axis.dtype, axis.name, axis.tolist()) for axis in _AXES(frame)]
    return type(frame), type(_MANAGER(frame)), axes, blocks


def consecutive(frame: pd.DataFrame, sizes: IntArray) -> Iterator[pd.DataFrame]:
    """Cut a frame into consecutive frames, each with labels, and an index that starts at 0, of its own."""
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
        _give_parts(found, part, give_columns(found, columns, blocks))
        return found

    return cut


class Columns:
    """Makes columns of frames that are cut from one, as ``frame[label]`` does, in a third of the time."""

    def __init__(self, frame: pd.DataFrame) -> None:
        manager = _MANAGER(frame)
        places = zip(range(frame.shape[1]), manager.blknos.tolist(), manager.blklocs.tolist(), strict=True)
        self._places = dict(zip(frame.columns, places, strict=True)) if frame.columns.is_unique else {}
        if self._places:
            column = manager.iget(0)
            self._manager, self._place = type(column), type(column.blocks[0].mgr_locs)

    def made(self, label: Any, frame_ref: ref[pd.DataFrame], blocks: tuple[Any, ...]) -> pd.Series[Any] | None:
        """Return a column of a frame made from `blocks`; None where pandas must handle changes."""
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
        parts = _give_parts(found, column, {})
        parts[_NAME] = name
        parts[_CACHER] = name, frame_ref
        return found


class _Taken(dict[Any, Any]):
    """The columns taken from a frame, where pandas looks before it makes one."""

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


def pandas_columns(frame: pd.DataFrame, columns: Columns, blocks: tuple[Any, ...]) -> dict[Any, Any]:
    """Return a frame's column cache that lets pandas make the columns."""
    return {}


def our_columns(frame: pd.DataFrame, columns: Columns, blocks: tuple[Any, ...]) -> dict[Any, Any]:
    """Return a frame's column cache that lets `columns` make the columns."""
    return _Taken(frame, columns, blocks)


#: The column caches of cut frames: exchanged together with pandas' functions.
give_columns = pandas_columns


def _give_parts(of: pd.DataFrame | pd.Series[Any], manager: Any, columns: dict[Any, Any]) -> dict[str, Any]:
    """Set up a new frame or series as pandas' constructor does; return its attributes."""
    parts = vars(of)
    parts[_IS_COPY] = None
    parts[_MANAGER_NAME] = manager
    parts[_COLUMNS] = columns
    parts[_ATTRS] = {}
    parts[_FLAGS] = pd.Flags(of, allows_duplicate_labels=True)  # type: ignore[attr-defined]
    return parts


def _labels_for_each(labels: pd.Index[Any]) -> Iterator[pd.Index[Any]]:
    """Yield labels for frame after frame, each with an array that a function may write into.

    All but the first share a table for look-ups, which takes 5 µs to make, until a function writes; a frame that has
    the table is still looked up by its old labels.
    """
    while labels.dtype != np.object_:  # an option of pandas: text is kept by Arrow
        yield labels.copy(deep=True)
    own, new = labels.to_numpy(copy=True), _NEW(pd.Index)
    given, same = own.copy(), own.tobytes()  # of objects, their addresses
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
    """Return the positions of each block's columns, as ``intp``, and its values, one row per column."""
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
    """Concatenate the blocks of frames that have the same dtypes in the same places; return the columns."""
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
        # Much cheaper per frame than pd.concat; equal dtypes give the same result.
        return np.concatenate([np.asarray(column) for column in columns])
    return pd.concat([pd.Series(column) for column in columns], ignore_index=True).array
