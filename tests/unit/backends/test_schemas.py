"""Schemas of tables: what they may hold, how they are stored, and which changes stored rows survive."""

from __future__ import annotations

import base64
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.column_names import ColumnChanges, Names, named, with_columns
from holdfast.backends.evolution import evolved, evolved_tables, is_readable_as, project, require_readable
from holdfast.backends.run import Keys, Run, merge_runs, under_names
from holdfast.backends.schema import (
    TableSchema,
    decode_schema,
    decode_schemas,
    encode_schema,
    encode_schemas,
    find_table,
    require_declared,
)
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError, SchemaMismatchError
from holdfast.testing.state_rows import COUNTS, PAIRS, TABLES, TYPES, VALUE_TYPES, keys_of, run_of, values_of


def test_what_a_table_cannot_be() -> None:
    with pytest.raises(InvalidArgumentError, match="at least one key column"):
        TableSchema.of("t", pa.schema([]), pa.schema([("n", pa.int64())]))
    with pytest.raises(InvalidArgumentError, match=r"unique.*a"):
        TableSchema.of("t", pa.schema([("a", pa.int64()), ("a", pa.int64())]), pa.schema([]))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"m": [1]}), "do not match"),
        (pa.table({"n": [1], "m": [1]}), "do not match"),
        (pa.table({"n": ["12"]}), r"a different type.*given=string"),
        (pa.table({"n": [1.5]}), "cannot be stored"),
        (pa.table({"n": pa.array([2**63], pa.uint64())}), "cannot be stored"),
        (pa.table([pa.array([1]), pa.array([1])], names=["n", "n"]), "do not match"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(table: pa.Table, message: str) -> None:
    with pytest.raises(SchemaMismatchError, match=message) as caught:
        COUNTS.conform(table, "value")
    assert caught.value.facts["table"] == "counts"


def test_columns_in_another_order_or_in_chunks_fit() -> None:
    """Names decide, not positions; chunks and dictionaries are unpacked."""
    table = pa.table(
        {
            "name": pa.chunked_array([["a"], [], ["b", None]]).dictionary_encode(),
            "right": pa.array([-0.0, None, 1], pa.float32()),
            "left": pa.array([1, 2, 3], pa.int8()),
        }
    )
    keys = Keys.of(PAIRS, np.arange(3), table)
    assert keys.columns.schema == PAIRS.key
    assert keys.columns.to_pylist()[0] == {"left": 1, "right": 0.0, "name": "a"}
    with pytest.raises(InvalidArgumentError, match="one hash for each key"):
        Keys.of(PAIRS, np.arange(2), table)


def test_what_stands_under_a_name_is_found_or_the_names_are_listed() -> None:
    """A misspelled table is refused wherever a table is named, with what could be meant."""
    assert find_table(TABLES, "counts") is TABLES["counts"]
    with pytest.raises(NotFoundError, match=r"no such table.*table=count tables=.*counts"):
        find_table(TABLES, "count")


def test_stored_tables_must_be_declared() -> None:
    """State is never dropped because the operator forgot a table; declaring one more is fine."""
    require_declared(["counts"], TABLES)
    with pytest.raises(SchemaMismatchError, match=r"does not declare.*older"):
        require_declared(["counts", "older"], TABLES)


USER = pa.schema([("user", pa.string())])
STATE = pa.schema([("n", pa.int64())])
NESTED = pa.schema([("n", pa.int64()), ("all", pa.list_(pa.map_(pa.string(), pa.struct([("inner", pa.date32())]))))])


def test_what_was_written_is_read() -> None:
    assert decode_schema(encode_schema(NESTED)).equals(NESTED)


@pytest.mark.parametrize("name", ["n", "inner"])
def test_a_name_that_is_no_text_is_refused_at_any_depth(name: str) -> None:
    """Arrow opens such a schema, and raises UnicodeDecodeError at the first look at the name, wherever that is."""
    data = base64.b64decode(encode_schema(NESTED))
    length = len(name).to_bytes(4, "little")
    spoiled = data.replace(length + name.encode(), length + b"\xf6" * len(name))
    assert spoiled != data
    with pytest.raises(ValueError, match="utf-8"):
        decode_schema(base64.b64encode(spoiled).decode())


@pytest.mark.parametrize("text", ["", "no base64!", base64.b64encode(b"no schema").decode()])
def test_what_is_no_schema_is_an_error_that_readers_expect(text: str) -> None:
    with pytest.raises((ValueError, OSError, pa.ArrowException)):
        decode_schema(text)


def test_schemas_of_every_type_come_back() -> None:
    """Their text would not: programs read state by these."""
    columns = pa.schema([(f"c{i}", t) for i, (t, *_) in enumerate([*TYPES, *VALUE_TYPES])])
    tables = {"state": TableSchema.of("state", USER, columns), "bare": TableSchema.of("bare", USER, pa.schema([]))}
    assert decode_schemas(encode_schemas(tables)) == tables


@given(st.lists(st.one_of(st.binary().map(lambda b: b.hex()), st.text(), st.none()), max_size=3))
def test_what_is_no_schema_is_corrupt(sides: list[str]) -> None:
    with pytest.raises(CorruptionError, match="state"):
        decode_schemas({"state": sides})


def test_a_schema_that_was_cut_is_corrupt() -> None:
    key, value = encode_schemas({"state": TableSchema.of("state", USER, STATE)})["state"]
    for length in range(0, len(key), 4):
        with pytest.raises(CorruptionError):
            decode_schemas({"state": [key[:length], value]})


KEY = pa.schema([("k", pa.string())])


def changed(names: Names, **changes: object) -> Names:
    drop, rename = changes.get("drop", ()), changes.get("rename", {})
    return ColumnChanges(frozenset(drop), rename).applied(names, "t")  # type: ignore[arg-type, call-overload]


def test_a_name_that_comes_back_is_another_column() -> None:
    """Also the third time, and where a user's own column is called like a stored one."""
    names = with_columns({}, [], ["n", "m"])
    assert names == {"n": "n", "m": "m"}
    names = with_columns(changed(names, drop=["m"]), ["n", "m"], ["n", "m", "m#2"])
    assert names == {"n": "n", "m": "m#2", "m#2": "m#2#2"}
    names = with_columns(changed(names, drop=["m"]), ["n", "m", "m#2", "m#2#2"], ["m"])
    assert names == {"n": "n", "m": "m#3", "m#2": "m#2#2"}


def test_a_renamed_column_stays_where_it_is() -> None:
    """There and back; the old name is free for another column, which is stored elsewhere."""
    names = changed({"n": "n", "m": "m"}, rename={"n": "total"})
    assert names == {"total": "n", "m": "m"}
    assert changed(names, rename={"n": "total"}) == names, "made once"
    names = with_columns(names, ["n", "m"], ["n"])
    assert names == {"total": "n", "m": "m", "n": "n#2"}
    assert changed(changed(names, drop=["n"]), rename={"total": "n"}) == {"n": "n", "m": "m"}


def test_a_rename_takes_no_others_name() -> None:
    with pytest.raises(SchemaMismatchError, match=r"first drop the stored column.*n → m"):
        changed({"n": "n", "m": "m"}, rename={"n": "m"})


def test_rows_are_shown_under_the_names_of_now() -> None:
    """What no row was stored with is null, also where a dropped column had its name."""
    stored = TableSchema.of("t", KEY, pa.schema([("n", pa.int32()), ("m", pa.string())]))
    run = run_of(stored, [(("a",), (1, "dropped"))])
    wanted = TableSchema.of("t", KEY, pa.schema([("m", pa.int64()), ("total", pa.int64()), ("new", pa.string())]))
    for names in ({"total": "n", "m": "m#2", "new": "new"}, {"total": "n", "m": "m#2"}):
        found: Run = under_names(run, wanted, names)
        assert found.schema is wanted
        assert found.values.to_pylist() == [{"m": None, "total": 1, "new": None}]


def test_which_columns_have_no_null_goes_with_them() -> None:
    columns = pa.schema([pa.field("n", pa.int32(), nullable=False), pa.field("m", pa.int32(), nullable=False)])
    table = TableSchema.of("t", pa.schema([pa.field("k", pa.string(), nullable=False)]), columns)
    assert named(table, {"n": "total"}).not_null == {"key.k", "value.total"}
    assert named(table, {"n": "m", "m": "n"}).not_null == {"key.k", "value.m", "value.n"}


INT, LONG, TEXT = pa.int32(), pa.int64(), pa.string()


def table(**columns: pa.DataType) -> TableSchema:
    return TableSchema.of("t", KEY, pa.schema(list(columns.items())))


NULLABLE = pa.field("b", TEXT)
REQUIRED = pa.field("b", TEXT, nullable=False)

WIDER = {
    "byte to long": (pa.int8(), LONG, 5, 5),
    "short to int": (pa.int16(), INT, -7, -7),
    "int to double": (INT, pa.float64(), 3, 3.0),
    "long to float": (LONG, pa.float32(), 4, 4.0),
    "unsigned": (pa.uint8(), pa.uint64(), 255, 255),
    "more digits of a decimal": (pa.decimal128(5, 2), pa.decimal128(38, 10), Decimal("-1.25"), Decimal("-1.25")),
    "decimals of elements": (
        pa.list_(pa.decimal128(3, 1)),
        pa.list_(pa.decimal128(9, 2)),
        [Decimal("99.9"), None],
        [Decimal("99.90"), None],
    ),
    "float to double": (pa.float32(), pa.float64(), 0.5, 0.5),
    "a field more": (pa.struct([("a", INT)]), pa.struct([("a", LONG), NULLABLE]), {"a": 1}, {"a": 1, "b": None}),
    "elements": (pa.list_(INT), pa.list_(LONG), [1, None], [1, None]),
    "values of a map": (pa.map_(TEXT, INT), pa.map_(TEXT, LONG), [("x", 1)], [("x", 1)]),
    "a field of an element": (
        pa.list_(pa.struct([("a", INT)])),
        pa.list_(pa.struct([("a", INT), NULLABLE])),
        [{"a": 1}, None],
        [{"a": 1, "b": None}, None],
    ),
}
NOT_WIDER = {
    "long to int": (LONG, INT),
    "double to float": (pa.float64(), pa.float32()),
    "double to long": (pa.float64(), LONG),
    "int to string": (INT, TEXT),
    "string to binary": (TEXT, pa.binary()),
    "date to timestamp": (pa.date32(), pa.timestamp("us", "UTC")),
    "fewer digits of a decimal": (pa.decimal128(10, 2), pa.decimal128(9, 2)),
    "fewer digits before the point": (pa.decimal128(10, 2), pa.decimal128(11, 4)),
    "fewer digits behind it": (pa.decimal128(10, 2), pa.decimal128(12, 1)),
    "long to decimal": (LONG, pa.decimal128(20, 0)),
    "signed to unsigned": (INT, pa.uint64()),
    "unsigned to signed": (pa.uint8(), LONG),
    "another zone": (pa.timestamp("us", "UTC"), pa.timestamp("us")),
    "list to its element": (pa.list_(INT), INT),
    "keys of a map": (pa.map_(INT, INT), pa.map_(LONG, INT)),
    "a required field more": (pa.struct([("a", INT)]), pa.struct([("a", INT), REQUIRED])),
    "a field that becomes required": (pa.struct([NULLABLE]), pa.struct([REQUIRED])),
    "fields of one name": (pa.struct([("a", INT), ("a", INT)]), pa.struct([("a", INT), ("a", INT), NULLABLE])),
    "fields of one name by now": (pa.struct([("a", INT)]), pa.struct([("a", INT), ("a", INT)])),
    "elements that become required": (pa.list_(NULLABLE), pa.list_(REQUIRED)),
}


@pytest.mark.parametrize("name", list(WIDER))
def test_what_can_be_read_as_it_is_declared(name: str) -> None:
    """Also in slices, between nulls, and after a null."""
    stored, declared, given, expected = WIDER[name]
    before, after = table(v=stored), table(v=declared)
    assert evolved(before, after) == after
    values = values_of(before, [(None,), (given,), (None,), (given,), (None,)])
    for rows in (values, values.slice(1), values.slice(1, 3), values.slice(2, 1), values.slice(0, 0)):
        found = project(rows, after.value)
        found.validate(full=True)
        assert [_plain(v["v"]) for v in found.to_pylist()] == [
            None if v["v"] is None else _plain(expected) for v in rows.to_pylist()
        ]


def _plain(value: Any) -> Any:
    return [tuple(v) if isinstance(v, tuple) else v for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", list(NOT_WIDER))
def test_what_cannot(name: str) -> None:
    stored, declared = NOT_WIDER[name]
    with pytest.raises(SchemaMismatchError, match=r"start over with a new checkpointLocation.*table=t.*v: .* → "):
        evolved(table(v=stored), table(v=declared))


def test_exact_is_what_rounds_nothing() -> None:
    """Functions that are no processors, for which Avro's rules do not hold, refuse what would change a large number."""
    exact = [(pa.int16(), pa.float32()), (INT, pa.float64()), (LONG, LONG), (pa.float32(), pa.float64())]
    rounds = [(INT, pa.float32()), (LONG, pa.float32()), (LONG, pa.float64())]
    for stored, declared in exact + rounds:
        for around in (lambda t: t, pa.large_list, lambda t: pa.struct([("a", t)]), lambda t: pa.map_(TEXT, t)):
            assert is_readable_as(around(stored), around(declared))
            assert is_readable_as(around(stored), around(declared), exact=True) == ((stored, declared) in exact)


def test_what_a_table_holds_only_grows() -> None:
    """Columns that are not declared stay, in their places; so the order of declarations does not matter to readers."""
    held = evolved(table(a=INT, b=TEXT), table(c=TEXT, a=LONG))
    assert held == table(a=LONG, b=TEXT, c=TEXT)
    assert evolved(held, table(b=TEXT)) == held
    assert evolved(held, held) == held
    place = evolved(table(p=pa.struct([("a", INT), REQUIRED])), table(p=pa.struct([("a", LONG)])))
    assert place == table(p=pa.struct([("a", LONG), NULLABLE])), "rows that are written now have no b"


def test_keys_do_not_change() -> None:
    """Rows are found by them."""
    other = TableSchema.of("t", pa.schema([("k", pa.binary())]), pa.schema([]))
    with pytest.raises(SchemaMismatchError, match="k: large_string → large_binary"):
        evolved(table(), other)


def test_tables_come_and_stay() -> None:
    one, two = {"t": table(a=INT)}, {"u": table(b=TEXT)}
    assert evolved_tables(one, two) == {**one, **two}
    assert evolved_tables(evolved_tables(one, two), one) == {**one, **two}


def test_stored_rows_may_not_have_more_than_the_table_holds() -> None:
    """They would lose it in the next merge."""
    for stored in (table(a=INT, b=TEXT), table(a=pa.float32()), table(a=pa.struct([("x", INT)]))):
        with pytest.raises(SchemaMismatchError, match="it holds state with a different schema"):
            require_readable(stored, table(a=INT), source="it")
    for stored in (table(), table(a=pa.int8())):
        require_readable(stored, table(a=INT), source="it")


def test_fields_stand_in_any_order() -> None:
    """Two runs that overlap and add a field each write them in different orders: neither knew of the other."""
    first, one, other = (table(p=pa.list_(pa.struct([(n, INT) for n in names]))) for names in ("a", "ab", "ac"))
    held = evolved(evolved(first, one), other)
    written = evolved(first, other)
    require_readable(written, held, source="it")
    rows = project(values_of(written, [([{"a": 1, "c": 2}],)]), held.value)
    assert rows.to_pylist() == [{"p": [{"a": 1, "b": None, "c": 2}]}]
    with pytest.raises(SchemaMismatchError, match="it holds state with a different schema"):
        require_readable(held, written, source="it")


def test_runs_of_several_schemas_merge_into_one_that_holds_all() -> None:
    """Also where the newest has the fewest columns."""
    first = run_of(table(a=INT), [(("x",), (1,)), (("y",), (2,))])
    second = run_of(table(a=LONG, b=TEXT), [(("y",), (3, "three"))])
    for runs in ([first, second], [first, second, run_of(table(a=LONG), [])]):
        merged = merge_runs(runs, drop_deletes=True)
        assert merged.schema == table(a=LONG, b=TEXT)
        rows = dict(zip(merged.keys.column(0).to_pylist(), merged.values.to_pylist(), strict=True))
        assert rows == {"x": {"a": 1, "b": None}, "y": {"a": 3, "b": "three"}}


def test_a_run_is_read_with_the_columns_of_its_table() -> None:
    """What was written before has nulls."""
    sink = pa.BufferOutputStream()
    run_of(table(a=INT), [(("x",), (1,))]).write(sink)
    held = table(b=TEXT, a=LONG)
    run = Run.read(sink.getvalue(), held, source="it")
    assert run.schema is held
    assert run.values.to_pylist() == [{"b": None, "a": 1}]
    assert len(run.find(keys_of(held, [("x",)]))) == 1
    assert isinstance(Keys(run.hashes, run.keys), Keys)


@pytest.mark.parametrize("extra", ["value.a", "colour"])
def test_columns_that_no_run_has_are_damage(extra: str) -> None:
    """A name twice, or one that says neither key nor value."""
    run = run_of(table(a=INT), [(("x",), (1,))])
    batch = run.batch.append_column(extra, pa.array([1], INT))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(CorruptionError, match="its columns are not those of a run"):
        Run.read(sink.getvalue(), table(a=INT), source="it")
