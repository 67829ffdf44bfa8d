"""What a Delta table will not take is found before the decision: in the table's own words, and as what it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from holdfast import clock
from holdfast.errors import HoldfastError, InvalidArgumentError, SchemaMismatchError, UnavailableError
from holdfast.snapshotter.storage.options import parse_url
from holdfast.spark_integration.sinks.delta import commits
from holdfast.spark_integration.sinks.delta.partitions import described
from holdfast.spark_integration.sinks.delta.sink import DeltaSink
from holdfast.spark_integration.sinks.two_phase_sink import SinkQuery
from tests.unit.spark_integration.sinks.delta_writer import SCHEMA, opened


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "table")


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


@pytest.mark.parametrize("keys", [None, ["key"]], ids=["append", "upsert"])
@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_table_that_asks_for_what_the_library_does_not_do_is_refused_at_the_start(
    url: str, name: str, keys: list[str] | None
) -> None:
    """For good, not as if the table were away: after the decision it would refuse the rows at each start."""
    protocol, word = PROTOCOLS[name]
    _made(url, protocol, {}, {})
    with pytest.raises(InvalidArgumentError, match=word) as raised:
        opened(DeltaSink("out", url, keys))
    assert not raised.value.retryable
    assert not list(Path(url).rglob("*.parquet"))


_IDENTITY = {"delta.identity.start": 1, "delta.identity.step": 1}


@pytest.mark.parametrize("keys", [None, ["key"]], ids=["append", "upsert"])
@pytest.mark.parametrize(
    ("protocol", "metadata", "settings", "word"),
    [
        ({"minReaderVersion": 1, "minWriterVersion": 6}, _IDENTITY, {}, "an identity column"),
        (None, _IDENTITY, {}, "an identity column"),
        (None, {"delta.generationExpression": "key + 1"}, {}, "a generated column"),
        (None, {}, {"delta.columnMapping.mode": "name"}, "column mapping"),
    ],
)
def test_a_table_whose_log_says_what_this_writer_does_not_do_is_refused_at_the_start(
    url: str,
    protocol: dict[str, Any] | None,
    metadata: dict[str, Any],
    settings: dict[str, str],
    word: str,
    keys: list[str] | None,
) -> None:
    _made(url, protocol, metadata, settings)
    with pytest.raises(InvalidArgumentError, match=word):
        opened(DeltaSink("out", url, keys))


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
    with pytest.raises(UnavailableError, match=r"other writers won.*concurrent transactions added new data"):
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


def test_a_row_may_have_long_values_where_no_folder_is_made(url: str) -> None:
    """What is appended stands in the table's own folder."""
    writer = opened(DeltaSink("out", url, partition_by=["word"], create=True))
    writer.write(0, {1: "ü" * 500})
    assert writer.shown() == [(1, "ü" * 500)]


def test_an_object_store_has_room_in_a_key_as_a_whole() -> None:
    """A key has 1,024 bytes, whatever is between its slashes."""
    split = described(["a", "b"], ["k"], parse_url("s3://bucket/some/table"))

    def parts(a: int, b: int) -> object:
        return list(split(pa.table({"k": [1], "a": ["x" * a], "b": ["x" * b]})))

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
