"""The columns of a read, as promised and as delivered to Spark.

::

    batch_id   change_type   user    n      total    shard
    └─ of a change feed ─┘   └key┘   └──values───┘

Spark takes a batch only if its Arrow schema is exactly the one that it has derived from the read's schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import pyarrow as pa
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from holdfast.backends.arrow.values import cast
from holdfast.backends.options import did_you_mean
from holdfast.backends.run import Run, TableSchema
from holdfast.errors import InvalidArgumentError, NotFoundError
from holdfast.spark_integration.lookup.shown import free_name, shown_columns
from holdfast.spark_integration.spark_types import arrow_schema, spark_type

SHARD, BATCH_ID, CHANGE_TYPE = "shard", "batch_id", "change_type"
UPDATE, DELETE = "update", "delete"
# Of one batch to Spark: a column of text must stay below 2 GiB.
_BATCH_ROWS, _BATCH_BYTES = 1_000_000, 256 << 20


@dataclass(frozen=True)
class ShownTable:
    """The requested columns of a table, in order."""

    fields: tuple[StructField, ...]  #: All that there are
    wanted: tuple[str, ...]  #: Their names, in the order in which they are shown
    shard: str  #: What the column of the shard is called
    changes: tuple[str, ...] = ()  #: What the columns of a change feed are called; none for state

    @classmethod
    def of(cls, table: TableSchema, wanted: Sequence[str] = (), *, changes: bool = False) -> Self:
        """Return the columns of a table. Raises `NotFoundError`, `InvalidArgumentError`.

        `wanted`: their names; all if there are none; `changes`: whether it is a change feed.
        """
        shown = shown_columns(table)
        taken = list(shown.names)
        own = []
        for name in ((BATCH_ID, CHANGE_TYPE) if changes else ()) + (SHARD,):
            own.append(free_name(name, taken, "_"))
            taken.append(own[-1])
        fields = [StructField(field.name, spark_type(field.type)) for field in shown]
        first = [StructField(name, kind) for name, kind in zip(own[:-1], (LongType(), StringType()), strict=False)]
        every = (*first, *fields, StructField(own[-1], IntegerType()))
        names = [field.name for field in every]
        unknown = [name for name in wanted if name not in names]
        if unknown:
            raise NotFoundError(
                f"no such column: name some of these{did_you_mean(unknown[0], names)}",
                column=unknown[0],
                columns=", ".join(names),
            )
        return cls(every, tuple(wanted) or tuple(names), own[-1], tuple(own[:-1]))

    @property
    def struct(self) -> StructType:
        """The columns for Spark."""
        by_name = {field.name: field for field in self.fields}
        return StructType([by_name[name] for name in self.wanted])

    @cached_property
    def _arrow(self) -> pa.Schema:
        return arrow_schema(self.struct, "the state")

    def batches(self, run: Run, shard: int, batch_id: int | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a run as Spark wants them. Raises `InvalidArgumentError`.

        `batch_id`: the micro-batch that wrote them; of a change feed.
        """
        names = [field.name for field in self.fields]
        places = [names.index(name) - len(self.changes) for name in self.wanted]
        for chunk in run.chunks(_BATCH_ROWS, _BATCH_BYTES):
            stored = chunk.batch.columns[2:]
            arrays = [
                self._column(stored[place], field.type)
                if 0 <= place < len(stored)
                else self._own(field, chunk, shard, batch_id)
                for place, field in zip(places, self._arrow, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._arrow)

    def _column(self, column: pa.Array, t: pa.DataType) -> pa.Array:
        try:
            return cast(column, t)
        except (ValueError, pa.ArrowException) as exc:
            raise InvalidArgumentError(f"a few rows of the state are too large for Spark: {exc}") from exc

    def _own(self, field: pa.Field, rows: Run, shard: int, batch_id: int | None) -> pa.Array:
        if field.name == self.shard:
            return pa.repeat(pa.scalar(shard, field.type), len(rows))
        if field.name == self.changes[0]:
            return pa.repeat(pa.scalar(batch_id, field.type), len(rows))
        return pa.array(np.array([UPDATE, DELETE], object), field.type).take(pa.array(rows.deleted.view(np.int8)))
