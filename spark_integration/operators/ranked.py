"""Turns ``top`` and ``latest`` into a definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import AtomicType, IntegerType, NullType, StringType, StructField, StructType

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.operators.deduplicating import duration_us
from holdfast.spark_integration.operators.defining import checked_mode
from holdfast.spark_integration.operators.ends import UNTIL, Ttl
from holdfast.spark_integration.operators.top import CHANGE_TYPE, PLACE, Latest, Top
from holdfast.spark_integration.plan.definition import KeyedRows
from holdfast.spark_integration.plan.event_time import event_time_of
from holdfast.spark_integration.plan.grouping_keys import Grouping
from holdfast.spark_integration.plan.operator_plan import operator_plan
from holdfast.spark_integration.plan.session import name_folding
from holdfast.spark_integration.shard.operator import ShardFunction
from holdfast.spark_integration.spark_types import arrow_schema, types_of_keys
from holdfast.spark_integration.transport.transport import quoted
from holdfast.spark_integration.vectorised.ranking import Ranking

#: What Spark shows with a place, or with a change.
_SHOWN = {"list": StructField(PLACE, IntegerType(), False), "changes": StructField(CHANGE_TYPE, StringType(), False)}
_MOST_PLACES = 1_000_000


@dataclass(frozen=True)
class _Ranked:
    """The input of a ranking: rows with keys and other columns."""

    df: DataFrame
    grouping: Grouping
    others: StructType  #: The columns that are no keys
    ttl: Ttl | None

    @classmethod
    def of(cls, df: DataFrame, grouping: Grouping, ttl: str | None) -> _Ranked:
        keys = {key.field.name for key in grouping.keys}
        others = StructType([StructField(f.name, f.dataType) for f in df.schema if f.name not in keys])
        if ttl is None or not df.isStreaming:
            return cls(df, grouping, others, None)
        event_time = event_time_of(df)
        name = None if event_time is None else event_time.name
        return cls(df, grouping, others, Ttl(duration_us(df, ttl), name))

    @property
    def key_types(self) -> pa.Schema:
        return types_of_keys([key.field for key in self.grouping.keys])

    @property
    def value_types(self) -> pa.Schema:
        return arrow_schema(self.others, "the input")

    def output(self, *own: StructField) -> StructType:
        """Return the keys, columns of the operator's own, and the other columns of the input."""
        keys = [StructField(key.field.name, key.field.dataType) for key in self.grouping.keys]
        return StructType([*keys, *own, *self.others])

    def require_free(self, *names: str) -> None:
        taken = [*self.others.names, *(key.field.name for key in self.grouping.keys)]
        for name in [*names, *([UNTIL.name] if self.ttl else [])]:
            if name in taken:
                raise InvalidArgumentError(
                    "the input has a column with the name of one of the operator's own: rename it, as in "
                    "df.withColumnRenamed('a', 'b')",
                    column=name,
                )

    def ranking(self, by: object, ascending: object) -> Ranking:
        given = [by] if isinstance(by, str) else by
        if not isinstance(given, Sequence) or not given or not all(isinstance(name, str) for name in given):
            raise InvalidArgumentError("by is a column's name or a list of names", given=repr(by))
        directions = [ascending] * len(given) if isinstance(ascending, bool) else ascending
        if not isinstance(directions, Sequence) or [type(one) for one in directions] != [bool] * len(given):
            raise InvalidArgumentError(
                "ascending is True or False, or one for each column of by", given=repr(ascending)
            )
        return Ranking(tuple(map(self._ranked_by, given)), tuple(directions))

    def _ranked_by(self, name: str) -> str:
        """Return the input's name of a column to rank by."""
        _ = self.df.select(quoted(name)).schema  # refuses what is no column
        fold = name_folding(self.df)
        found = [f for f in self.others if f.name == name] or [f for f in self.others if fold(f.name) == fold(name)]
        if not found:
            raise InvalidArgumentError("by is a key, in which all rows of a key are equal: name another", column=name)
        t = found[0].dataType
        is_plain = isinstance(t, AtomicType) and not isinstance(t, NullType)
        if not is_plain or (isinstance(t, StringType) and t != StringType()):
            raise InvalidArgumentError(
                "rows are ranked by numbers, text, bytes, booleans, dates and times: compute one of these first, as in "
                "df.withColumn('rank', …)",
                column=name,
                type=t.simpleString(),
            )
        return found[0].name

    @property
    def is_timed(self) -> bool:
        """Whether keys are forgotten by the watermark, so that late rows are dropped."""
        return self.ttl is not None and self.ttl.event_time is not None

    def rows(self, function: ShardFunction) -> KeyedRows:
        return KeyedRows(self.df, self.grouping.keys, function)


def top_rows(
    df: DataFrame,
    grouping: Grouping,
    places: object,
    by: str | Sequence[str],
    ascending: bool | Sequence[bool],
    emit: object,
    ttl: str | None,
    outputMode: object,
    name: str,
) -> DataFrame:
    """Define ``groupBy(…).top(…)``.

    Raises `AnalysisException` if there is no such column. Raises `InvalidArgumentError` if an argument or a setting is
    wrong, or a column has a type that cannot be kept or ranked.
    """
    if type(places) is not int or not 0 < places <= _MOST_PLACES:
        raise InvalidArgumentError(f"top takes a number of rows from 1 to {_MOST_PLACES}", given=repr(places))
    if emit not in ("list", "changes"):
        raise InvalidArgumentError("emit is 'list' or 'changes'", given=repr(emit))
    ranked = _Ranked.of(df, grouping, ttl)
    ranked.require_free(PLACE, CHANGE_TYPE)
    output = ranked.output(_SHOWN[emit])
    types = arrow_schema(output, "the output", keep_not_null=True)
    ranking = ranked.ranking(by, ascending)
    function = Top(ranked.key_types, ranked.value_types, types, ranking, places, emit, ranked.ttl)
    return operator_plan(ranked.rows(function), output, checked_mode(outputMode), name, is_timed=ranked.is_timed)


def latest_rows(
    df: DataFrame, grouping: Grouping, by: str | Sequence[str], ttl: str | None, outputMode: object, name: str
) -> DataFrame:
    """Define ``groupBy(…).latest(…)``; raises as `top_rows`."""
    ranked = _Ranked.of(df, grouping, ttl)
    ranked.require_free()
    output = ranked.output()
    ranking = ranked.ranking(by, ascending=False)
    types = arrow_schema(output, "the output", keep_not_null=True)
    function = Latest(ranked.key_types, ranked.value_types, types, ranking, ranked.ttl)
    return operator_plan(ranked.rows(function), output, checked_mode(outputMode), name, is_timed=ranked.is_timed)
