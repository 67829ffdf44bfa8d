"""Which Arrow types fit which PostgreSQL types: those for which no value can change.

======================================  ==========================================================================
Arrow, as Spark has it                  PostgreSQL
======================================  ==========================================================================
whole numbers                           whole numbers at least as wide; numeric; real and double where all fit
float, double                           real (float), double precision; numeric without precision
decimal(p, s)                           numeric without precision, or with room for all digits before and behind
boolean                                 boolean
string                                  text; varchar(n) if no value is longer, char(n) if each has n characters; json,
                                        jsonb, uuid, inet, enums and whatever else is no number, time, boolean,
                                        bytea or array: the server reads the text
binary                                  bytea
date                                    date
timestamp (with time zone)              timestamp with time zone, of microseconds
timestamp_ntz                           timestamp without time zone, of microseconds
time                                    time without time zone
day-time interval                       interval
array                                   an array of what its elements may go into, without empty ones within others;
                                        json, jsonb
struct, map                             json, jsonb
======================================  ==========================================================================

All else is refused before anything is written: cast the column in the query, or alter the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.errors import SchemaMismatchError

# The modifier of a type with a length is so much larger.
_LENGTH_OFFSET = 4
_INTEGER_BITS = {"int2": 16, "int4": 32, "int8": 64}
# Digits of the mantissa: whole numbers up to so many bits are themselves.
_EXACT_BITS = {"float4": 24, "float8": 53}
_DECIMAL_DIGITS = {8: 3, 16: 5, 32: 10, 64: 20}
_JSON = {"json", "jsonb"}
# Categories of pg_type whose values have Arrow types of their own: no text goes into them.
_NOT_FROM_TEXT = set("ABDNT")
# The server cuts what is too long for these, and says nothing: after 63 bytes, and after one.
_CUTTING = {"name", "char", "bytea"}


@dataclass(frozen=True)
class PgType:
    """A PostgreSQL type; for a domain, its base type."""

    name: str  #: As ``pg_type.typname`` has it: ``int4``, ``_text``
    shown: str  #: As SQL writes it: ``numeric(10,2)``
    category: str  #: ``pg_type.typcategory``
    modifier: int = -1  #: -1 if there is none
    element: str | None = None  #: The ``typname`` of an array's elements
    element_category: str = "U"


def fits(arrow: pa.DataType, into: PgType) -> bool:
    """Tell whether a PostgreSQL type keeps every value of an Arrow type unchanged."""
    if pa.types.is_dictionary(arrow):
        return fits(arrow.value_type, into)
    if pa.types.is_null(arrow):
        return True
    if is_list(arrow):
        if into.name in _JSON:
            return True
        element = PgType(into.element or "", into.shown, into.element_category, into.modifier)
        return into.element is not None and (
            # PostgreSQL has one type for arrays of all dimensions.
            fits(arrow.value_type, into if is_list(arrow.value_type) else element)
        )
    if pa.types.is_struct(arrow) or pa.types.is_map(arrow):
        return into.name in _JSON
    if is_text(arrow):
        return into.category not in _NOT_FROM_TEXT and into.name not in _CUTTING
    if pa.types.is_integer(arrow) or pa.types.is_floating(arrow) or pa.types.is_decimal(arrow):
        return _number_fits(arrow, into)
    return _other_fits(arrow, into)


def require_room(column: pa.Array, name: str, into: PgType) -> None:
    """Check the lengths of texts for varchar(n) or char(n), where the server trims or pads blanks.

    Raises `SchemaMismatchError` if one would change.
    """
    if into.modifier < 0 or (into.element or into.name) not in ("varchar", "bpchar"):
        return
    while is_list(column.type):
        column = column.flatten()
    room = into.modifier - _LENGTH_OFFSET
    lengths = pc.utf8_length(column.dictionary_decode() if pa.types.is_dictionary(column.type) else column)
    is_fixed = (into.element or into.name) == "bpchar"
    changed = pc.any(pc.not_equal(lengths, room) if is_fixed else pc.greater(lengths, room)).as_py()
    if changed:
        what = "has not the column's length, to which PostgreSQL adds blanks" if is_fixed else "is too long"
        raise SchemaMismatchError(
            f"a text {what}: alter the column to text, or change the text in the query",
            column=name,
            table_type=into.shown,
        )


def _other_fits(arrow: pa.DataType, into: PgType) -> bool:
    precise = into.modifier in (-1, 6)
    if pa.types.is_timestamp(arrow):
        return into.name == ("timestamp" if arrow.tz is None else "timestamptz") and arrow.unit != "ns" and precise
    if pa.types.is_time(arrow):
        return into.name == "time" and arrow.unit != "ns" and precise
    if pa.types.is_duration(arrow):
        return into.name == "interval" and arrow.unit != "ns" and into.modifier == -1
    wanted = {pa.bool_(): "bool", pa.date32(): "date", pa.binary(): "bytea", pa.large_binary(): "bytea"}
    return wanted.get(arrow) == into.name


def _number_fits(arrow: pa.DataType, into: PgType) -> bool:
    if into.name == "numeric":
        return into.modifier == -1 or _digits_fit(arrow, into.modifier)
    if pa.types.is_integer(arrow):
        bits = arrow.bit_width + (not pa.types.is_signed_integer(arrow))
        return bits <= (_INTEGER_BITS | _EXACT_BITS).get(into.name, 0)
    if pa.types.is_floating(arrow):
        return into.name == "float8" or (into.name == "float4" and arrow.bit_width <= 32)
    return False


def _digits_fit(arrow: pa.DataType, modifier: int) -> bool:
    # As the server packs numeric(precision, scale); the scale has eleven bits and a sign.
    precision, scale = (modifier - 4) >> 16 & 0xFFFF, ((modifier - 4) & 0x7FF ^ 1024) - 1024
    if pa.types.is_integer(arrow):
        return scale >= 0 and precision - scale >= _DECIMAL_DIGITS[arrow.bit_width]
    if pa.types.is_decimal(arrow):
        return scale >= arrow.scale and precision - scale >= arrow.precision - arrow.scale
    return False


_MADE = {
    pa.bool_(): "boolean",
    pa.int8(): "smallint",
    pa.int16(): "smallint",
    pa.int32(): "integer",
    pa.int64(): "bigint",
    pa.float32(): "real",
    pa.float64(): "double precision",
    pa.date32(): "date",
    pa.binary(): "bytea",
    pa.large_binary(): "bytea",
}


def made_for(arrow: pa.DataType) -> str | None:
    """Return the SQL type to create for an Arrow type, or None."""
    if pa.types.is_dictionary(arrow):
        return made_for(arrow.value_type)
    if is_text(arrow):
        return "text"
    if pa.types.is_decimal(arrow):
        return f"numeric({arrow.precision},{arrow.scale})"
    if pa.types.is_timestamp(arrow):
        return "timestamp" if arrow.tz is None else "timestamptz"
    if pa.types.is_time(arrow):
        return "time"
    if pa.types.is_duration(arrow):
        return "interval"
    if pa.types.is_struct(arrow) or pa.types.is_map(arrow):
        return "jsonb"
    if is_list(arrow):
        element = arrow.value_type
        inner = made_for(element)
        return inner if inner is None or inner == "jsonb" or is_list(element) else f"{inner}[]"
    return _MADE.get(arrow)


def is_text(arrow: pa.DataType) -> bool:
    """Tell whether values are text."""
    return arrow in (pa.string(), pa.large_string()) or pa.types.is_string_view(arrow)


def is_list(arrow: pa.DataType) -> bool:
    """Tell whether values are lists, of any kind but views."""
    return pa.types.is_list(arrow) or pa.types.is_large_list(arrow) or pa.types.is_fixed_size_list(arrow)
