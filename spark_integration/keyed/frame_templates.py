"""Speeds up ``pd.DataFrame(...)`` in a user's function tenfold, by building equal frames from templates.

::

    pd.DataFrame({"key": [key], "n": [n]})
       │
       ▼  pandas' own __init__
    dict_to_mgr ──▶ labels and kinds of values known? ──▶ template ─▶ blocks        10 µs
                         │ no                                 ▲
                         └──▶ pandas' own dict_to_mgr ────────┘ learns          100 to 200 µs

pandas creates the first frame of each signature (labels, and a kind per column). Its blocks become the template of
later frames. pandas creates frames without a signature: long or wide data, other types of values, changed options.

In addition, numpy sums plain numbers, and a frame that was cut for a key creates its own columns.

Only module-level functions of pandas are replaced, no class, and only while `by_templates` advances its generator: at
each yield pandas is restored. A thread of the function may call either version; both give the same result.
"""

from __future__ import annotations

import datetime as dt
import os
import threading
import warnings
from collections.abc import Callable, Generator
from decimal import Decimal
from functools import cache
from types import FunctionType, TracebackType
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from holdfast.spark_integration.keyed import frame_blocks
from holdfast.spark_integration.keyed.frame_blocks import Template, new_labels

Y = TypeVar("Y")
R = TypeVar("R")
#: All labels, then a kind for each column.
Signature = tuple[str, ...]

# In longer columns and wider frames, the values account for most of the cost.
_ROWS_MAX = 128
_COLUMNS_MAX = 64
# Bounds memory if a function keeps using new labels.
_SIGNATURES_MAX = 1000

_OBJECT = "O"
#: By exact type of all values of a column, numpy's character of the dtype that pandas gives the column.
_KINDS: dict[type, str] = {
    int: "l",
    np.int64: "l",
    float: "d",
    np.float64: "d",
    bool: "?",
    str: _OBJECT,
    bytes: _OBJECT,
    Decimal: _OBJECT,
    dt.date: _OBJECT,
    list: _OBJECT,
    dict: _OBJECT,
    type(None): _OBJECT,
}
_KINDS_OF_ARRAYS = frozenset("bhilBHILfd?")
#: Types of scalars, which are repeated to the length of the other columns.
_SCALARS = frozenset((int, float, bool, str))
Functions = dict[str, Callable[..., Any]]
# If two threads started at the same time, one would mistake the replacements of the other for pandas' functions.
_COMPARING = threading.Lock()
# Frames that a worker compares before it uses templates: each form of data and each kind of block.
_SAMPLES: tuple[Callable[[], pd.DataFrame | pd.Series[Any]], ...] = (
    lambda: pd.DataFrame({"key": ["a"], "n": [1], "x": [0.5], "is": [True], "m": [2]}),
    lambda: pd.DataFrame({"key": ("a", None), "v": np.array([1, 2], np.int16), "n": 3}),
    lambda: pd.DataFrame([("a", 1, 2.5), ("b", 2, 3.5)], columns=["key", "n", "x"]),
    lambda: pd.DataFrame([{"key": "a", "n": 1}]),
    lambda: _last_cut()["n"],
    lambda: _last_cut()["x"],
)


class _Rows(list[Any]):
    """Columns passed from one pandas function to the next, with the manager of their frame."""

    manager: Any = None
    signature: Signature | None = None


class Templates:
    """The process's templates, by signature."""

    def __init__(self) -> None:
        self._of: dict[Signature, Template] = {}
        self._labels: dict[Signature, np.ndarray[Any, np.dtype[Any]]] = {}

    def of_dict(self, data: dict[Any, Any]) -> tuple[Signature | None, Any]:
        """Return the signature and manager of a frame from a dict of columns; None for what pandas must create."""
        columns = list(data.values())
        for column in columns:
            kind = type(column)
            if kind is list or kind is tuple or (kind is np.ndarray and column.ndim == 1):
                return self._made(list(data), columns, len(column), None)
        return None, None

    def of_rows(self, data: list[Any], labels: pd.Index[Any] | None) -> _Rows | None:
        """Return the columns of a list of tuples, lists or dicts; None if pandas must convert them."""
        kind = type(data[0])
        if len(data) > _ROWS_MAX or any(type(row) is not kind for row in data):
            return None
        if kind is dict:
            names = list(data[0])
            if any(list(row) != names for row in data) or (labels is not None and labels.tolist() != names):
                return None
            columns = zip(*[row.values() for row in data], strict=True)
        elif (kind is tuple or kind is list) and type(labels) is pd.Index:
            names = labels.tolist()
            if any(len(row) != len(names) for row in data):
                return None
            columns = zip(*data, strict=True)
        else:
            return None
        rows = _Rows(columns)
        rows.signature, rows.manager = self._made(names, list(rows), len(data), labels)
        return rows if rows.signature else None

    def labels(self, given: list[Any]) -> pd.Index[Any] | None:
        """Convert a list of strings to labels; None if pandas must convert it."""
        if not (0 < len(given) <= _COLUMNS_MAX and frame_blocks.has_usual_options()):
            return None
        if any(type(label) is not str for label in given):
            return None
        found = self._labels.get(names := tuple(given))
        if found is None:
            found = _kept(self._labels, names, np.array(given, object))
        return new_labels(found)

    def learn(self, signature: Signature, manager: Any) -> None:
        """Keep pandas' frame as a signature's template, unless its dtypes differ, as for 2**63, which is uint64."""
        template, kinds = Template(manager), signature[len(signature) // 2 :]
        if all(kinds[at] == dtype.char for _, _, places, dtype in template.blocks for at in places):
            _kept(self._of, signature, template)

    def _made(
        self, names: list[Any], columns: list[Any], rows: int, labels: pd.Index[Any] | None
    ) -> tuple[Signature | None, Any]:
        """Return the signature, and the manager if a template exists; expand scalar columns in place."""
        if not (0 < rows <= _ROWS_MAX and len(names) <= _COLUMNS_MAX and frame_blocks.has_usual_options()):
            return None, None
        for name in names:
            if type(name) is not str:
                return None, None
        kinds = []
        for at, column in enumerate(columns):
            is_one = rows == 1 and type(column) is list and len(column) == 1
            kind = _KINDS.get(type(column[0])) if is_one else _kind(column, rows)
            if kind is None:
                return None, None
            if type(column) in _SCALARS:
                columns[at] = [column] * rows
            kinds.append(kind)
        signature = (*names, *kinds)
        try:
            template = self._of[signature]
        except KeyError:
            return signature, None
        try:
            return signature, template.filled(columns, rows, labels)
        except OverflowError:  # an integer of more than 64 bits
            return None, None


def _kind(column: Any, rows: int) -> str | None:
    """Return numpy's character for a column's dtype; None if pandas must convert the column."""
    of = type(column)
    if of is list or of is tuple:
        if len(column) != rows:
            return None
        first = type(column[0])
        kind = _KINDS.get(first)
        if rows > 1 and kind is not None:
            for value in column:
                if type(value) is not first and not (kind is _OBJECT and _KINDS.get(type(value)) is _OBJECT):
                    return None
        return kind
    if of is np.ndarray:
        dtype = column.dtype
        fits = column.ndim == 1 and len(column) == rows and dtype.isnative and dtype.char in _KINDS_OF_ARRAYS
        return dtype.char if fits else None
    return _KINDS[of] if of in _SCALARS else None


def _kept(kept: dict[Signature, Any], signature: Signature, what: Any) -> Any:
    if len(kept) >= _SIGNATURES_MAX:
        kept.clear()
    kept[signature] = what
    return what


def _of_dicts(templates: Templates, theirs: Functions) -> list[Any]:
    """Return replacements for pandas' functions for dicts and labels."""
    by_pandas, to_labels = theirs["dict_to_mgr"], theirs["ensure_index"]

    def dict_to_mgr(data: Any, index: Any, columns: Any, *, dtype: Any = None, copy: Any = True, **more: Any) -> Any:
        signature = None
        if type(data) is dict and index is None and columns is None and dtype is None and copy:
            signature, manager = templates.of_dict(data)
            if manager is not None:
                return manager
        manager = by_pandas(data, index, columns, dtype=dtype, copy=copy, **more)
        if signature is not None:
            templates.learn(signature, manager)
        return manager

    def ensure_index(index_like: Any, copy: bool = False) -> Any:
        labels = templates.labels(index_like) if type(index_like) is list else None
        return to_labels(index_like, copy) if labels is None else labels

    return [dict_to_mgr, ensure_index]


def _of_rows(templates: Templates, theirs: Functions) -> list[Any]:
    """Return replacements for pandas' functions for lists of rows."""
    to_arrays, by_pandas = theirs["nested_data_to_arrays"], theirs["arrays_to_mgr"]

    def nested_data_to_arrays(data: Any, columns: Any, index: Any, dtype: Any) -> Any:
        rows = None
        if type(data) is list and index is None and dtype is None:
            rows = templates.of_rows(data, columns)
            if rows is not None and rows.manager is not None:
                return rows, *rows.manager.axes
        arrays, columns, index = to_arrays(data, columns, index, dtype)
        if rows is None:
            return arrays, columns, index
        rows[:] = arrays
        return rows, columns, index

    def arrays_to_mgr(arrays: Any, *args: Any, **more: Any) -> Any:
        if type(arrays) is not _Rows:
            return by_pandas(arrays, *args, **more)
        if arrays.manager is None:
            arrays.manager = by_pandas(list(arrays), *args, **more)
            templates.learn(arrays.signature, arrays.manager)  # type: ignore[arg-type]
        return arrays.manager

    return [nested_data_to_arrays, arrays_to_mgr]


def _sum(by_pandas: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for pandas' ``nansum`` that sums plain numbers without NaN in numpy."""
    add, quiet = np.add.reduce, np.errstate
    integer, double = np.dtype(np.int64), np.dtype(np.float64)

    def nansum(values: Any, *args: Any, skipna: bool = True, min_count: int = 0, **more: Any) -> Any:
        if type(values) is np.ndarray and values.ndim == 1 and not min_count and not args and not more:
            if values.dtype is integer:
                return add(values)
            if values.dtype is double:
                with quiet(all="ignore"):
                    total = add(values)
                if -np.inf < total < np.inf:
                    return total
        return by_pandas(values, *args, skipna=skipna, min_count=min_count, **more)

    return nansum


def _option(by_pandas: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for pandas' ``_get_option``, fast for the option that each new frame reads."""
    data_manager = frame_blocks.data_manager

    def _get_option(pat: str, silent: bool = False) -> Any:
        return data_manager() if silent and pat == "mode.data_manager" else by_pandas(pat, silent)

    return _get_option


def _as_of_pandas(function: Any) -> Callable[..., Any]:
    """Return a copy of a function whose code seems to be in pandas, so that warnings name the caller's line."""
    place = os.path.join(os.path.dirname(pd.__file__), "core", "frame_templates.py of holdfast")
    code = function.__code__.replace(co_filename=place)
    found = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    found.__kwdefaults__ = function.__kwdefaults__
    return found


class _Exchange:
    """Replaces pandas' functions while any thread is inside the ``with`` block."""

    def __init__(self) -> None:
        making, reducing = frame_blocks.constructing(), frame_blocks.reducing()
        theirs = {name: getattr(making, name) for name in frame_blocks.CONSTRUCTORS}
        templates = Templates()
        #: Module, name, our function and the function that it replaces.
        self._pairs = [
            (making, function.__name__, _as_of_pandas(function), theirs[function.__name__])
            for function in (*_of_dicts(templates, theirs), *_of_rows(templates, theirs))
        ]
        for module, name, ours in ((reducing, "nansum", _sum), (making, frame_blocks.OPTION, _option)):
            own = getattr(module, name)
            self._pairs.append((module, name, _as_of_pandas(ours(own)), own))
        self._pairs.append((frame_blocks, "column_cache", frame_blocks.lazy_columns, frame_blocks.plain_columns))
        self._lock = threading.Lock()
        self._inside = 0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                for module, name, ours, theirs in self._pairs:
                    _put(module, name, ours, theirs)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                for module, name, ours, theirs in self._pairs:
                    _put(module, name, theirs, ours)


def _put(module: Any, name: str, new: Callable[..., Any], old: Callable[..., Any]) -> None:
    if getattr(module, name) is old:  # keep a third party's replacement
        setattr(module, name, new)


def by_templates(steps: Generator[Y, None, R]) -> Generator[Y, None, R]:
    """Run a generator with templates for the frames that it creates; restore pandas at each yield."""
    exchange = _exchange()
    if exchange is None:
        return (yield from steps)
    try:
        while True:
            with exchange:
                try:
                    one = next(steps)
                except StopIteration as end:
                    return end.value
            yield one
    finally:
        steps.close()


def _last_cut() -> pd.DataFrame:
    frame = pd.DataFrame({"key": ["a", "b", "c"], "n": [1, 2, 3], "x": [0.5, 1.5, 2.5]})
    return list(frame_blocks.consecutive(frame, np.array([1, 2])))[-1]


def _exchange() -> _Exchange | None:
    """Return the process's exchange; None if its frames differ from pandas' own."""
    with _COMPARING:
        return _compared()


@cache
def _compared() -> _Exchange | None:
    lacking = frame_blocks.lacking()
    differing = [] if lacking else _differing(exchange := _Exchange())
    if not lacking and not differing:
        return exchange
    why = f"it lacks {', '.join(lacking)}" if lacking else f"samples {differing} differ"
    warnings.warn(
        f"holdfast's frame templates do not support pandas {pd.__version__} ({why}), so new frames take up to ten "
        "times as long; spark.holdfast.pandas.frameTemplates=false turns off the templates and this warning",
        stacklevel=2,
    )
    return None


def _differing(exchange: _Exchange) -> list[int]:
    """Return the indices of the samples whose template frames differ from pandas' frames."""
    found = []
    for at, sample in enumerate(_SAMPLES):
        try:
            with exchange:
                sample()  # creates the template
                ours = frame_blocks.anatomy(sample())
            is_same = ours == frame_blocks.anatomy(sample())
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):  # pandas has changed names or arguments
            is_same = False
        if not is_same:
            found.append(at)
    return found
