"""Map state: items M."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal

from pyspark.errors import PySparkException
from pyspark.sql import Row

from tests.spark.processors.probes.probe import Anything, Error, Probes, States, attempt

probe = Probes()


@probe(False, None, False, [], [], [], False)
def m1_an_absent_map_is_empty(s: States) -> Iterator[object]:
    yield s.entries.exists()
    yield s.entries.getValue((1,))
    yield s.entries.containsKey((1,))
    yield list(s.entries.keys())
    yield list(s.entries.values())
    yield list(s.entries.iterator())
    s.entries.removeKey((1,))
    s.entries.clear()
    yield s.entries.exists()


@probe(True, False, True, False)
def m1_a_map_without_entries_does_not_exist(s: States) -> Iterator[object]:
    s.entries.updateValue((1,), ("x", 1))
    yield s.entries.exists()
    s.entries.removeKey((1,))
    yield s.entries.exists()
    s.entries.updateValue((2,), ("y", 2))
    yield s.entries.exists()
    s.entries.clear()
    yield s.entries.exists()


@probe("Row(v='x', w=1)", "x", (1,), ("x", 1), ((1,), ("x", 1)), ("tuple", "tuple", "tuple", "tuple"))
def m2_get_value_gives_a_row_and_iterators_plain_tuples(s: States) -> Iterator[object]:
    s.entries.updateValue((1,), ("x", 1))
    yield str(s.entries.getValue((1,)))
    yield s.entries.getValue((1,)).v  # type: ignore[union-attr]
    [key], [value], [(its_key, its_value)] = s.entries.keys(), s.entries.values(), s.entries.iterator()
    yield key
    yield value
    yield its_key, its_value
    yield tuple(type(part).__name__ for part in (key, value, its_key, its_value))


@probe(("x", 1), ("y", 2), None, [(2,)])
def m1_entries_are_read_replaced_and_removed_one_by_one(s: States) -> Iterator[object]:
    s.entries.updateValue((1,), ("x", 1))
    s.entries.updateValue((2,), ("z", 3))
    yield tuple(s.entries.getValue((1,)))  # type: ignore[arg-type]
    s.entries.updateValue((1,), ("y", 2))
    yield tuple(s.entries.getValue((1,)))  # type: ignore[arg-type]
    s.entries.removeKey((1,))
    yield s.entries.getValue((1,))
    yield list(s.entries.keys())


@probe(True, (None, None), True)
def m3_a_value_of_nulls_is_a_value(s: States) -> Iterator[object]:
    s.entries.updateValue((1,), (None, None))
    yield s.entries.containsKey((1,))
    yield tuple(s.entries.getValue((1,)))  # type: ignore[arg-type]
    yield s.entries.exists()


@probe(True, ("x", 1), False, [(None,)])
def m4_null_is_a_key(s: States) -> Iterator[object]:
    s.entries.updateValue((None,), ("x", 1))
    yield s.entries.containsKey((None,))
    yield tuple(s.entries.getValue((None,)))  # type: ignore[arg-type]
    yield s.entries.containsKey((0,))
    yield list(s.entries.keys())


@probe(*[Error("TypeError")] * 6, False)
def m3_what_is_no_row_is_a_type_error_and_nothing_happens(s: States) -> Iterator[object]:
    """X6: so no state call gets as far as Spark's error of null values."""
    yield attempt(s.entries.updateValue, None, ("x", 1))
    yield attempt(s.entries.updateValue, (1,), None)
    yield attempt(s.entries.updateValue, 1, ("x", 1))
    yield attempt(s.entries.getValue, 1)
    yield attempt(s.entries.containsKey, None)
    yield attempt(s.entries.removeKey, 1)
    yield s.entries.exists()


@probe(Error("StateValueError"), Error("StateValueError"), spark=(("null", 1), True))
def m4_a_user_key_that_does_not_fit(s: States) -> Iterator[object]:
    """Q3: Spark makes null of it, which is another key."""
    s.entries.updateValue((None,), ("null", 1))
    yield attempt(lambda: tuple(s.entries.getValue((5.5,))))  # type: ignore[arg-type]
    yield attempt(s.entries.containsKey, ("5",))


_LONGS = [0, 256, 10**12, 2, 5, 300, -300, -1, 2**63 - 1, -(2**63)]


@probe(sorted(_LONGS), True, True)
def m5_iterators_agree_on_an_order_that_nobody_promises(s: States) -> Iterator[object]:
    """Q25: on Spark it is that of the encoded bytes."""
    for n in _LONGS:
        s.entries.updateValue((n,), (str(n), None))
    keys = [key for (key,) in s.entries.keys()]  # noqa: SIM118  not a dict
    yield sorted(keys)
    yield keys == [key for (key,), _ in s.entries.iterator()]
    yield [str(key) for key in keys] == [value for value, _ in s.entries.values()]


@probe((("a", 1), ("b", 2)), True, (False, False), (7,))
def m6_an_open_iterator_is_a_snapshot(s: States) -> Iterator[object]:
    s.entries.updateValue((1,), ("a", 1))
    s.entries.updateValue((2,), ("b", 2))
    pairs = s.entries.iterator()
    first = next(pairs)
    for n in (1, 2):
        s.entries.removeKey((n,))
    s.entries.updateValue((7,), ("c", 7))
    yield tuple(sorted(value for _, value in (first, *pairs)))
    yield s.entries.containsKey((7,))
    yield s.entries.containsKey((1,)), s.entries.containsKey((2,))
    yield next(iter(s.entries.keys()))


@probe((2,), None, [(("a", 1), (1,)), (("a", 2), (2,)), (("b", 1), (3,))], [("a", 1), ("b", 1)])
def m8_keys_of_several_columns(s: States) -> Iterator[object]:
    for key, n in {("a", 1): 1, ("a", 2): 2, ("b", 1): 3}.items():
        s.pairs.updateValue(key, (n,))
    yield tuple(s.pairs.getValue(("a", 2)))  # type: ignore[arg-type]
    yield s.pairs.getValue(("b", 2))
    yield sorted(s.pairs.iterator())
    s.pairs.removeKey(("a", 2))
    yield sorted(s.pairs.keys())


_PLACES = [((x, "z"), dt.date(2026, 1, 2), Decimal("1.50"), [x, None]) for x in (1, 2)]


@probe(Row(st=Row(x=1, y=None), array=[], map={"a": [1]}), None, [_PLACES[0]], "Row", [])
def m8_keys_and_values_of_nested_types(s: States) -> Iterator[object]:
    """T5: structs, dates, decimals and arrays can be keys; maps can not (D2)."""
    for key in _PLACES:
        s.places.updateValue(key, ((1, None), [], {"a": [1]}))
    yield s.places.getValue(_PLACES[0])
    s.places.removeKey(_PLACES[1])
    yield s.places.getValue(_PLACES[1])
    found = list(s.places.keys())
    yield [(tuple(place), *rest) for place, *rest in found]
    yield type(found[0][0]).__name__
    s.places.clear()
    yield list(s.places.iterator())


@probe(300, 299, False, ("299", 299))
def m1_a_large_map(s: States) -> Iterator[object]:
    for n in range(300):
        s.entries.updateValue((n,), (str(n), n))
    yield sum(1 for _ in s.entries.keys())  # noqa: SIM118  not a dict
    s.entries.removeKey((17,))
    yield len(set(s.entries.keys()))
    yield s.entries.containsKey((17,))
    yield tuple(s.entries.getValue((299,)))  # type: ignore[arg-type]


@probe((1,), [], Anything())
def m6_values_and_keys_too(s: States) -> Iterator[object]:
    s.entries.updateValue((1,), ("a", 1))
    keys = s.entries.keys()
    yield next(keys)
    s.entries.updateValue((2,), ("b", 2))
    yield list(keys)
    # In an order that nobody promises.
    yield list(s.entries.values())


_LENGTH = "[STRUCT_ARRAY_LENGTH_MISMATCH]"


@probe(Error("PySparkRuntimeError", "Error updating map state value:", _LENGTH), ends_spark=True)
def x2_a_map_value_of_the_wrong_length(s: States) -> Iterator[object]:
    yield attempt(s.entries.updateValue, (1,), ("x",))


@probe(None, ends_spark=True)
def x3_errors_of_state_calls_have_no_condition(s: States) -> Iterator[object]:
    """Their class is text: what catches them by condition finds none."""
    try:
        s.entries.updateValue((1,), ("x",))
    except PySparkException as exc:
        yield exc.getCondition()


@probe(Error("PySparkRuntimeError", "Error getting value:", _LENGTH), ends_spark=True)
def x2_a_user_key_of_the_wrong_length(s: States) -> Iterator[object]:
    yield attempt(s.entries.getValue, (1, 2))
