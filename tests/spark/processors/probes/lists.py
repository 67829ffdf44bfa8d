"""List state: items S."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from pyspark.sql import Row

from tests.spark.processors.probes.probe import TYPES, Error, Probes, States, attempt, survived

probe = Probes()


@probe(False, [])
def s1_an_absent_list_is_empty(s: States) -> Iterator[object]:
    yield s.numbers.exists()
    yield list(s.numbers.get())


@probe([(3,), (1,), (2,), (1,)], True, "tuple")
def s1_elements_stand_in_the_order_of_appending(s: States) -> Iterator[object]:
    s.numbers.appendValue((3,))
    s.numbers.appendList([(1,), (2,)])
    s.numbers.appendValue((1,))
    yield list(s.numbers.get())
    yield s.numbers.exists()
    yield type(next(iter(s.numbers.get()))).__name__


@probe([(7,), (8,)], [(7,), (8,), (9,)], [(6,)])
def s1_put_replaces_all(s: States) -> Iterator[object]:
    s.numbers.appendList([(1,), (2,), (3,)])
    s.numbers.put([(7,), (8,)])
    yield list(s.numbers.get())
    s.numbers.appendValue((9,))
    yield list(s.numbers.get())
    s.numbers.put([(6,)])
    yield list(s.numbers.get())


@probe([(0,), (1,), (2,)], [(5,), (6,)], [(5,), (6,), (7,)])
def s1_any_iterable_of_sequences_is_taken(s: States) -> Iterator[object]:
    s.numbers.put((n,) for n in range(3))  # type: ignore[arg-type]
    yield list(s.numbers.get())
    s.numbers.put(((5,), (6,)))  # type: ignore[arg-type]
    yield list(s.numbers.get())
    s.numbers.appendList(iter([[7]]))  # type: ignore[arg-type, list-item]
    yield list(s.numbers.get())


@probe(False, [], [(4,)], False)
def s2_clear_empties_a_list_and_is_idempotent(s: States) -> Iterator[object]:
    s.numbers.clear()
    s.numbers.appendList([(1,), (2,)])
    s.numbers.clear()
    s.numbers.clear()
    yield s.numbers.exists()
    yield list(s.numbers.get())
    s.numbers.appendValue((4,))
    yield list(s.numbers.get())
    s.numbers.clear()
    yield s.numbers.exists()


_EMPTY = (
    "Error updating value state: [ILLEGAL_STATE_STORE_VALUE.EMPTY_LIST_VALUE]",
    "Cannot write empty list values to State Store for StateName numbers",
)


@probe(Error("PySparkRuntimeError", *_EMPTY), ends_spark=True)
def s2_an_empty_list_cannot_be_put(s: States) -> Iterator[object]:
    """Q20: a list is emptied by `clear`."""
    yield attempt(s.numbers.put, [])


@probe(Error("PySparkRuntimeError", *_EMPTY), ends_spark=True)
def s2_an_empty_list_cannot_be_appended(s: States) -> Iterator[object]:
    s.numbers.appendValue((1,))
    yield attempt(s.numbers.appendList, iter(()))


@probe(*[Error("TypeError")] * 5, [(1,)])
def s3_what_is_no_element_is_a_type_error_and_nothing_happens(s: States) -> Iterator[object]:
    s.numbers.appendValue((1,))
    yield attempt(s.numbers.appendValue, None)
    yield attempt(s.numbers.appendValue, 5)
    yield attempt(s.numbers.appendList, None)
    yield attempt(s.numbers.put, [(2,), None])
    yield attempt(s.numbers.appendList, [3, 4])
    yield list(s.numbers.get())


@probe([(9,), (None,)])
def s3_a_null_inside_an_element_is_a_value(s: States) -> Iterator[object]:
    s.numbers.put([(9,), (None,)])
    yield list(s.numbers.get())


@probe((1,), [(2,), (3,)], [(1,), (2,), (3,), (4,)])
def s4_an_open_iterator_does_not_see_what_is_appended(s: States) -> Iterator[object]:
    s.numbers.appendList([(1,), (2,), (3,)])
    elements = iter(s.numbers.get())
    yield next(elements)
    s.numbers.appendValue((4,))
    yield list(elements)
    yield list(s.numbers.get())


@probe((1,), [(2,), (3,)], [(8,)], (8,), [], False)
def s4_an_open_iterator_outlives_put_and_clear(s: States) -> Iterator[object]:
    s.numbers.appendList([(1,), (2,), (3,)])
    elements = iter(s.numbers.get())
    yield next(elements)
    s.numbers.put([(8,)])
    yield list(elements)
    yield list(s.numbers.get())
    elements = iter(s.numbers.get())
    yield next(elements)
    s.numbers.clear()
    yield list(elements)
    yield s.numbers.exists()


@probe([(1,), (2,)])
def s4_an_iterator_begins_with_its_first_element(s: States) -> Iterator[object]:
    """What is appended between `get` and the first `next` is seen."""
    s.numbers.appendValue((1,))
    elements = s.numbers.get()
    s.numbers.appendValue((2,))
    yield list(elements)


@probe(((1,), (1,)), ((2,), (2,)), [(3,)], [(3,)])
def s4_two_iterators_are_independent(s: States) -> Iterator[object]:
    s.numbers.appendList([(1,), (2,), (3,)])
    some, others = iter(s.numbers.get()), iter(s.numbers.get())
    yield next(some), next(others)
    yield next(some), next(others)
    yield list(some)
    yield list(others)


@probe((1,), "end", "end", "end")
def s4_an_iterator_at_its_end_stays_there(s: States) -> Iterator[object]:
    s.numbers.appendValue((1,))
    elements = iter(s.numbers.get())
    yield next(elements)
    yield next(elements, "end")
    s.numbers.appendValue((2,))
    yield next(elements, "end")
    yield next(elements, "end")


@probe([(Row(x=1, y="x"), [1, None], {"a": [2]}), (None, [], {})])
def t5_elements_of_nested_types(s: States) -> Iterator[object]:
    s.nested.put([((1, "x"), [1, None], {"a": [2]})])
    s.nested.appendValue((None, [], {}))
    yield list(s.nested.get())


@probe(3_000_000, [3_000_000, 1, 3_000_000], 3_000_000)
def s5_large_elements(s: States) -> Iterator[object]:
    """Also of values and entries; Spark sends each as one message."""
    large = "x" * 3_000_000
    s.typed.update(tuple(large if name == "s" else None for name in TYPES))
    yield len(s.typed.get()[list(TYPES).index("s")])  # type: ignore[index]
    s.nested.appendList([((1, text), None, None) for text in (large, "y", large)])
    yield [len(row[0][1]) for row in s.nested.get()]
    s.pairs.updateValue((large, 1), (1,))
    yield max(len(key[0]) for key in s.pairs.keys())  # noqa: SIM118


@probe(12_345, (0,), (12_344,), True, 12_346)
def s5_a_list_longer_than_a_message(s: States) -> Iterator[object]:
    """Spark sends 10,000 elements at once."""
    s.numbers.appendList([(n,) for n in range(12_345)])
    elements = list(s.numbers.get())
    yield len(elements)
    yield elements[0]
    yield elements[-1]
    yield all(a < b for a, b in itertools.pairwise(elements))
    s.numbers.appendValue((1,))
    yield sum(1 for _ in s.numbers.get())


@probe(
    Error("PySparkRuntimeError", "Error updating value state: [STRUCT_ARRAY_LENGTH_MISMATCH]"),
    [(1,)],
    spark=(Error("PySparkRuntimeError", "Error updating value state: [STRUCT_ARRAY_LENGTH_MISMATCH]"), "lost"),
    ends_spark=True,
)
def s3_an_element_of_the_wrong_length(s: States) -> Iterator[object]:
    s.numbers.appendValue((1,))
    yield attempt(s.numbers.appendList, [(2,), (3, 4)])
    yield survived(list, s.numbers.get())
