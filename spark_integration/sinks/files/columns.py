"""The columns that a file sink takes, and their comparison with the target's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pyarrow as pa
import pyarrow.types as pt

from holdfast.errors import SchemaMismatchError

_PLAIN: tuple[Callable[[pa.DataType], bool], ...] = (
    pt.is_boolean,
    pt.is_int8,
    pt.is_int16,
    pt.is_int32,
    pt.is_int64,
    pt.is_float32,
    pt.is_float64,
    pt.is_string,
    pt.is_binary,
    pt.is_date32,
)


def check_columns(schema: pa.Schema) -> None:
    """Check that every reader of the files gets each column's own type.

    Raises
    ------
    SchemaMismatchError
        A column is of another type, or two have one name.
    """
    names = [field.name.lower() for field in schema]
    for field in schema:
        if names.count(field.name.lower()) > 1:
            raise SchemaMismatchError("two columns have the same name for many readers: rename one", column=field.name)
        problem = _problem(field.type)
        if problem:
            raise SchemaMismatchError(f"a column has a type that {problem}", column=field.name, type=str(field.type))


def _problem(t: pa.DataType) -> str | None:
    """Return a problem of a type, as the end of a sentence."""
    if pt.is_timestamp(t):
        if t.unit == "us" and t.tz in (None, "UTC"):
            return None
        return "is no timestamp of microseconds, in UTC or without a zone: cast it"
    if pt.is_decimal128(t):
        return None if 0 <= t.scale <= t.precision else "has digits that Spark's decimals have not: cast it"
    if pt.is_duration(t):
        return "Parquet does not know: cast it to bigint"
    if pt.is_null(t):
        return "says nothing: cast it to the type that its values would have"
    if pt.is_list(t):
        return _problem(t.value_type)
    if pt.is_map(t):
        return _problem(t.key_type) or _problem(t.item_type)
    if pt.is_struct(t):
        names = [t.field(i).name.lower() for i in range(t.num_fields)]
        if len(set(names)) < len(names):
            return "has two fields of one name, as many readers see it: rename one"
        problems: Iterable[str | None] = (_problem(t.field(i).type) for i in range(t.num_fields))
        return next(filter(None, problems), None) if t.num_fields else "has no fields: leave it out"
    if any(test(t) for test in _PLAIN):
        return None
    return "not every reader of Parquet knows: cast it to one that Spark has"


def plain_type(t: pa.DataType) -> str:
    """Return a type's text, without the names of elements and without what may be null."""
    if pt.is_list(t):
        return f"list<{plain_type(t.value_type)}>"
    if pt.is_map(t):
        return f"map<{plain_type(t.key_type)}, {plain_type(t.item_type)}>"
    if pt.is_struct(t):
        return f"struct<{', '.join(f'{t.field(i).name}: {plain_type(t.field(i).type)}' for i in range(t.num_fields))}>"
    return str(t)


def columns_of(schema: pa.Schema) -> dict[str, str]:
    """Return names and types, by which a process that has not seen the rows compares them with the target."""
    return {field.name: plain_type(field.type) for field in schema}


def compare(given: Mapping[str, str], there: Mapping[str, str], for_new: str, **facts: str) -> None:
    """Check that rows have the target's columns, in any order.

    Parameters
    ----------
    given, there : mapping of str to str
        As `columns_of` returns them.
    for_new : str
        What an error about a new column offers, other than leaving it out.

    Raises
    ------
    SchemaMismatchError
        A column is missing, new, or of another type.
    """
    if missing := sorted(there.keys() - given.keys()):
        raise SchemaMismatchError(
            "the rows lack a column that the target has: select it, or null as <name> cast to its type",
            column=missing[0],
            **facts,
        )
    if new := sorted(given.keys() - there.keys()):
        raise SchemaMismatchError(
            f"the target has no such column: {for_new}, or leave it out of the rows", column=new[0], **facts
        )
    for name, mine in given.items():
        if mine != there[name]:
            raise SchemaMismatchError(
                "a column has a different type than in the target: cast it",
                column=name,
                type=mine,
                there=there[name],
                **facts,
            )
