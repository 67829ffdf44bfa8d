"""Defines ``join`` and ``asof_join``.

::

    left  ─▶ keys, time, columns, nulls ─┐
                                         ├─▶ union ─▶ shards ─▶ keys, columns of both
    right ─▶ keys, time, nulls, columns ─┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructField, StructType, TimestampType

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.operators.joins import AT, BEYOND_MS, IS_LEFT, AsofJoin, Join, JoinSide, Sides
from holdfast.spark_integration.plan.arguments import duration_us
from holdfast.spark_integration.plan.definition import BEHIND_ANOTHER, KeyedRows, operator_plan
from holdfast.spark_integration.plan.event_time import time_column_of, without_watermark
from holdfast.spark_integration.plan.grouping_keys import Key, resolve_keys
from holdfast.spark_integration.plan.session import name_folding
from holdfast.spark_integration.processor.state.variable_tables import JOINED_LEFT, JOINED_RIGHT, LATEST_RIGHT
from holdfast.spark_integration.shard.operator import ShardFunction
from holdfast.spark_integration.spark_types import Watermark, arrow_schema, types_of_keys
from holdfast.spark_integration.transport.packed import quoted

How = Literal["inner", "left", "right", "full"]
#: Spark's names of join types, without underscores.
_HOW: dict[str, How] = {
    "inner": "inner",
    "left": "left",
    "leftouter": "left",
    "right": "right",
    "rightouter": "right",
    "full": "full",
    "fullouter": "full",
    "outer": "full",
}


@dataclass(frozen=True)
class _Input:
    df: DataFrame
    keys: list[StructField]
    time: StructField  #: The column with the watermark
    watermark: Watermark

    @property
    def columns(self) -> list[StructField]:
        """All columns but the keys."""
        keys = [key.name for key in self.keys]
        return [field for field in self.df.schema if field.name not in keys]

    @property
    def values(self) -> list[StructField]:
        """All columns but the keys and the time."""
        return [field for field in self.columns if field.name != self.time.name]

    @property
    def own(self) -> list[Column]:
        """The value columns, for rows of this side."""
        return [quoted(field.name) for field in self.values]

    @property
    def nulls(self) -> list[Column]:
        """Nulls in place of the value columns, for rows of the other side."""
        return [F.lit(None).cast(field.dataType).alias(field.name) for field in self.values]

    def side(self, table: str, key_types: pa.Schema, **rules: bool) -> JoinSide:
        """Return this side for the shards; `rules` are further fields of `JoinSide`."""
        time, *values = arrow_schema(StructType([self.time, *self.values]), "the input of a join")
        return JoinSide(table, key_types, time, pa.schema(values), **rules)

    def carried(self, left: list[Column], right: list[Column], watermark: Watermark, *, is_left: bool) -> DataFrame:
        """Return this side's rows for the shuffle: the columns of both sides, with nulls for the other side's."""
        at = quoted(self.time.name).alias(AT, metadata={**watermark.metadata})
        keys = [quoted(key.name) for key in self.keys]
        return self.df.select(*keys, F.lit(is_left).alias(IS_LEFT), at, *left, *right)


def joined(left: DataFrame, right: DataFrame, on: str | Sequence[str], within: str, how: str, name: str) -> DataFrame:
    """Define ``join``. Raises `AnalysisException` or `PySparkTypeError` for a bad key, else `InvalidArgumentError`."""
    kind = _HOW.get(str(how).lower().replace("_", ""))
    if kind is None:
        raise InvalidArgumentError("how must be 'inner', 'left', 'right' or 'full'", how=repr(how))
    one, other = _inputs(left, right, on)
    _require_joinable(one, other, other.columns)
    within_us = duration_us(left, within, "within")
    watermark = _watermark(one, other)
    output = _output(one, other.columns, other.keys if kind == "right" else one.keys, kind)
    later = watermark.later(-(-within_us // 1000) + BEYOND_MS)  # a row up to `within` older still finds its match
    output = _marked(output, [one.time.name, other.time.name], later)
    key_types = types_of_keys(one.keys)
    sides = Sides(
        key_types,
        one.side(JOINED_LEFT, key_types, records_matches=kind in ("left", "full")),
        other.side(JOINED_RIGHT, key_types, records_matches=kind in ("right", "full")),
        arrow_schema(output, "the output", keep_not_null=True),
    )
    rows = _rows(one, other, watermark, Join(sides, within_us))
    return operator_plan(rows, output, "append", name, is_timed=True)


def asof_joined(
    left: DataFrame, right: DataFrame, on: str | Sequence[str], by: str, tolerance: str, name: str
) -> DataFrame:
    """Define ``asof_join``. Raises the errors of `joined`, also if `by` is not both sides' watermark column."""
    one, other = _inputs(left, right, on)
    if not one.time.name == other.time.name == by:
        raise InvalidArgumentError(
            "by must name the watermark column of both sides: rename one side's column, as in "
            f"holdfast.stream(df.withColumnRenamed({other.time.name!r}, {by!r}))",
            by=repr(by),
            left=one.time.name,
            right=other.time.name,
        )
    _require_joinable(one, other, other.values)
    tolerance_us = duration_us(left, tolerance, "tolerance")
    watermark = _watermark(one, other)
    output = _marked(_output(one, other.values, one.keys, "left"), [by], watermark)
    key_types = types_of_keys(one.keys)
    sides = Sides(
        key_types,
        one.side(JOINED_LEFT, key_types),
        other.side(LATEST_RIGHT, key_types, is_numbered=False),
        arrow_schema(output, "the output", keep_not_null=True),
    )
    rows = _rows(one, other, watermark, AsofJoin(sides, tolerance_us))
    return operator_plan(rows, output, "append", name, is_timed=True)


def _rows(left: _Input, right: _Input, watermark: Watermark, function: ShardFunction) -> KeyedRows:
    """Return the union of both sides' rows, with a common watermark."""
    rows = left.carried(left.own, right.nulls, watermark, is_left=True)
    df = rows.unionByName(right.carried(left.nulls, right.own, watermark, is_left=False))
    return KeyedRows(df, [Key(df.schema[key.name], quoted(key.name), key.name) for key in left.keys], function)


def _inputs(left: DataFrame, right: DataFrame, on: str | Sequence[str]) -> tuple[_Input, _Input]:
    names = [on] if isinstance(on, str) else list(on)
    return _input(left, names, "left"), _input(right, names, "right")


def _input(df: DataFrame, names: list[str], which: str) -> _Input:
    time = time_column_of(df) if df.isStreaming else None
    if time is None or not isinstance(time.field.dataType, TimestampType):
        raise InvalidArgumentError(
            f"the {which} side of a join must be a stream with a watermark on its timestamp column: "
            "df.withWatermark('at', '10 minutes'). Join other DataFrames with Spark's own df.join"
            f"{BEHIND_ANOTHER}",
            watermark=None if time is None else f"{time.field.name} {time.field.dataType.simpleString()}",
        )
    if any(not isinstance(name, str) for name in names):
        raise InvalidArgumentError("on takes names of columns that both sides have", on=names)
    keys = [key.field for key in resolve_keys(df, names).keys]
    if time.field.name in [key.name for key in keys]:
        raise InvalidArgumentError(
            "within compares the time column of a join, so it cannot be a key as well: leave it out of on",
            on=names,
            time=time.field.name,
        )
    return _Input(df, keys, time.field, time.watermark)


def _require_joinable(left: _Input, right: _Input, shown: list[StructField]) -> None:
    """Check that the keys match and that no output column is repeated."""
    for one, other in zip(left.keys, right.keys, strict=True):
        types = one.dataType.simpleString(), other.dataType.simpleString()
        if (one.name, types[0]) != (other.name, types[1]):
            raise InvalidArgumentError(
                "a key must have the same name and type on both sides: rename or cast one of them",
                left=f"{one.name} {types[0]}",
                right=f"{other.name} {types[1]}",
            )
    fold = name_folding(left.df)
    names = [fold(field.name) for field in (*left.keys, *left.columns, *shown)]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InvalidArgumentError(
            "the output would have two columns with the same name: drop or rename one, as in "
            "holdfast.stream(df.withColumnRenamed('at', 'paid_at'))",
            repeated=repeated,
        )


def _watermark(left: _Input, right: _Input) -> Watermark:
    """Return the common watermark of both sides."""
    held_back_ms = max(left.watermark.held_back_ms, right.watermark.held_back_ms)
    return Watermark(left.watermark.delay_ms, held_back_ms)


def _output(left: _Input, right: list[StructField], keys: list[StructField], kind: How) -> StructType:
    """Return the columns of Spark's join: the keys, then the left side's columns, then the right side's."""
    columns = [
        *((key, kind == "full") for key in keys),
        *((field, kind in ("right", "full")) for field in left.columns),
        *((field, kind in ("left", "full")) for field in right),
    ]
    return StructType([StructField(f.name, f.dataType, f.nullable or alone, f.metadata) for f, alone in columns])


def _marked(output: StructType, times: list[str], watermark: Watermark) -> StructType:
    """Return the output with watermark marks on the `times` columns only."""
    marked = without_watermark(output)
    for time in times:
        marked[time].metadata = {**(marked[time].metadata or {}), **watermark.metadata}
    return marked


@dataclass(frozen=True)
class JoinableStream:
    """A DataFrame that can be joined; see `holdfast.stream`."""

    df: DataFrame

    def join(
        self, other: JoinableStream, on: str | Sequence[str], within: str, how: str = "inner", name: str = "join"
    ) -> DataFrame:
        """Join with another stream on equal keys and close times, like ``DataFrame.join`` with a time condition.

        Parameters
        ----------
        other : JoinableStream
            The right side. Both sides need a watermark, and only keys may share a name.
        on : str or list of str
            The key columns, which both sides have. As in SQL, null equals nothing.
        within : str
            The largest time difference between two rows, such as ``"10 minutes"``, in the columns that have the
            watermarks.
        how : {"inner", "left", "right", "full"}
            Which unmatched rows appear, filled with nulls: none, those of one side, or all. They appear after the
            watermark passes their time by `within`. Spark's other names for these joins work too.
        name : str
            The operator's name, unique in the query; identifies its state permanently.

        Returns
        -------
        pyspark.sql.DataFrame
            The keys, the left side's columns and the right side's. Start the query in append mode.

        Raises
        ------
        AnalysisException, PySparkTypeError
            No such key, or an invalid one.
        InvalidArgumentError
            A side is not a stream with a watermark, key types differ, both sides have a column with the same name,
            `within` is not a duration, or a setting is invalid.

        Examples
        --------
        >>> orders, payments = holdfast.stream(orders_df), holdfast.stream(payments_df)
        >>> orders.join(payments, on="order", within="10 minutes", how="left")
        """
        return joined(self.df, _stream_of(other), on, within, how, name)

    def asof_join(
        self, other: JoinableStream, on: str | Sequence[str], by: str, tolerance: str, name: str = "asof_join"
    ) -> DataFrame:
        """Join each row with the other stream's latest row at or before its time, as ``pandas.merge_asof`` does.

        Parameters
        ----------
        other : JoinableStream
            The right side. Both sides need a watermark, and only columns of `on` and `by` may share a name.
        on : str or list of str
            The key columns, which both sides have. As in SQL, null equals nothing.
        by : str
            The time column, which has the watermark on both sides.
        tolerance : str
            The greatest age of the right row at the time of the left row, such as ``"1 hour"``.
        name : str
            The operator's name, unique in the query; identifies its state permanently.

        Returns
        -------
        pyspark.sql.DataFrame
            The keys, the left side's columns and the right side's, null without a match. Start the query in append
            mode: a row appears once the watermark reaches its time.

        Raises
        ------
        AnalysisException, PySparkTypeError
            No such key, or an invalid one.
        InvalidArgumentError
            As for `join`; also if `by` is not the column of both watermarks.

        Examples
        --------
        >>> payments, rates = holdfast.stream(payments_df), holdfast.stream(rates_df)
        >>> payments.asof_join(rates, on="currency", by="at", tolerance="1 hour")
        """
        return asof_joined(self.df, _stream_of(other), on, by, tolerance, name)


def _stream_of(other: object) -> DataFrame:
    if not isinstance(other, JoinableStream):
        raise InvalidArgumentError(
            "a join takes another stream: join(holdfast.stream(other), on=…)", given=type(other).__name__
        )
    return other.df
