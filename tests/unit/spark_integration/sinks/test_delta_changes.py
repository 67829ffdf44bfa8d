"""A Delta table that others drop, make anew or alter under a running query: noticed, and nothing is lost unsaid."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema, write_deltalake

from holdfast import clock
from holdfast.errors import HoldfastError, SchemaMismatchError, StateLostError
from holdfast.spark_integration.sinks.delta import tables
from holdfast.spark_integration.sinks.delta.sink import DeltaSink
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkQuery
from tests.sink_drivers import prepared
from tests.tiers import cases

pytestmark = pytest.mark.slow(7)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "table")


@pytest.fixture(params=[None, ["key"]], ids=["append", "upsert"])
def writer(request: pytest.FixtureRequest, url: str) -> Writer:
    """Return a query that writes to a new table."""
    return opened(DeltaSink("out", url, request.param, create=True))


def _overwrite(url: str) -> None:
    write_deltalake(url, pa.table({"key": ["a"]}), mode="overwrite", schema_mode="overwrite")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda url: DeltaTable(url).alter.add_constraint({"positive": "key > 0"}), "CHECK"),
        (_overwrite, "no such column"),
    ],
)
def test_a_table_that_others_change_meanwhile_is_checked_again(
    url: str, change: Callable[[str], None], said: str, writer: Writer
) -> None:
    """Rows that it would refuse at a start are not decided."""
    writer.write(0, {1: "a"})
    change(url)
    before = DeltaTable(url).version()
    with pytest.raises(HoldfastError, match=said):
        writer.write(1, {-1: "b"})
    assert DeltaTable(url).version() == before
    with pytest.raises(HoldfastError, match=said):
        writer.sink.open(writer.query, SCHEMA)


def _another_column(url: str) -> None:
    DeltaTable(url).alter.add_columns(Schema.from_arrow(pa.schema([("more", pa.string())])).fields)


def _another_column_in_a_struct(url: str) -> None:
    """Have another writer's rows bring a column, as its schema evolution does."""
    rows = pa.table({"key": [99], "word": ["x"], "more": [{"a": 1}]})
    write_deltalake(url, rows, mode="append", schema_mode="merge")
    DeltaTable(url).delete("key = 99")


@pytest.mark.parametrize("keys", cases([["key", "word"], None]))
@pytest.mark.parametrize("is_decided", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        _another_column,
        _another_column_in_a_struct,
        lambda url: DeltaTable(url).alter.set_table_description("totals by user"),
        lambda url: DeltaTable(url).alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"}),
        lambda url: DeltaTable(url).alter.set_column_metadata("word", {"comment": "said"}),
    ],
    ids=["column", "nested", "description", "property", "comment"],
)
def test_a_change_that_leaves_room_for_the_rows_stops_nothing(
    url: str, change: Callable[[str], None], keys: list[str] | None, is_decided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = opened(DeltaSink("out", url, keys, create=True))
    writer.write(0, {1: "a"})
    handle = writer.prepared(1, {1: "a", 2: "b"})
    if is_decided:
        writer.sink.confirm(writer.query, 1, [handle])
    change(url)
    if not is_decided:
        writer.sink.confirm(writer.query, 1, [handle])
    writer.sink.commit(writer.query, 1, [handle])
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert writer.sink.open(writer.query, SCHEMA) == 1
    writer.write(2, {1: "a", 3: "c"})
    once, twice = [(1, "a"), (2, "b"), (3, "c")], [(1, "a"), (1, "a"), (1, "a"), (2, "b"), (3, "c")]
    assert writer.shown() == (once if keys else twice)


def test_an_upsert_leaves_columns_alone_that_it_has_not(url: str) -> None:
    """What others put into a column of their own stays, as in PostgreSQL; new rows have null there."""
    schema = pa.schema([*SCHEMA, pa.field("more", pa.string())])
    DeltaTable.create(url, schema)
    write_deltalake(url, pa.table([[1, 2], ["a", "b"], ["x", "y"]], schema=schema), mode="append")
    writer = opened(DeltaSink("out", url, ["key"]))
    writer.write(0, {1: "A", 3: "C"})
    shown = DeltaTable(url).to_pyarrow_table().sort_by("key").to_pylist()
    assert [tuple(row.values()) for row in shown] == [(1, "A", "x"), (2, "b", "y"), (3, "C", None)]


def _remake(url: str, versions: int, *, all_files: bool) -> None:
    """Make another table in the place of one."""
    shutil.rmtree(url if all_files else Path(url, "_delta_log"))
    DeltaTable.create(url, SCHEMA)
    for i in range(versions):
        write_deltalake(url, pa.table([[100 + i], ["of another"]], schema=SCHEMA), mode="append")


def _set_back(url: str, versions: int) -> None:
    """Bring back a backup of its files, and let others go on after it."""
    shutil.rmtree(Path(url, "_delta_log"))
    shutil.copytree(Path(f"{url}-backup", "_delta_log"), Path(url, "_delta_log"))
    for i in range(versions):
        write_deltalake(url, pa.table([[100 + i], ["of others"]], schema=SCHEMA), mode="append")


@pytest.mark.parametrize(
    ("change", "said", "newest"),
    [
        *(
            (partial(_remake, versions=versions, all_files=all_files), r"recreated|just written are gone", -1)
            for versions in (0, 9)
            for all_files in cases([True, False])
        ),
        *((partial(_set_back, versions=versions), "rolled back to an older version", 0) for versions in (0, 1, 9)),
    ],
)
@pytest.mark.parametrize("is_decided", [True, False])
def test_a_table_that_lacks_what_was_committed_gets_no_rows_behind_the_gap(
    url: str, writer: Writer, change: Callable[[str], None], said: str, newest: int, is_decided: bool
) -> None:
    """Made anew, or from a backup, with fewer versions or with more: nothing looks as if it did not."""
    for batch in range(3):
        writer.write(batch, {batch: "a"})
        if batch == 0:
            shutil.copytree(url, f"{url}-backup")
    handle = writer.prepared(3, {3: "b"})
    if is_decided:
        writer.sink.confirm(writer.query, 3, [handle])
    change(url)
    shown = writer.shown()
    step = writer.sink.commit if is_decided else writer.sink.confirm
    with pytest.raises(HoldfastError, match=said):
        step(writer.query, 3, [handle])
    assert writer.shown() == shown
    assert writer.sink.open(writer.query, SCHEMA) == newest, "by which the next start knows"


def test_a_driver_with_many_sinks_knows_each_of_their_tables(tmp_path: Path) -> None:
    """However many others it has used since, and with other credentials: what it committed must not go unnoticed."""
    writers = [opened(DeltaSink("out", f"{tmp_path}/{i}", create=True)) for i in range(20)]
    for batch in range(2):
        for writer in writers:
            writer.write(batch, {batch: "a"})
    for number, writer in enumerate(writers):
        _remake(writer.sink.url, 1, all_files=True)
        if number % 2:
            writer.query = replace(writer.query, options={"token": "another"})
        handle = writer.prepared(2, {2: "b"})
        with pytest.raises(StateLostError, match="dropped and recreated"):
            writer.sink.confirm(writer.query, 2, [handle])
        with pytest.raises(StateLostError, match="dropped and recreated"):
            writer.sink.commit(writer.query, 2, [handle])
        assert writer.shown() == [(100, "of another")]


def test_a_driver_with_many_sinks_reads_no_log_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tables take turns: a log is as long as its table has files, and each micro-batch would read all."""
    writers = [opened(DeltaSink("out", f"{tmp_path}/{i}", create=True)) for i in range(20)]
    monkeypatch.setattr(tables, "DeltaTable", None)
    for batch in range(2):
        for writer in writers:
            writer.write(batch, {batch: "a"})
    monkeypatch.undo()
    assert all(writer.shown() == [(0, "a"), (1, "a")] for writer in writers)


def test_no_table_is_made_where_nothing_was_decided(url: str) -> None:
    """The sink was given another URL after its first decision: refused, and nothing is left there."""
    writer = opened(DeltaSink("out", url, create=True))
    other = replace(writer.sink, url=f"{url}-2")
    with pytest.raises(StateLostError, match="never written to this URL"):
        other.open(replace(writer.query, was_shown=-1), SCHEMA)
    assert not list(Path(other.url).glob("**/*"))


def test_a_table_that_was_dropped_is_said_to_be_gone(url: str, writer: Writer) -> None:
    writer.write(0, {0: "a"})
    handle = writer.prepared(1, {1: "b"})
    writer.sink.confirm(writer.query, 1, [handle])
    kept = Path(url, "_delta_log").rename(f"{url}_log")
    for step in (writer.sink.confirm, writer.sink.commit):
        with pytest.raises(StateLostError, match="dropped or moved"):
            step(writer.query, 1, [handle])
        assert not Path(url, "_delta_log").exists()
        # Who learnt that it is gone asks anew.
        kept.rename(Path(url, "_delta_log"))
        writer.sink.open(writer.query, SCHEMA)
        kept = Path(url, "_delta_log").rename(f"{url}_log")
    kept.rename(Path(url, "_delta_log"))
    writer.sink.commit(writer.query, 1, [handle])
    assert writer.shown() == [(0, "a"), (1, "b")]


def test_a_table_changed_after_the_decision_gets_no_rows_that_do_not_fit(url: str, writer: Writer) -> None:
    """The decision stands: the rows come when the table is as it was."""
    writer.write(0, {0: "a"})
    handle = writer.prepared(1, {1: "b"})
    writer.sink.confirm(writer.query, 1, [handle])
    version = DeltaTable(url).version()
    _overwrite(url)
    with pytest.raises(SchemaMismatchError, match=r"after a micro-batch was decided.*no such column"):
        writer.sink.commit(writer.query, 1, [handle])
    with pytest.raises(SchemaMismatchError, match="no such column"):
        writer.sink.open(writer.query, SCHEMA)
    DeltaTable(url).restore(version)
    writer.sink.open(writer.query, SCHEMA)
    writer.sink.commit(writer.query, 1, [handle])
    assert writer.shown() == [(0, "a"), (1, "b")]


def _text_for_numbers(url: str) -> None:
    table = pa.table({"key": ["a"], "word": ["a"]})
    write_deltalake(url, table, mode="overwrite", schema_mode="overwrite")


def _no_nulls(url: str) -> None:
    schema = pa.schema([SCHEMA.field(0), SCHEMA.field(1).with_nullable(False)])
    write_deltalake(url, pa.table([[0], ["a"]], schema=schema), mode="overwrite", schema_mode="overwrite")


def _new_column_without_nulls(url: str) -> None:
    schema = pa.schema([*SCHEMA, pa.field("more", pa.string(), nullable=False)])
    write_deltalake(url, pa.table([[0], ["a"], ["x"]], schema=schema), mode="overwrite", schema_mode="overwrite")


def _partitions(url: str) -> None:
    write_deltalake(
        url, pa.table([[0], ["a"]], schema=SCHEMA), mode="overwrite", schema_mode="overwrite", partition_by=["key"]
    )


CHANGES, OF_ALL_FILES = [_overwrite, _text_for_numbers, _no_nulls], [_new_column_without_nulls, _partitions]


@pytest.mark.parametrize(
    ("step", "change"),
    [
        *(("open", change) for change in CHANGES),
        *((step, change) for step in ("confirm", "commit") for change in [*CHANGES, *OF_ALL_FILES]),
    ],
)
def test_a_process_that_knows_the_table_only_as_it_is_now_shows_no_rows_that_do_not_fit(
    url: str, writer: Writer, step: str, change: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver died after the decision; or a data source begins and commits a micro-batch in two processes."""
    processes = itertools.count(1)

    def in_another_process() -> None:
        number = -next(processes)
        monkeypatch.setattr(os, "getpid", lambda: number)

    writer.write(0, {0: "a"})
    handle = writer.prepared(1, {1: None})
    version = DeltaTable(url).version()
    in_another_process()
    if step != "confirm":
        writer.sink.confirm(writer.query, 1, [handle])
        in_another_process()
    change(url)
    before = DeltaTable(url).version()
    with pytest.raises(HoldfastError, match=r"lack a column|no such column|other columns|type|null|NOT NULL"):  # noqa: PT012
        if step == "open":
            writer.sink.open(writer.query, SCHEMA)
        (writer.sink.confirm if step == "confirm" else writer.sink.commit)(writer.query, 1, [handle])
    assert DeltaTable(url).version() == before
    DeltaTable(url).restore(version)
    in_another_process()
    if step == "open":
        writer.sink.open(writer.query, SCHEMA)
    writer.sink.confirm(writer.query, 1, [handle])
    writer.sink.commit(writer.query, 1, [handle])
    assert writer.shown() == [(0, "a"), (1, None)]


def test_a_log_that_was_cleaned_up_is_the_same_table(url: str) -> None:
    """The newest commit that the query knows may go after a month, where others went on."""
    writer = opened(DeltaSink("out", url, create=True))
    for batch in range(2):
        writer.write(batch, {batch: "a"})
    write_deltalake(url, pa.table([[2], ["a"]], schema=SCHEMA), mode="append")
    DeltaTable(url).create_checkpoint()
    for version in range(3):
        Path(url, "_delta_log", f"{version:020}.json").unlink()
    writer.write(2, {3: "a"})
    assert writer.shown() == [(key, "a") for key in range(4)]


SCHEMA = pa.schema([("key", pa.int64()), ("word", pa.string())])


#: Keys and words, or columns.
Rows = Mapping[int | None, str | None] | Sequence[Any]


class Writer:
    """A query that writes to a table."""

    def __init__(self, sink: DeltaSink, schema: pa.Schema = SCHEMA) -> None:
        self.sink, self.schema = sink, schema
        self.query = SinkQuery(sink.name, clock.new_uuid())

    def prepared(self, batch_id: int, rows: Rows, partition: int = 0) -> Handle:
        columns = [list(rows), list(rows.values())] if isinstance(rows, Mapping) else list(rows)
        return prepared(self.sink, self.query, pa.record_batch(columns, schema=self.schema), batch_id, partition)

    def write(self, batch_id: int, rows: Rows) -> Handle:
        handle = self.prepared(batch_id, rows)
        self.sink.confirm(self.query, batch_id, [handle])
        self.sink.commit(self.query, batch_id, [handle])
        return handle

    def shown(self) -> list[tuple[Any, ...]]:
        rows = DeltaTable(self.sink.url).to_pyarrow_table().select(SCHEMA.names).to_pylist()
        return sorted((tuple(row.values()) for row in rows), key=str)

    def rows(self) -> list[dict[str, Any]]:
        return list(DeltaTable(self.sink.url).to_pyarrow_table().to_pylist())


def opened(sink: DeltaSink, schema: pa.Schema = SCHEMA) -> Writer:
    writer = Writer(sink, schema)
    writer.sink.open(writer.query, schema)
    return writer
