"""Reductions over each key's rows, whatever keys, columns and chunks chance makes, against loops of plain Python."""

from __future__ import annotations

import datetime as dt
import itertools
import math
import random
from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast.backends.run import TableSchema
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.vectorised.batch import group_rows
from holdfast.spark_integration.vectorised.groups import Groups
from tests.tiers import repetitions

Draw = Callable[[random.Random], Any]
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_FLOATS = [0.0, -0.0, 0.5, -2.5, 2.0**40, math.inf, -math.inf, math.nan]


def _one_of(*values: Any) -> Draw:
    return lambda chance: chance.choice(values)


# Sums of these floats are exact in any order, but for those that are infinite or no number.
VALUES: dict[pa.DataType, Draw] = {
    pa.int8(): lambda chance: chance.randint(-128, 127),
    pa.uint64(): lambda chance: chance.choice([0, 1, 2**62, 2**63]),
    pa.int64(): lambda chance: chance.choice([chance.randint(-3, 3), -(2**63), 2**63 - 1, 2**62]),
    pa.float32(): _one_of(*_FLOATS),
    pa.float64(): _one_of(*_FLOATS),
    pa.decimal128(5, 2): lambda chance: Decimal(chance.randint(-99999, 99999)).scaleb(-2),
    pa.decimal128(38, 0): lambda chance: Decimal(chance.choice([1, -1, 5 * 10**37, -(10**37)])),
    pa.bool_(): _one_of(True, False),
    pa.date32(): lambda chance: dt.date.fromordinal(chance.randint(1, 3_000_000)),
    pa.timestamp("us", "UTC"): lambda chance: _EPOCH + dt.timedelta(days=chance.randint(-9999, 9999)),
    pa.timestamp("us"): lambda chance: (_EPOCH + dt.timedelta(seconds=chance.randint(-99, 99))).replace(tzinfo=None),
    pa.duration("us"): lambda chance: dt.timedelta(seconds=chance.randint(-99, 99)),
    pa.string(): _one_of("", "a", "ab", "ä", "\U0001f600", "\uffff"),
    pa.binary(): _one_of(b"", b"\0", b"a", b"\xff"),
}
KEYS: dict[pa.DataType, Draw] = {
    pa.string(): _one_of(None, "", "a", "b"),
    pa.int64(): _one_of(None, 0, 1, -1),
    pa.float64(): _one_of(None, 0.0, -0.0, 1.0, math.nan),
    pa.date32(): _one_of(None, dt.date.min, dt.date.max),
    pa.struct([("a", pa.int32()), ("b", pa.string())]): _one_of(None, {"a": 1, "b": None}, {"a": None, "b": "x"}),
    pa.list_(pa.float64()): _one_of(None, [], [None], [0.0], [-0.0], [math.nan, 1.0]),
}
NUMBERS = [t for t in VALUES if pa.types.is_integer(t) or pa.types.is_floating(t) or pa.types.is_decimal(t)]


class Rows:
    """Rows that chance made: as Arrow has them, in chunks, and as lists of Python."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.size = chance.choice([0, 1, 2, 10, 100])
        types = chance.choices(list(KEYS), k=chance.randint(1, 3))
        made = [[KEYS[t](chance) for _ in range(self.size)] for t in types]
        self.keys = [_normal(key) for key in zip(*made, strict=True)]
        self.values = {t: [None if chance.random() < 0.2 else VALUES[t](chance) for _ in made[0]] for t in VALUES}
        self._of_hash = {key: chance.randrange(4) for key in self.keys}
        columns = {f"k{i}": self.chunked(v, t) for i, (v, t) in enumerate(zip(made, types, strict=True))}
        columns |= {str(t): self.chunked(v, t) for t, v in self.values.items()}
        self.table = pa.table(columns)
        self.key_types = pa.schema([(f"k{i}", t) for i, t in enumerate(types)])

    def chunked(self, values: list[Any], data_type: pa.DataType) -> pa.ChunkedArray:
        """Return a column in one to three chunks, some of them slices of longer ones."""
        cuts = sorted(self.chance.choices(range(self.size + 1), k=self.chance.randrange(3)))
        bounds = [0, *cuts, self.size]
        array = pa.array(values, data_type)
        return pa.chunked_array([array[a:b] for a, b in itertools.pairwise(bounds)], data_type)

    def grouped(self) -> tuple[Groups, list[Any]]:
        hashes = np.array([self._of_hash[key] for key in self.keys], np.uint64)
        schema = TableSchema.of("state", self.key_types, pa.schema([("n", pa.int64())]))
        columns = schema.conform(self.table.select(self.key_types.names), "key")
        _, shown, groups = group_rows(self.table, columns, hashes, self.key_types)
        return groups, [_normal(key) for key in zip(*(c.to_pylist() for c in shown.columns), strict=True)]

    def of_key(self, values: list[Any], key: Any) -> list[Any]:
        return [value for value, of in zip(values, self.keys, strict=True) if of == key]


def _normal(key: Any) -> str:
    """Return a text that keys share which Spark has for one: 0.0 is -0.0, and NaN is itself."""
    return repr(key).replace("-0.0", "0.0")


def _present(values: list[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def _rank(value: Any) -> tuple[bool, Any]:
    is_nan = isinstance(value, float) and math.isnan(value)
    return is_nan, 0 if is_nan else value


def _sum(values: list[Any]) -> Any:
    with localcontext(prec=100):
        return sum(_present(values)) if _present(values) else None


def _extreme(pick: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    return lambda values: pick(_present(values), key=_rank, default=None)


def _is_same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, float) and isinstance(found, float):
        return found == wanted or (math.isnan(found) and math.isnan(wanted))
    return type(found) is type(wanted) and bool(found == wanted)


def _is_mean(found: float | None, values: list[Any]) -> bool:
    """Tell whether it is the mean, up to what doubles lose when large values cancel each other out."""
    present = [float(value) for value in _present(values)]
    if not present or not all(map(math.isfinite, present)):
        return _is_same(found, sum(present) / len(present) if present else None)
    return found is not None and abs(found - math.fsum(present) / len(present)) <= 1e-12 * max(map(abs, present))


def _fits(total: Any, data_type: pa.DataType) -> bool:
    if total is None or pa.types.is_floating(data_type):
        return True
    if pa.types.is_integer(data_type):
        return -(2**63) <= total < 2**63
    with localcontext(prec=100):
        return bool(abs(total).scaleb(data_type.scale) < 10**38)


@pytest.mark.parametrize("seed", repetitions(20, 1000))
def test_reductions(seed: int) -> None:
    """Some thirty reductions for each seed: every one of every type that it takes."""
    rows = Rows(random.Random(seed))
    groups, keys = rows.grouped()
    assert sorted(keys) == sorted(set(rows.keys))
    assert [keys[at] for at in groups.index.tolist()] == rows.keys
    assert groups.count().to_pylist() == [len(rows.of_key(rows.keys, key)) for key in keys]

    def check(found: pa.Array, data_type: pa.DataType, wanted: Callable[[list[Any]], Any]) -> None:
        expected = [wanted(rows.of_key(rows.values[data_type], key)) for key in keys]
        assert all(map(_is_same, found.to_pylist(), expected)), (found, expected)

    for data_type in VALUES:
        name = str(data_type)
        check(groups.count(name), data_type, lambda values: len(_present(values)))
        check(groups.first(name), data_type, lambda values: values[0])
        check(groups.last(name), data_type, lambda values: values[-1])
        check(groups.min(name), data_type, _extreme(min))
        check(groups.max(name), data_type, _extreme(max))
        if data_type in NUMBERS:
            of_keys = [rows.of_key(rows.values[data_type], key) for key in keys]
            assert all(map(_is_mean, groups.mean(name).to_pylist(), of_keys))
            if all(_fits(_sum(values), data_type) for values in of_keys):
                check(groups.sum(name), data_type, _sum)
            else:
                with pytest.raises(InvalidArgumentError, match="a sum overflows its type"):
                    groups.sum(name)


@pytest.mark.parametrize("seed", repetitions(20, 1000))
def test_first_and_last_by_another_column(seed: int) -> None:
    """Null is last for the first and first for the last; among equals the first, or the last, that arrived."""
    chance = random.Random(seed)
    rows = Rows(chance)
    groups, keys = rows.grouped()
    numbers = rows.chunked(list(range(rows.size)), pa.int64())
    for data_type, values in rows.values.items():
        first, last = [], []
        for key in keys:
            own = [(at, values[at]) for at in range(rows.size) if rows.keys[at] == key]
            first.append(min(own, key=lambda row: (row[1] is None, _rank(row[1] if row[1] is not None else 0), row[0])))
            last.append(
                max(own, key=lambda row: (row[1] is not None, _rank(row[1] if row[1] is not None else 0), row[0]))
            )
        assert groups.first(numbers, order_by=str(data_type)).to_pylist() == [at for at, _ in first]
        assert groups.last(numbers, order_by=str(data_type)).to_pylist() == [at for at, _ in last]
