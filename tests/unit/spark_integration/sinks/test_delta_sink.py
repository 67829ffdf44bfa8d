"""A Delta table is checked before anything is written, shared with other writers, and upserted by key."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from holdfast import clock, sinks
from holdfast.errors import (
    HoldfastError,
    InvalidArgumentError,
    SchemaMismatchError,
    StateLostError,
    UnavailableError,
)
from holdfast.snapshotter.storage.options import parse_url
from holdfast.spark_integration.sinks.delta import commits, tables
from holdfast.spark_integration.sinks.delta.partitions import described, statistics
from holdfast.spark_integration.sinks.delta.sink import DeltaSink
from holdfast.spark_integration.sinks.delta.tables import KeptTable, storage_options
from holdfast.spark_integration.sinks.two_phase_sink import SinkQuery
from tests.tiers import cases
from tests.unit.spark_integration.sinks.test_delta_changes import SCHEMA, Writer, opened


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "table")


def _uninstall(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("commits", "features", "tables"):
        monkeypatch.delitem(sys.modules, f"holdfast.spark_integration.sinks.delta.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "deltalake", None)


def test_without_deltalake_the_definition_and_the_start_say_what_to_install(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers write without the package; a driver that has unpickled the sink needs it when a query starts."""
    _uninstall(monkeypatch)
    with pytest.raises(InvalidArgumentError, match=r"pip install 'holdfast-spark\[delta\]'.*missing=deltalake"):
        sinks.delta("out", url)
    writer = Writer(DeltaSink("out", url, create=True))
    with pytest.raises(InvalidArgumentError, match=r"pip install 'holdfast-spark\[delta\]'"):
        writer.sink.open(writer.query, SCHEMA)
    assert not Path(url).exists()
    writer.prepared(0, {1: "a"})


def test_a_table_is_made_only_if_wanted(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="create=True"):
        opened(DeltaSink("out", url))
    assert not Path(url).exists()
    opened(DeltaSink("out", url, create=True))
    opened(DeltaSink("other", url))


@pytest.mark.parametrize("name", ["a%20b", "file://a%20b", "a\\b", "a\tb"])
def test_a_folder_that_deltalake_takes_for_another_is_refused(tmp_path: Path, name: str) -> None:
    """It decodes names, so that the log would stand in another folder than the files that it tells of."""
    where = f"{tmp_path}/{name}" if "://" not in name else name.replace("://", f"://{tmp_path}/")
    with pytest.raises(InvalidArgumentError, match="misreads this URL"):
        opened(DeltaSink("out", where, create=True))
    assert not list(tmp_path.iterdir())
    for number, scheme in enumerate(("", "file:", "file://")):
        opened(DeltaSink(f"out{number}", f"{scheme}{tmp_path}/100% a#b", create=True))
    assert [folder.name for folder in tmp_path.iterdir()] == ["100% a#b"]


@pytest.mark.parametrize(
    ("settings", "upsert", "word"),
    [
        ({"delta.setTransactionRetentionDuration": "interval 1 days"}, False, "expiry of transaction ids"),
        ({"delta.enableChangeDataFeed": "true"}, True, "change data feed"),
        ({"delta.appendOnly": "true"}, True, "append-only"),
    ],
)
def test_tables_that_ask_more_are_refused(url: str, settings: dict[str, str | None], upsert: bool, word: str) -> None:
    """What the sink would break is refused when the query starts."""
    DeltaTable.create(url, SCHEMA, configuration=settings)
    with pytest.raises(InvalidArgumentError, match=word):
        opened(DeltaSink("out", url, keys=["key"] if upsert else None))
    if upsert:
        opened(DeltaSink("out", url)).write(0, {1: "a"})


def test_another_column_of_the_table_is_named(url: str) -> None:
    DeltaTable.create(url, SCHEMA.append(pa.field("extra", pa.int32(), nullable=False)))
    with pytest.raises(SchemaMismatchError) as raised:
        opened(DeltaSink("out", url))
    assert raised.value.facts["column"] == "extra"


@pytest.mark.parametrize("keys", [None, ["key"], ["word"]])
def test_text_that_is_not_utf8_fails_the_task(url: str, keys: list[str] | None) -> None:
    """Merged after the decision it would end the driver's process at each start: the library of Delta aborts it."""
    writer = opened(DeltaSink("out", url, create=True, keys=keys))
    with pytest.raises(InvalidArgumentError, match=r"column 'word' of the results has .* make_valid_utf8"):
        writer.prepared(0, [[1], pa.array([b"\xff"]).cast(pa.string(), safe=False)])


def test_nulls_where_none_may_be_fail_the_micro_batch(url: str) -> None:
    DeltaTable.create(url, pa.schema([pa.field("key", pa.int64(), nullable=False), ("word", pa.string())]))
    writer = opened(DeltaSink("out", url))
    writer.write(0, {1: None})
    with pytest.raises(InvalidArgumentError) as raised:
        writer.write(1, {None: "a"})
    assert raised.value.facts["column"] == "key"
    assert writer.shown() == [(1, None)]


@pytest.mark.slow(1)
def test_other_writers_of_the_table_disturb_nothing(url: str) -> None:
    """They append, optimise and vacuum between and under the sink's commits."""
    writer = opened(DeltaSink("out", url, create=True))
    other = opened(DeltaSink("other", url))
    for batch in range(3):
        handle = writer.prepared(batch, {batch: "mine"})
        write_deltalake(url, pa.table([[100 + batch], ["by hand"]], schema=SCHEMA), mode="append")
        other.write(batch, {200 + batch: "of another sink"})
        writer.sink.commit(writer.query, batch, [handle])
    handle = writer.prepared(3, {3: "mine"})
    DeltaTable(url).optimize.compact()
    DeltaTable(url).vacuum(retention_hours=1, enforce_retention_duration=False, dry_run=False)
    writer.sink.commit(writer.query, 3, [handle])
    mine = [(batch, "mine") for batch in range(4)]
    assert [row for row in writer.shown() if row[1] == "mine"] == mine
    assert len(writer.shown()) == 10
    for batch in (0, 3):  # long compacted, and the newest
        with pytest.raises(StateLostError):
            writer.sink.commit(writer.query, batch, [writer.prepared(batch, {9: "another attempt"})])


@pytest.mark.parametrize("name", ["__row", "row", "key 0", 'a"b', "a.b", "Key Of", "select"])
def test_a_key_may_have_any_name(url: str, name: str) -> None:
    """A failure to merge after the decision would stop the query for good."""
    writer = opened(DeltaSink("out", url, [name], create=True), pa.schema([(name, pa.int64()), ("order", pa.int64())]))
    writer.write(0, [[1, 1, 2], [1, 2, 3]])
    assert sorted(tuple(row.values()) for row in writer.rows()) == [(1, 2), (2, 3)]


@pytest.mark.parametrize(("name", "apart"), [("a`b", False), ("__delta_rs_source", False), ("a:b", True), ("\t", True)])
def test_a_name_that_cannot_be_merged_is_refused_at_the_start(url: str, name: str, apart: bool) -> None:
    with pytest.raises(SchemaMismatchError, match="rename"):
        DeltaSink("out", url, keys=["k"], partition_by=[name] if apart else [], create=True).open(
            SinkQuery("out", clock.new_uuid()), pa.schema([("k", pa.int64()), (name, pa.int64())])
        )
    assert not Path(url).exists()


def test_an_old_micro_batch_is_known_by_the_log(url: str) -> None:
    writer = opened(DeltaSink("out", url, create=True))
    first = writer.write(0, {0: "a"})
    writer.write(1, {1: "b"})
    writer.sink.commit(writer.query, 0, [first])
    assert writer.shown() == [(0, "a"), (1, "b")]


def test_two_drivers_commit_one_micro_batch(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zombie driver commits on an old view of the table: Delta refuses it, and the rows are there once."""
    writer = opened(DeltaSink("out", url, create=True))
    handle = writer.prepared(0, {0: "a"})
    monkeypatch.setattr(commits.TableCommits, "_newest", lambda *_args: -1)  # it looked before the other committed
    stale = DeltaTable(url)
    monkeypatch.setattr("holdfast.spark_integration.sinks.delta.tables.KeptTable.current", lambda _kept: stale)
    monkeypatch.setattr(commits, "_TRIES", 2)
    version = DeltaTable(url).version()
    done = [commits.Transaction(f"holdfast/out/{writer.query.query_id}", 0)]
    properties = commits.CommitProperties(app_transactions=done)
    write_deltalake(url, pa.table([[0], ["a"]], schema=SCHEMA), mode="append", commit_properties=properties)
    with pytest.raises(UnavailableError, match="other writers committed"):
        writer.sink.commit(writer.query, 0, [handle])
    assert DeltaTable(url).version() == version + 1
    assert writer.shown() == [(0, "a")]


def test_upserts_take_the_place_of_rows(url: str) -> None:
    writer = opened(DeltaSink("out", url, create=True, keys=["key"]))
    writer.write(0, {1: "a", 2: "b", None: "c"})
    handles = [writer.prepared(1, {2: "B", None: "C"}), writer.prepared(1, {3: "d", 2: "last"}, partition=1)]
    writer.sink.commit(writer.query, 1, handles)
    assert writer.shown() == [(1, "a"), (2, "last"), (3, "d"), (None, "C")]
    assert not [path for path in Path(url, "_holdfast").rglob("*") if path.is_file() and "queries" not in path.parts]


def test_an_empty_partition_is_null_as_a_key_too(url: str) -> None:
    """Delta's log knows no empty text: once the table is compacted, such a row would be found by its key no more."""
    schema = pa.schema([*SCHEMA, pa.field("n", pa.int64())])
    writer = opened(DeltaSink("out", url, ["key", "word"], partition_by=["word"], create=True), schema)
    for batch, words in enumerate((["", "a"], ["", None], ["", "a"])):
        writer.write(batch, [[1, 1], words, [batch, batch + 10]])
        DeltaTable(url).optimize.compact()
    assert sorted(writer.rows(), key=str) == [{"key": 1, "word": "a", "n": 12}, {"key": 1, "word": None, "n": 2}]


@pytest.mark.parametrize(
    ("precision", "key"), [(15, "9" * 15), (18, "12345678901234.5678"), (20, "18446744073709551615"), (38, "9" * 38)]
)
def test_an_upsert_finds_long_decimals(url: str, precision: int, key: str) -> None:
    """`deltalake` bounds its files' decimals by floating-point numbers, which may leave out the one that is there."""
    decimals = pa.decimal128(precision, len(key.partition(".")[2]))
    schema = pa.schema([pa.field("key", decimals), pa.field("n", pa.int64())])
    writer = opened(DeltaSink("out", url, ["key"], create=True), schema)
    for batch in range(3):
        writer.write(batch, [pa.array([Decimal(key)], decimals), [batch]])
    assert writer.rows() == [{"key": Decimal(key), "n": 2}]


@pytest.mark.parametrize("keys", [None, ["key"]])
def test_commits_are_synced_before_files_go(url: str, keys: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partitions with blanks and the like among them, which the log and the disk spell in two ways."""
    synced: list[Path] = []
    monkeypatch.setattr(tables, "_sync", lambda path: synced.append(Path(path)))
    writer = opened(DeltaSink("out", url, keys, partition_by=["word"], create=True))
    writer.write(0, {1: "plain", 2: "a b", 3: "ü:%"})
    files = [path for path in Path(url).rglob("*.parquet") if "_holdfast" not in path.parts]
    assert len(files) == 3
    log = Path(url, "_delta_log")
    expected = {*files, *(path.parent for path in files), log / f"{1:020}.json", log, Path(url)}
    assert set(synced) == expected
    assert len(synced) == len(expected)


def test_statistics_are_right_or_left_out() -> None:
    """A reader passes over files by them: a bound that is too narrow loses rows."""
    long = "x" * 40
    table = pa.table(
        {
            "i": pa.array([3, None, 1]),
            "nan": [1.0, math.nan, 2.0],
            "inf": [1.0, math.inf, 2.0],
            "s": ["b", "", None],
            "long": [long, "y" * 40, long],
            "empty": pa.array([None] * 3, pa.int64()),
            "day": [date(2020, 1, 2), date(1969, 1, 1), None],
            "at": pa.array([datetime(2020, 1, 1, 1, 2, 3, 456789, UTC)] * 3, pa.timestamp("us", "UTC")),
            "d": pa.array([Decimal("1.23"), Decimal("-4.50"), None], pa.decimal128(10, 2)),
            "wide": pa.array([Decimal(1), Decimal(2), None], pa.decimal128(38, 2)),
            "list": [[1], [], None],
            "bytes": [b"a", b"b", None],
            "bool": [True, False, None],
        }
    )
    found = json.loads(statistics(table))
    assert found["numRecords"] == 3
    at = {"at": "2020-01-01T01:02:03.456789Z"}
    assert found["minValues"] == at | {"i": 1, "s": "", "long": "x" * 32, "day": "1969-01-01", "d": -4.5}
    most = {"i": 3, "s": "b", "long": "y" * 32 + "\U0010ffff", "day": "2020-01-02", "d": 1.23}
    assert found["maxValues"] == at | most
    assert found["nullCount"]["empty"] == 3
    assert "list" not in found["nullCount"]


def test_options_of_storage_have_deltas_names() -> None:
    given = {"key": "k", "secret": "s", "client_kwargs.region_name": "r", "delta.timeout": "9s"}
    theirs = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "r", "timeout": "9s"}
    assert storage_options("s3://b/t", given) == theirs
    for endpoint in ("endpoint_url", "client_kwargs.endpoint_url"):
        there = {"AWS_ENDPOINT_URL": "http://h:1", "AWS_ALLOW_HTTP": "true"}
        assert storage_options("s3://b/t", given | {endpoint: "http://h:1"}) == theirs | there
    assert storage_options("s3://b/t", {"anon": "true"}) == {"AWS_SKIP_SIGNATURE": "true"}
    assert storage_options("s3://b/t", {"requester_pays": "false", "client_kwargs.verify": "true"}) == {}


def test_an_endpoint_of_the_environment_may_be_without_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """holdfast's own client takes it as it is; `deltalake` said "URL scheme is not allowed"."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://h:1")
    assert KeptTable("s3://b/t").storage_options == storage_options("s3://b/t", {}) == {"AWS_ALLOW_HTTP": "true"}
    assert storage_options("s3://b/t", {"endpoint_url": "https://h"}) == {"AWS_ENDPOINT_URL": "https://h"}


@pytest.mark.parametrize(
    ("option", "value", "instead"),
    [
        ("profile", "mine", "AWS_ACCESS_KEY_ID"),
        ("client_kwargs.verify", "false", "ALLOW_INVALID_CERTIFICATES"),
        ("requester_pays", "true", "AWS_REQUEST_PAYER"),
    ],
)
def test_options_that_only_one_client_of_s3_knows_are_refused(option: str, value: str, instead: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"set delta\.{instead} too.*{option}"):
        storage_options("s3://b/t", {option: value})
    assert storage_options("s3://b/t", {option: value, f"delta.{instead}": "x"}) == {instead: "x"}


def test_nested_columns_of_a_new_table_take_nulls(url: str) -> None:
    """Spark says of a literal in a struct that it is never null; the next start must not stumble over it."""
    never = pa.struct([pa.field("z", pa.string(), nullable=False)])
    schema = pa.schema(
        [("key", pa.int64()), ("inner", never), ("many", pa.list_(pa.field("e", never, nullable=False)))]
    )
    sink = DeltaSink("out", url, create=True)
    query = SinkQuery("out", clock.new_uuid())
    for _ in range(2):
        assert sink.open(query, schema) == -1


def _made(url: str, protocol: dict[str, Any] | None, metadata: dict[str, Any], settings: dict[str, str]) -> None:
    """Make a table as another writer, such as Spark's, does; `metadata`: of its first column."""
    DeltaTable.create(url, SCHEMA)
    (log,) = Path(url, "_delta_log").glob("*.json")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if "protocol" in line and protocol is not None:
            line["protocol"] = protocol
        if "metaData" in line:
            schema = json.loads(line["metaData"]["schemaString"])
            schema["fields"][0]["metadata"] = metadata
            line["metaData"]["schemaString"] = json.dumps(schema)
            line["metaData"]["configuration"] = settings
    log.write_text("\n".join(map(json.dumps, lines)))


def _features(*features: str, reader: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {"minReaderVersion": 3 if reader else 1, "minWriterVersion": 7, "writerFeatures": features}
    return found | ({"readerFeatures": features} if reader else {})


PROTOCOLS: dict[str, tuple[dict[str, Any], str]] = {
    "legacy identity columns": ({"minReaderVersion": 2, "minWriterVersion": 6}, "IdentityColumns"),
    "identity columns": (_features("identityColumns"), "IdentityColumns"),
    "row tracking": (_features("rowTracking"), "rowTracking"),
    "row tracking, reader 3": (_features("rowTracking") | {"minReaderVersion": 3, "readerFeatures": []}, "rowTracking"),
    "unknown": (_features("somethingNew"), "somethingNew"),
    "unknown to readers": (_features("somethingNew", reader=True), "somethingNew"),
    "reader 4": ({"minReaderVersion": 4, "minWriterVersion": 7}, "protocol action"),
    "reader 4 with features": (
        {"minReaderVersion": 4, "minWriterVersion": 7, "readerFeatures": [], "writerFeatures": []}, "reader version",
    ),
    "writer 8": ({"minReaderVersion": 1, "minWriterVersion": 8}, "[Ww]riter"),
    "of a catalogue": (_features("catalogManaged", reader=True), "catalog-managed"),
    "of a catalogue, before": (_features("catalogOwned-preview", reader=True), "catalog-managed"),
}  # fmt: skip


_IDENTITY = {"delta.identity.start": 1, "delta.identity.step": 1}
#: A table's protocol, the metadata of its first column, and its settings.
Foreign = tuple[dict[str, Any] | None, dict[str, Any], dict[str, str]]
FOREIGN: list[tuple[Foreign, str]] = [
    *(((protocol, {}, {}), word) for protocol, word in PROTOCOLS.values()),
    (({"minReaderVersion": 1, "minWriterVersion": 6}, _IDENTITY, {}), "an identity column"),
    ((None, _IDENTITY, {}), "an identity column"),
    ((None, {"delta.generationExpression": "key + 1"}, {}), "a generated column"),
    ((None, {}, {"delta.columnMapping.mode": "name"}), "column mapping"),
]


@pytest.mark.parametrize("keys", [None, ["key"]], ids=["append", "upsert"])
@pytest.mark.parametrize(("made", "word"), FOREIGN, ids=[*PROTOCOLS, *(word for _, word in FOREIGN[len(PROTOCOLS) :])])
def test_a_table_that_asks_for_what_nobody_here_does_is_refused_at_the_start(
    url: str, made: Foreign, word: str, keys: list[str] | None
) -> None:
    """For good, not as if the table were away: after the decision it would refuse the rows at each start."""
    _made(url, *made)
    with pytest.raises(InvalidArgumentError, match=word) as raised:
        opened(DeltaSink("out", url, keys))
    assert not raised.value.retryable
    assert not list(Path(url).rglob("*.parquet"))


@pytest.mark.parametrize("keys", [None, ["key"]], ids=["append", "upsert"])
@pytest.mark.parametrize("is_decided", [True, False])
def test_a_feature_that_comes_while_the_query_runs_is_named(url: str, keys: list[str] | None, is_decided: bool) -> None:
    """Not as other writers who are faster: before the decision, and after it, when it cannot be helped any more."""
    DeltaTable.create(url, SCHEMA)
    writer = opened(DeltaSink("out", url, keys))
    handle = writer.prepared(0, {1: "a"})
    if is_decided:
        writer.sink.confirm(writer.query, 0, [handle])
    commit = {"protocol": {"minReaderVersion": 1, "minWriterVersion": 6}}
    Path(url, "_delta_log", f"{1:020}.json").write_text(json.dumps(commit))
    with pytest.raises(InvalidArgumentError, match="IdentityColumns") as raised:
        (writer.sink.commit if is_decided else writer.sink.confirm)(writer.query, 0, [handle])
    assert ("decided" in str(raised.value)) == is_decided


def test_who_loses_to_other_writers_for_long_is_told_what_they_did(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is worth another try, and what the library said is in the error."""
    writer = opened(DeltaSink("out", url, ["key"], create=True))
    handle = writer.prepared(0, {0: "a"})
    fit = commits.TableCommits._require_place

    def overtaken(*given: Any) -> None:
        fit(*given)
        write_deltalake(url, pa.table([[0], ["other"]], schema=SCHEMA), mode="append")

    monkeypatch.setattr(commits.TableCommits, "_require_place", overtaken)
    with pytest.raises(UnavailableError, match=r"other writers committed.*concurrent transactions added new data"):
        writer.sink.commit(writer.query, 0, [handle])


VALUES: dict[str, Callable[[int], str]] = {
    "letters": lambda room: "x" * room,
    "umlauts": lambda room: "ü" * (room // 6) + "y" * (room % 6),
    "slashes": lambda room: "/" * (room // 3) + "-" * (room % 3),
    "emoji": lambda room: "🙂" * (room // 12) + "~" * (room % 12),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_fits_no_folder_fails_the_task(url: str, name: str) -> None:
    """The merge, after the decision, would fail at each start; one byte less, and it does not."""
    sink, room = DeltaSink("out", url, ["key"], partition_by=["word"], create=True), 255 - len("word=")
    writer = opened(sink, pa.schema([*SCHEMA, pa.field("n", pa.int64())]))
    fits, too_long = [[[1, 2, 3], [VALUES[name](room + more), None, "short"], [7, 7, 7]] for more in (0, 1)]
    writer.write(0, fits)
    assert [row["word"] for row in writer.rows()].count(fits[1][0]) == 1
    with pytest.raises(SchemaMismatchError, match=r"too long.*column=word"):
        writer.prepared(1, too_long)


def test_a_text_that_a_folder_turns_into_null_fails_the_task(url: str) -> None:
    """Two rows would have one key, and the next of that key would be a third."""
    writer = opened(DeltaSink("out", url, ["key", "word"], partition_by=["word"], create=True))
    with pytest.raises(SchemaMismatchError, match=r"turn the partition.*into null.*column=word"):
        writer.prepared(0, {1: "__HIVE_DEFAULT_PARTITION__"})


def test_a_row_may_have_long_values_where_no_folder_is_made(url: str) -> None:
    """What is appended stands in the table's own folder."""
    writer = opened(DeltaSink("out", url, partition_by=["word"], create=True))
    writer.write(0, {1: "ü" * 500})
    assert writer.shown() == [(1, "ü" * 500)]


def test_an_object_store_has_room_in_a_key_as_a_whole() -> None:
    """A key has 1,024 bytes, whatever is between its slashes."""

    def parts(a: int, b: int) -> object:
        rows = pa.table({"k": [1], "a": ["x" * a], "b": ["x" * b]})
        return list(described(rows, ["a", "b"], ["k"], parse_url("s3://bucket/some/table")))

    assert parts(700, 200)
    for a, b in ((700, 300), (300, 700), (1000, 1)):
        with pytest.raises(SchemaMismatchError, match="too long"):
            parts(a, b)


def test_a_store_that_is_away_is_not_called_a_refusal(tmp_path: Path) -> None:
    """And the other way round: who waits for it may go on."""
    options = {"endpoint_url": "http://127.0.0.1:1", "key": "k", "secret": "s", "client_kwargs.region_name": "r"}
    sink = DeltaSink("out", "s3://bucket/table")
    with pytest.raises(HoldfastError) as raised:
        sink.open(SinkQuery("out", clock.new_uuid(), options=options | {"delta.max_retries": "0"}), SCHEMA)
    assert raised.value.retryable


DAYS = [-719_163, -719_162, 2_932_896, 2_932_897, 2**31 - 1]
SHOWN = slice(1, 3)


def schema_of(kind: pa.DataType) -> pa.Schema:
    """Return the columns of rows with a number and a date."""
    return pa.schema([("id", pa.int64()), ("at", kind)])


@pytest.mark.parametrize(
    ("keys", "partition_by", "kind"),
    [
        *((["id"], [], pa.date32()), (["id", "at"], [], pa.date32())),
        *((["id", "at"], ["at"], pa.date32()), (None, ["at"], pa.date32())),
        (["id", "at"], [], pa.timestamp("us", "UTC")),
        (["id"], [], pa.struct([("in", pa.list_(pa.date32()))])),
        (["id"], [], pa.map_(pa.string(), pa.date32())),
    ],
)
def test_a_date_that_no_table_can_show_is_met_before_the_decision(
    tmp_path: Path, keys: list[str] | None, partition_by: list[str], kind: pa.DataType
) -> None:
    """Decided, it would stop the query for good; in the log, as a partition's, the table could not be opened again."""

    def of(days: list[int]) -> pa.Array:
        if pa.types.is_timestamp(kind):  # beyond what a timestamp holds: the last one
            return pa.array([min(day * 86_400_000_000, 2**63 - 1) for day in days], pa.int64()).cast(kind)
        dates = pa.array(days, pa.int32()).cast(pa.date32())
        each = range(len(days) + 1)
        if pa.types.is_struct(kind):
            return pa.StructArray.from_arrays([pa.ListArray.from_arrays(each, dates)], ["in"]).cast(kind)
        return dates if kind == pa.date32() else pa.MapArray.from_arrays(each, ["day"] * len(days), dates)

    writer = opened(DeltaSink("out", str(tmp_path / "table"), keys, partition_by, create=True), schema_of(kind))
    for day in [*DAYS[: SHOWN.start], *DAYS[SHOWN.stop :]]:
        with pytest.raises(SchemaMismatchError, match="years 1 to 9999"):
            writer.prepared(0, [[0, 1], of([day, 0])])
    for batch in range(2):
        writer.write(batch, [[0, 1], of(DAYS[SHOWN])])
    assert DeltaTable(writer.sink.url).to_pyarrow_table().num_rows == (2 if keys else 4)


def test_appended_dates_may_be_of_any_year(tmp_path: Path) -> None:
    writer = opened(DeltaSink("out", str(tmp_path / "table"), create=True), schema_of(pa.date32()))
    writer.write(0, [list(range(len(DAYS))), pa.array(DAYS, pa.int32()).cast(pa.date32())])
    assert DeltaTable(writer.sink.url).to_pyarrow_table()["at"].cast(pa.int32()).to_pylist() == DAYS


#: Types of keys, each with values that it may have besides null.
TYPES: dict[str, tuple[pa.DataType, Sequence[Any]]] = {
    "boolean": (pa.bool_(), [True, False]),
    "long": (pa.int64(), [-(1 << 63), 0, 7]),
    "string": (pa.string(), ["a", "A", "a AND b", 'it\'s "x"']),
    "date": (pa.date32(), [date(1, 1, 1), date(2024, 2, 29)]),
    "timestamp": (pa.timestamp("us", "UTC"), [datetime(2024, 1, 1, 0, 0, 0, 1, UTC), datetime(1969, 1, 1, tzinfo=UTC)]),
    "decimal": (pa.decimal128(20, 2), [Decimal("-1.25"), Decimal("123456789012345678.99")]),
    "binary": (pa.binary(), [b"", b"\x00\xff"]),
}
APART = {"boolean", "long", "string", "date"}


def _micro_batches(rng: random.Random, keys: Sequence[str], count: int, rows: int) -> list[list[dict[str, Any]]]:
    """Return rows whose keys are drawn from all values and null, and whose value tells which row it is."""
    drawn = [[None, *TYPES[key][1]] for key in keys]
    return [
        [
            {**{f"k{i}": rng.choice(values) for i, values in enumerate(drawn)}, "n": 1000 * batch + row}
            for row in range(rows)
        ]
        for batch in range(count)
    ]


KEYS = [
    *(("boolean", "long"), ("long", "boolean"), ("boolean", "boolean", "string"), ("string", "date", "long")),
    *(("timestamp", "decimal"), ("decimal", "boolean"), ("binary", "string")),
    ("date", "binary", "boolean", "timestamp"),
]
#: Without a partition column, and with each key in turn that may be one.
CASES = [(keys, part) for keys in KEYS for part in [None, *(i for i, key in enumerate(keys) if key in APART)]]


@pytest.mark.slow(20)
@pytest.mark.parametrize(
    ("keys", "part"),
    cases(CASES, quick=5),
    ids=lambda each: each if isinstance(each, int) else "-".join(each or ["whole"]),
)
def test_rows_of_several_keys_replace_their_own(tmp_path: Path, keys: tuple[str, ...], part: int | None) -> None:
    """A null equals a null, in whichever key; a row never takes the place of one with another key."""
    url, named = str(tmp_path / "table"), [f"k{i}" for i in range(len(keys))]
    schema = pa.schema([*((name, TYPES[key][0]) for name, key in zip(named, keys, strict=True)), ("n", pa.int64())])
    writer = opened(DeltaSink("out", url, named, [] if part is None else [named[part]], create=True), schema)
    expected: dict[tuple[Any, ...], int] = {}
    for batch, rows in enumerate(_micro_batches(random.Random(7), keys, count=4, rows=9)):
        writer.write(batch, pa.RecordBatch.from_pylist(rows, schema).columns)
        expected |= {tuple(row[name] for name in named): row["n"] for row in rows}
        shown = writer.rows()
        assert {tuple(row[name] for name in named): row["n"] for row in shown} == expected
        assert len(shown) == len(expected)
