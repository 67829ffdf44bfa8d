"""A column of a pandas frame that is one Arrow array, which Spark's worker passes on unchanged.

The worker concatenates the frames of a task, padding with rows of null, and asks the column for its
Arrow array. pandas' own Arrow columns fail there: concatenated, they have several chunks, which Spark cannot take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa
from pandas.api.extensions import ExtensionArray, ExtensionDtype


class ArrowColumnType(ExtensionDtype):
    """The type of an `ArrowColumn`: anything concatenated with one becomes one, such as padding rows."""

    name = "arrow column"
    type = object
    # Its nulls are Arrow's own business: pandas would take a column of nothing else for one without a type.
    _can_hold_na = False
    _metadata = ("arrow",)

    def __init__(self, arrow: pa.DataType) -> None:
        self.arrow = arrow

    @classmethod
    def construct_array_type(cls) -> Any:
        return ArrowColumn

    def _get_common_dtype(self, dtypes: Sequence[Any]) -> Self:
        return self


class ArrowColumn(ExtensionArray):
    """Values in one Arrow array, with what pandas needs to concatenate frames."""

    def __init__(self, arrow: pa.Array) -> None:
        self.arrow = arrow

    @classmethod
    def _from_sequence(cls, scalars: Sequence[Any], *, dtype: ArrowColumnType, copy: bool = False) -> Self:
        return cls(pa.array(scalars, dtype.arrow, from_pandas=True))

    @classmethod
    def _concat_same_type(cls, to_concat: Sequence[ArrowColumn]) -> Self:
        return cls(pa.concat_arrays([column.arrow for column in to_concat]))

    @property
    def dtype(self) -> ArrowColumnType:
        return ArrowColumnType(self.arrow.type)

    def __len__(self) -> int:
        return len(self.arrow)

    def __arrow_array__(self, type: pa.DataType | None = None) -> pa.Array:  # noqa: A002  pyarrow's name
        return self.arrow

    def __getitem__(self, item: Any) -> Any:
        return self.arrow[item]

    def map(self, mapper: object, na_action: object = None) -> Self:
        return self  # Spark's worker converts values of pandas; these need no conversion

    def copy(self) -> Self:
        return self  # nothing changes it

    def take(self, indices: Any, *, allow_fill: bool = False, fill_value: Any = None) -> Self:
        rows = np.asarray(indices, np.int64)
        return type(self)(self.arrow.take(pa.array(rows, mask=rows < 0)))
