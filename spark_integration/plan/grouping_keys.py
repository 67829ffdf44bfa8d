"""Resolves the keys of a ``groupBy``, the columns that carry them to the shards, and the keys of initial state.

Spark's analyser resolves names, ordinals and expressions, and rejects invalid keys with its own errors. holdfast
accepts two more forms of keys: the bare name of a column, whatever characters it contains, and an expression.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, GroupedData
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructField

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.plan.session import name_folding
from holdfast.spark_integration.spark_types import require_key_types
from holdfast.spark_integration.transport.packed import quoted

_KEY_EXPRESSION = "__holdfast_key_"
_REMEDY = "pass initialState=frame.groupBy(…) with columns of the same types as the stream's keys"


@dataclass(frozen=True)
class Key:
    """A grouping key: its expression and the column that carries its value."""

    field: StructField
    expression: Column
    column: str

    @property
    def is_expression(self) -> bool:
        """Whether an additional column carries the key."""
        return self.column.startswith(_KEY_EXPRESSION)


@dataclass(frozen=True)
class Grouping:
    """The keys by which rows are grouped."""

    keys: list[Key]  #: Distinct keys
    given: list[int]  #: Index in `keys` of each key that the user passed; may repeat


def resolve_keys(df: DataFrame, keys: Sequence[object]) -> Grouping:
    """Resolve the keys passed to ``groupBy``: names, ordinals or columns, or a single sequence of them.

    Raises Spark's errors; `InvalidArgumentError` for no key, a key of several columns, a repeated name or a wrong type.
    """
    if len(keys) == 1 and isinstance(keys[0], Sequence) and not isinstance(keys[0], str):
        keys = keys[0]
    if not keys:
        raise InvalidArgumentError(
            "groupBy needs at least one key column; stream(df).window(…).agg(…) aggregates all rows"
        )
    names, distinct = df.columns, list(dict.fromkeys(df.columns))
    by_name = [quoted(key) if isinstance(key, str) and key in distinct else key for key in keys]
    df.groupBy(by_name)  # type: ignore[arg-type]  # rejects invalid keys
    columns = [_as_column(names, key) for key in by_name]
    fields = df.select(*map(quoted, distinct), *columns).schema.fields[len(distinct) :]
    if len(fields) != len(columns):
        raise InvalidArgumentError("a key must be one column: pass each column instead of '*'")
    found: dict[str, Key] = {}
    given = []
    for i, (column, field) in enumerate(zip(columns, fields, strict=True)):
        name = _input_column(df, distinct, column, field.name)
        key = Key(field, column, f"{_KEY_EXPRESSION}{i}") if name is None else Key(df.schema[name], column, name)
        found.setdefault(key.column, key)
        given.append(list(found).index(key.column))
    resolved = list(found.values())
    taken = [key.field.name for key in resolved]
    repeated = sorted({name for name in taken if taken.count(name) > 1})
    if repeated:
        raise InvalidArgumentError(
            "two different keys have the same name: rename a key, as in F.col('a.b').alias('b2')", repeated=repeated
        )
    require_key_types([key.field for key in resolved])
    return Grouping(resolved, given)


def _as_column(names: list[str], key: object) -> Column:
    if isinstance(key, int):
        return quoted(names[key - 1])
    return F.col(key) if isinstance(key, str) else key  # type: ignore[return-value]


def _input_column(df: DataFrame, names: list[str], key: Column, name: str) -> str | None:
    """Return the name of the input column that a key refers to; None for other expressions."""
    fold = name_folding(df)
    spelt = [n for n in names if n == name] or [n for n in names if fold(n) == fold(name)]
    if not spelt:
        return None
    try:
        # A name that occurs twice is ambiguous, unless both are the same column.
        _ = df.select(*map(quoted, spelt), key).select(quoted(name)).schema
    except AnalysisException as exc:
        if exc.getCondition() != "AMBIGUOUS_REFERENCE":
            raise
        return None
    return spelt[0]


def initial_rows(given: GroupedData, df: DataFrame, grouping: Grouping) -> tuple[DataFrame, Grouping]:
    """Return the frame and keys of an initial state. Raises `InvalidArgumentError`."""
    if not isinstance(given, type(df.groupBy(quoted(df.columns[0])))):
        raise InvalidArgumentError(
            f"initialState must be a grouped DataFrame of this session: {_REMEDY}", given=type(given).__name__
        )
    frame: DataFrame = given._df  # noqa: SLF001  # as Spark's own method does; there is no public access
    if frame.isStreaming:
        raise InvalidArgumentError(
            "initialState must be a batch DataFrame, not a stream: it is read once, in the first micro-batch"
        )
    found = resolve_keys(frame, _columns_of(given, frame))
    # Ignore nullability, which does not change the hash.
    ours, theirs = ([g.keys[i].field.dataType.simpleString() for i in g.given] for g in (grouping, found))
    if ours != theirs or grouping.given != found.given:
        raise InvalidArgumentError(
            f"initialState is grouped by different keys than the stream: {_REMEDY}", stream=ours, initial_state=theirs
        )
    return frame, found


def _columns_of(given: GroupedData, frame: DataFrame) -> list[str]:
    """Return the names of a frame's grouping columns, from a count, because Spark does not expose them."""
    counted = given.count()
    names, fold = counted.columns[:-1], name_folding(frame)
    if names and {*map(fold, names)} <= {*map(fold, frame.columns)}:
        by_columns = frame.groupBy(*map(quoted, names)).count()
        if counted.sameSemantics(by_columns) or _is_random_by(given, counted, names):
            return names
    raise InvalidArgumentError(
        f"initialState must be grouped by columns, not by expressions: {_REMEDY}. With "
        "spark.sql.retainGroupColumns=false, the columns are unknown",
        grouped_by=names,
    )


def _is_random_by(given: Any, counted: DataFrame, names: list[str]) -> bool:
    """Return whether a Spark Connect frame whose plan differs at each access is grouped by columns.

    Each analysis gives ``rand()`` a new seed, so no two plans are equal; only ``groupBy``'s arguments can be compared.
    """
    if not hasattr(given, "_grouping_cols") or counted.sameSemantics(given.count()):
        return False
    written = [str(column) for column in given._grouping_cols]  # noqa: SLF001
    plain = [{f"Column<'{name}'>", f"Column<'{quoted(name)}'>"} for name in names]
    is_by_all = given._group_type == "groupby"  # noqa: SLF001
    return is_by_all and len(written) == len(plain) and all(w in p for w, p in zip(written, plain, strict=True))
