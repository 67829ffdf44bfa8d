"""The initial state of a step: a grouped batch frame, checked against the stream's keys."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame, GroupedData

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.plan.grouping_keys import Grouping, resolve_keys
from holdfast.spark_integration.plan.session import name_folding
from holdfast.spark_integration.transport.transport import quoted

_REMEDY = "pass initialState=frame.groupBy(…) with columns of the types that the stream is grouped by"


def initial_rows(given: GroupedData, df: DataFrame, grouping: Grouping) -> tuple[DataFrame, Grouping]:
    """Return the frame of an initial state, and its keys.

    Raises `InvalidArgumentError` if it is no grouped frame, a stream, or grouped by other keys or types than `df`:
    Spark does not compare types, and would find other keys' state.
    """
    if not isinstance(given, type(df.groupBy(quoted(df.columns[0])))):
        raise InvalidArgumentError(
            f"initialState must be a grouped DataFrame of this session: {_REMEDY}", given=type(given).__name__
        )
    frame: DataFrame = given._df  # noqa: SLF001  # Spark's own method reads it, and there is no other way
    if frame.isStreaming:
        raise InvalidArgumentError(
            "initialState must be a batch DataFrame, not a stream: it is read once, in the first micro-batch"
        )
    found = resolve_keys(frame, _columns_of(given, frame))
    # Without what may be null: it does not change the hash.
    ours, theirs = ([g.keys[i].field.dataType.simpleString() for i in g.given] for g in (grouping, found))
    if ours != theirs or grouping.given != found.given:
        raise InvalidArgumentError(
            f"initialState is grouped by different keys than the stream: {_REMEDY}",
            stream=ours,
            initial_state=theirs,
        )
    return frame, found


def _columns_of(given: GroupedData, frame: DataFrame) -> list[str]:
    """Return the names of a frame's grouping columns, taken from a count: Spark does not expose them."""
    counted = given.count()
    names, fold = counted.columns[:-1], name_folding(frame)
    if names and {*map(fold, names)} <= {*map(fold, frame.columns)}:
        by_columns = frame.groupBy(*map(quoted, names)).count()
        if counted.sameSemantics(by_columns) or _is_random_by(given, counted, names):
            return names
    raise InvalidArgumentError(
        f"initialState must be grouped by columns, not by expressions: {_REMEDY}. With "
        "spark.sql.retainGroupColumns=false its columns cannot be known",
        grouped_by=names,
    )


def _is_random_by(given: Any, counted: DataFrame, names: list[str]) -> bool:
    """Tell whether a Spark Connect frame, which differs at each access, is grouped by columns.

    ``rand()`` and ``uuid()`` get a new seed whenever the server analyses a frame, so no two plans of it are the same,
    and what was written in ``groupBy`` decides.
    """
    if not hasattr(given, "_grouping_cols") or counted.sameSemantics(given.count()):
        return False
    written = [str(column) for column in given._grouping_cols]  # noqa: SLF001
    plain = [{f"Column<'{name}'>", f"Column<'{quoted(name)}'>"} for name in names]
    is_by_all = given._group_type == "groupby"  # noqa: SLF001
    return is_by_all and len(written) == len(plain) and all(w in p for w, p in zip(written, plain, strict=True))
