"""What follows ``groupBy(…)``, with ``agg`` behind it: ``window(…)`` and ``session(…)``."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.operators.aggregates import Aggregate
from holdfast.spark_integration.operators.defining import aggregated, by_session, by_window, checked_mode
from holdfast.spark_integration.plan.grouping_keys import Grouping


@dataclass(frozen=True)
class WindowedStream:
    """A DataFrame grouped by key and by windows of time; see `GroupedStream.window`."""

    df: DataFrame
    grouping: Grouping
    window: Column
    length_us: int
    definition: str

    def agg(
        self,
        *aggregates: Aggregate,
        outputMode: str = "append",
        name: str = "window",
        **named: Aggregate,
    ) -> DataFrame:
        """Aggregate each key's rows of each window, as ``groupBy(…, F.window(…)).agg(…)`` does.

        Parameters
        ----------
        *aggregates : Aggregate
            With Spark's names, such as ``max(delay)``, or those that `Aggregate.alias` has given.
        outputMode : {"append", "update"}
            Show a window once, when the watermark has passed its end; or whenever it changes. The query must be started
            in the same mode.
        name : str
            Name of the operator, which identifies its state for good. Unique in a query.
        **named : Aggregate
            By column.

        Returns
        -------
        pyspark.sql.DataFrame
            The keys, ``window`` with ``start`` and ``end``, and the aggregates, in Spark's types; without a watermark.

        Raises
        ------
        AnalysisException
            As of Spark's own aggregation: no such column, or one of a wrong type.
        InvalidArgumentError
            No aggregate, append mode without a watermark, or a wrong name, mode or setting; nothing has run.
        """
        mode = checked_mode(outputMode)
        found = aggregated(self.df, self.grouping, self.window, aggregates, named)
        return by_window(found, self.length_us, self.definition, mode, name)


@dataclass(frozen=True)
class SessionStream:
    """A DataFrame grouped by key and by sessions; see `GroupedStream.session`."""

    df: DataFrame
    grouping: Grouping
    session: Column

    def agg(self, *aggregates: Aggregate, name: str = "session", **named: Aggregate) -> DataFrame:
        """Aggregate each key's sessions, as ``groupBy(…, F.session_window(…)).agg(…)`` does, in append mode.

        Parameters
        ----------
        *aggregates : Aggregate
            With Spark's names, such as ``max(delay)``, or those that `Aggregate.alias` has given.
        name : str
            Name of the operator, which identifies its state for good. Unique in a query.
        **named : Aggregate
            By column.

        Returns
        -------
        pyspark.sql.DataFrame
            The keys, ``session_window`` with ``start`` and ``end``, and the aggregates, in Spark's types; without a
            watermark. A session is shown once, when the watermark has passed its end.

        Raises
        ------
        AnalysisException
            As of Spark's own aggregation: no such column, or one of a wrong type.
        InvalidArgumentError
            No aggregate, no watermark, or a wrong name or setting; nothing has run.
        """
        return by_session(aggregated(self.df, self.grouping, self.session, aggregates, named), name)


def windowed(
    df: DataFrame,
    grouping: Grouping,
    timeColumn: str | Column,
    windowDuration: str,
    slideDuration: str | None,
    startTime: str | None,
) -> WindowedStream:
    """Group by windows; parameters and errors are those of Spark's `window`."""
    session = df.sparkSession
    window = F.window(timeColumn, windowDuration, slideDuration, startTime)
    length_us = after_1970(session, F.window("t", windowDuration), "end")
    slide = slideDuration or windowDuration
    slide_us = length_us if slideDuration is None else after_1970(session, F.window("t", slideDuration), "end")
    start_us = (
        0 if startTime is None else after_1970(session, F.window("t", slide, slide, startTime), "start") % slide_us
    )
    definition = f"length_us={length_us}, slide_us={slide_us}, start_us={start_us}"
    return WindowedStream(df, grouping, window, length_us, definition)


def by_sessions(df: DataFrame, grouping: Grouping, timeColumn: str | Column, gap: str | Column) -> SessionStream:
    """Group by sessions; parameters are those of Spark's `session_window`, which looks at the gap row by row.

    Raises
    ------
    InvalidArgumentError
        The gap is no duration, or not longer than nothing: Spark would fail in a micro-batch, or drop all rows.
    """
    if isinstance(gap, str):
        end = F.lit("1970-01-01 00:00:00 UTC").cast("timestamp") + F.lit(gap).try_cast("interval")
        [[end_us]] = df.sparkSession.sql("SELECT * FROM VALUES (1) AS one(n)").select(F.unix_micros(end)).collect()
        if end_us is None or end_us <= 0:
            raise InvalidArgumentError(
                "gap must be a duration longer than nothing, such as '5 minutes'", given=repr(gap)
            )
    return SessionStream(df, grouping, F.session_window(timeColumn, gap))


def after_1970(session: SparkSession, window: Column, part: str) -> int:
    """Return the start or the end, in microseconds, of the window that 1970 begins in; Spark runs no job for it.

    Raises
    ------
    AnalysisException, IllegalArgumentException
        As Spark raises them for what is no duration.
    """
    epoch = session.sql("SELECT * FROM VALUES (TIMESTAMP'1970-01-01 00:00:00 UTC') AS epoch(t)")
    found = epoch.select(window.alias("w")).select(F.unix_micros(F.col("w").getField(part)))
    return int(found.collect()[0][0])
