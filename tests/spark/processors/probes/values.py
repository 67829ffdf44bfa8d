"""Value state: items V, and what a variable may be declared as."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from pyspark.sql import Row

from tests.spark.processors.probes.probe import Error, Probes, States, attempt, survived, written

probe = Probes()


@probe(False, None)
def v1_an_absent_value_is_none(s: States) -> Iterator[object]:
    yield s.value.exists()
    yield s.value.get()


@probe((5, "x"), "tuple", True)
def v1_a_value_is_a_plain_tuple(s: States) -> Iterator[object]:
    s.value.update((5, "x"))
    yield s.value.get()
    yield type(s.value.get()).__name__
    yield s.value.exists()


@probe(True, (None, None))
def v1_a_value_of_nulls_exists(s: States) -> Iterator[object]:
    s.value.update((None, None))
    yield s.value.exists()
    yield s.value.get()


@probe((2, "b"), (3, "c"), (4, "d"))
def v4_a_read_sees_what_the_call_has_written(s: States) -> Iterator[object]:
    for n, letter in enumerate("bcd", 2):
        s.value.update((n, letter))
        yield s.value.get()


@probe(False, None, False, (2, "y"))
def v4_clear_is_idempotent_and_a_cleared_value_may_be_set_again(s: States) -> Iterator[object]:
    s.value.clear()
    s.value.update((1, "x"))
    s.value.clear()
    s.value.clear()
    yield s.value.exists()
    yield s.value.get()
    s.single.clear()
    yield s.single.exists()
    s.value.update((2, "y"))
    yield s.value.get()


@probe((1, "x"), (2, "y"), (3, "z"))
def v2_any_sequence_is_taken_by_position(s: States) -> Iterator[object]:
    for value in ([1, "x"], Row(a=2, b="y"), Row(3, "z")):
        s.value.update(value)  # type: ignore[arg-type]
        yield s.value.get()


@probe(Error("TypeError"), Error("TypeError"), False, (1, "x"))
def v2_what_is_no_sequence_is_a_type_error_and_nothing_happens(s: States) -> Iterator[object]:
    yield attempt(s.value.update, None)
    yield attempt(s.value.update, 5)
    yield s.value.exists()
    s.value.update((1, "x"))
    yield s.value.get()


@probe((1,), (2,), ("int", "int"))
def t1_numpy_scalars_are_plain_numbers(s: States) -> Iterator[object]:
    s.single.update((np.int64(1),))
    yield s.single.get()
    s.single.update(np.array([2]))  # type: ignore[arg-type]
    yield s.single.get()
    s.value.update((np.int32(3), "x"))
    yield type(s.single.get()[0]).__name__, type(s.value.get()[0]).__name__  # type: ignore[index]


_LENGTH = "Error updating value state: [STRUCT_ARRAY_LENGTH_MISMATCH]"


@probe(Error("PySparkRuntimeError", _LENGTH), ends_spark=True)
def v3_too_few_values(s: States) -> Iterator[object]:
    yield attempt(s.value.update, (1,))


@probe(Error("PySparkRuntimeError", _LENGTH), ends_spark=True)
def v3_too_many_values(s: States) -> Iterator[object]:
    yield attempt(s.value.update, (1, "x", 2))


@probe(
    Error("PySparkRuntimeError", _LENGTH),
    (1, "x"),
    (2, "y"),
    spark=(Error("PySparkRuntimeError", _LENGTH), "lost", "lost"),
    ends_spark=True,
)
def x1_an_error_that_was_caught_is_over(s: States) -> Iterator[object]:
    """Q4: on Spark the state server is gone, and the task with it."""
    s.value.update((1, "x"))
    yield attempt(s.value.update, (1,))
    yield survived(s.value.get)
    yield survived(written, s.value, (2, "y"))


@probe((7,), True)
def d3_a_name_may_have_blanks(s: States) -> Iterator[object]:
    s.single.update((7,))
    yield s.single.get()
    yield s.single.exists()


@probe((1,), None, False)
def tl1_a_ttl_of_0_is_none_in_any_time_mode(s: States) -> Iterator[object]:
    """Q15: also where a TTL is an error."""
    s.lasting.update((1,))
    yield s.lasting.get()
    s.lasting.clear()
    yield s.lasting.get()
    yield s.lasting.exists()


@probe(Error("StateValueError", "NOT NULL"), spark=((0,),))
def d6_none_in_a_column_that_is_not_null(s: States) -> Iterator[object]:
    """Q3: Spark stores it and reads 0."""
    yield attempt(written, s.fixed, (None,))


@probe(Error("TypeError"), None, spark=(None, (None, "b")))
def v2_a_dict_is_no_row(s: States) -> Iterator[object]:
    """Q3: Spark stores its keys; here "a" in an int column, which makes it null."""
    yield attempt(s.value.update, {"a": 1, "b": "x"})  # type: ignore[arg-type]
    yield s.value.get()


@probe(Error("TypeError", "another order"), None, spark=(None, (None, "1")))
def v2_a_row_with_names_in_another_order(s: States) -> Iterator[object]:
    """Q3: Spark goes by position, and makes null of what then does not fit."""
    yield attempt(s.value.update, Row(b="x", a=1))
    yield s.value.get()


@probe(Error("TypeError"), None, spark=(None, (None, "y")))
def v2_a_str_is_no_row(s: States) -> Iterator[object]:
    """Q3: on Spark its letters are values; "x" in an int column makes it null."""
    yield attempt(s.value.update, "xy")  # type: ignore[arg-type]
    yield s.value.get()


@probe((1, "x"), (2,), [(3,)], [((4,), ("v", 5))])
def d8_variables_of_all_kinds_are_apart(s: States) -> Iterator[object]:
    s.value.update((1, "x"))
    s.single.update((2,))
    s.numbers.appendValue((3,))
    s.entries.updateValue((4,), ("v", 5))
    yield s.value.get()
    yield s.single.get()
    yield list(s.numbers.get())
    yield list(s.entries.iterator())
