"""The shards and hashes that filters restrict rows to.

Only `DataSourceReader` of Spark 4.1 and later is handed filters, and only where the session allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import product
from math import prod
from operator import eq, ge, gt, le, lt
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from holdfast.spark_integration.lookup.spark_hash import hash_of_key
from holdfast.spark_integration.savepoints.restoring_shards import HashRange
from holdfast.spark_integration.state_source.table import Part

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

#: So many keys are looked up by their hashes; for more, all is read.
_KEYS_MAX = 1000
#: Spark rounds the decimals of filters to so many, as Python does unless it is told otherwise.
_DIGITS_MAX = 28


class ShardFilters:
    """Filters on the shard alone: they are exact, so Spark need not repeat them.

    Parameters
    ----------
    column : str
        What the column of the shard is called.
    """

    def __init__(self, column: str) -> None:
        self._column = column
        self._tests: list[Callable[[int], bool]] = []

    def take(self, filters: Iterable[Filter]) -> Iterator[Filter]:
        """Take the filters on the shard, and yield the others."""
        for one in filters:
            test = _shard_test(one) if getattr(one, "attribute", None) == (self._column,) else None
            if test is None:
                yield one
            else:
                self._tests.append(test)

    def keeps(self, shard: int) -> bool:
        """Tell whether rows of a shard may pass."""
        return all(test(shard) for test in self._tests)


def _shard_test(one: Filter) -> Callable[[int], bool] | None:
    from pyspark.sql import datasource as spark

    if isinstance(one, spark.IsNotNull):
        return lambda _: True
    value = getattr(one, "value", None)
    if isinstance(one, spark.In) and isinstance(value, Sequence):
        allowed = {number for number in value if _is_number(number)}
        return lambda shard: shard in allowed
    comparisons: dict[type, Callable[[Any, Any], bool]] = {
        spark.EqualTo: eq,
        spark.EqualNullSafe: eq,
        spark.GreaterThan: gt,
        spark.GreaterThanOrEqual: ge,
        spark.LessThan: lt,
        spark.LessThanOrEqual: le,
    }
    compare = comparisons.get(type(one))
    if compare is None or not _is_number(value):
        return None
    return lambda shard: compare(shard, value)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def wanted_hashes(filters: Iterable[Filter], key: pa.Schema) -> frozenset[int] | None:
    """Return the hashes of the keys that filters allow; None unless they name each key column.

    Parameters
    ----------
    filters : iterable of Filter
        All hold.
    key : pyarrow.Schema
        The columns that hashes are of, in storage types.
    """
    if any(pa.types.is_nested(field.type) for field in key):
        return None  # Spark decides what is equal there
    named: dict[str, list[pa.Scalar]] = {}
    for one in map(_without_not, filters):
        name, *further = getattr(one, "attribute", ("",))
        if name in key.names and not further and name not in named:
            values = _values(one, key.field(name).type)
            if values is not None:
                named[name] = values
    if not len(key) or named.keys() != set(key.names) or prod(map(len, named.values())) > _KEYS_MAX:
        return None
    hashes = {hash_of_key(one) for one in product(*(named[name] for name in key.names))}
    return None if None in hashes else frozenset(found for found in hashes if found is not None)


def _without_not(one: Filter) -> Filter:
    """Return Spark's ``not flag = true`` as the ``flag = false`` that it comes from."""
    from pyspark.sql import datasource as spark

    if isinstance(one, spark.Not) and isinstance(one.child, spark.EqualTo) and isinstance(one.child.value, bool):
        return spark.EqualTo(one.child.attribute, not one.child.value)
    return one


def _values(one: Filter, t: pa.DataType) -> list[pa.Scalar] | None:
    """Return the values that a filter allows a column; None if it does not list them."""
    from pyspark.sql import datasource as spark

    if isinstance(one, spark.IsNull):
        given: Sequence[Any] = [None]
    elif isinstance(one, (spark.EqualTo, spark.EqualNullSafe)):
        given = [one.value]
    elif isinstance(one, spark.In) and isinstance(one.value, Sequence):
        given = one.value
    else:
        return None
    if any(isinstance(value, Decimal) and len(value.as_tuple().digits) >= _DIGITS_MAX for value in given):
        return None  # it may stand for another one, whose hash nobody knows
    try:
        return [pa.scalar(value, t) for value in given]
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return None  # a value that the column cannot have, or that Arrow has another idea of: Spark decides


def narrowed(parts: Iterable[Part], keeps: Callable[[int], bool], hashes: frozenset[int] | None) -> list[Part]:
    """Return the parts that may hold matching rows, each with the hashes to read."""
    kept = [part for part in parts if keeps(part.shard)]
    if hashes is None:
        return kept
    found = (
        (part, frozenset(h for h in hashes & (part.wanted or hashes) if part.hashes.overlaps(HashRange(h, h))))
        for part in kept
    )
    return [replace(part, wanted=wanted) for part, wanted in found if wanted]
