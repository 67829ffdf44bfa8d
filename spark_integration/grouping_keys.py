"""The keys of a ``groupBy``: which columns or expressions, and the columns that carry them to the shards."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql.types import StructField

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.columns import require_key_types
from holdfast.spark_integration.transport import quoted

_KEY_EXPRESSION = "__holdfast_key_"


@dataclass(frozen=True)
class Key:
    """A grouping key: the expression, and the column that carries it."""

    field: StructField
    expression: Column
    column: str

    @property
    def is_expression(self) -> bool:
        """Whether a column of its own carries the key, besides those of the input."""
        return self.column.startswith(_KEY_EXPRESSION)


def resolve_keys(df: DataFrame, keys: Iterable[str | Column]) -> list[Key]:
    """Return the keys that a user gives to ``groupBy``.

    Raises
    ------
    InvalidArgumentError
        An unknown column, a key given twice, or a type that cannot be grouped by.
    """
    resolved = []
    for i, key in enumerate(keys):
        if isinstance(key, str):
            name = _column_named(df, key)
            resolved.append(Key(df.schema[name], quoted(name), name))
        elif isinstance(key, Column):
            field = df.select(key).schema.fields[0]
            resolved.append(Key(field, key, f"{_KEY_EXPRESSION}{i}"))
        else:
            raise InvalidArgumentError(
                "a key must be a column's name or a Column", given=type(key).__name__, position=i
            )
    names = [key.field.name for key in resolved]
    repeated = sorted({n for n in names if names.count(n) > 1})
    if repeated:
        raise InvalidArgumentError("groupBy names a key twice", repeated=repeated)
    require_key_types([key.field for key in resolved])
    return resolved


def _column_named(df: DataFrame, name: str) -> str:
    if name in df.columns:
        return name
    folded = [c for c in df.columns if c.lower() == name.lower()]
    if len(folded) == 1:
        return folded[0]
    near = difflib.get_close_matches(name, df.columns, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InvalidArgumentError(
        f"no column {name!r} to group by: {hint}the columns are {', '.join(df.columns)}; "
        "for a field of a struct give an expression, as F.col('a.b')"
    )
