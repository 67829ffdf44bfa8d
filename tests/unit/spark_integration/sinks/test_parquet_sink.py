"""Manifests are merged and never trusted; other readers see what counts, and unaware ones nothing."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from holdfast import clock
from holdfast.backends import stored_file
from holdfast.backends.schema import encode_schema
from holdfast.errors import (
    ConflictError,
    CorruptionError,
    InvalidArgumentError,
    NotFoundError,
    SchemaMismatchError,
    StateLostError,
    UnavailableError,
)
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.sinks.delta.sink import DeltaSink
from holdfast.spark_integration.sinks.files import parquet as sink_module
from holdfast.spark_integration.sinks.files.parquet import (
    FILES,
    KIND,
    ManifestName,
    Manifests,
    ParquetSink,
    found,
    in_force,
    parquet_files,
    read_parquet,
)
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkQuery
from tests.damage import flipped
from tests.sink_drivers import prepared

SCHEMA = pa.schema([("key", pa.int64()), ("word", pa.string())])


class Writer:
    """A query that writes to a sink."""

    def __init__(self, sink: ParquetSink, replaces: str | None = None) -> None:
        self.sink = sink
        self.query = SinkQuery(sink.name, clock.new_uuid(), replaces)

    def prepared(self, batch_id: int, keys: list[int], partition: int = 0) -> Handle:
        rows = pa.record_batch([keys, [f"word {key}" for key in keys]], schema=SCHEMA)
        return prepared(self.sink, self.query, rows, batch_id, partition)

    def write(self, batch_id: int, keys: list[int]) -> Handle:
        handle = self.prepared(batch_id, keys)
        self.sink.commit(self.query, batch_id, [handle])
        return handle

    @property
    def folder(self) -> Path:
        """Where the query's manifests are."""
        return Path(self.sink.url, "_holdfast", self.sink.name, self.query.query_id, "batches")


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    made = Writer(ParquetSink("out", str(tmp_path / "target")))
    made.sink.open(made.query, SCHEMA)
    return made


def keys_of(table: pa.Table) -> list[int]:
    keys: list[int] = table["key"].to_pylist()
    return keys


@pytest.mark.slow(1)
def test_manifests_are_merged_and_nothing_is_lost_or_doubled(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many micro-batches there are, few objects are listed, and each row is read once, in order."""
    monkeypatch.setattr(sink_module, "MERGED", 4)
    handles = [writer.write(2 * batch, [batch]) for batch in range(70)]
    names = sorted(path.name for path in writer.folder.iterdir())
    assert len(names) < 16
    assert {"1", "3"} <= {name[0] for name in names}
    assert keys_of(read_parquet(writer.sink.url)) == list(range(70))
    assert writer.sink.open(writer.query, SCHEMA) == 138
    writer.sink.commit(writer.query, 0, [handles[0]])  # merged long ago: still the same micro-batch
    assert keys_of(read_parquet(writer.sink.url)) == list(range(70))
    with pytest.raises(StateLostError):
        writer.sink.commit(writer.query, 2, [writer.prepared(2, [7])])
    with pytest.raises(StateLostError):  # ended without rows
        writer.sink.commit(writer.query, 3, [writer.prepared(3, [7])])
    assert keys_of(read_parquet(writer.sink.url)) == list(range(70))


def test_what_others_put_there_is_neither_claim_nor_manifest(writer: Writer) -> None:
    """Hadoop marks folders in S3, file managers leave notes: no query could start any more, and nobody could read."""
    writer.write(0, [1])
    with open_storage(writer.sink.url) as storage:
        for foreign in (".DS_Store", f"{writer.query.query_id}_$folder$", f"{writer.query.query_id}.part"):
            storage.put(f"_holdfast/queries/out/{foreign}", b"not of holdfast")
        storage.put("_holdfast/queries/.other/q-1", b"not of holdfast")
    assert writer.sink.open(writer.query, SCHEMA) == 0
    assert keys_of(read_parquet(writer.sink.url)) == [1]
    (writer.folder / "notes.txt").write_text("hello")
    with open_storage(writer.sink.url) as storage:
        assert len(found(storage.list(""))) == 1
    assert keys_of(read_parquet(writer.sink.url)) == [1]


def test_a_query_that_replaces_itself_replaces_nobody(tmp_path: Path) -> None:
    """As for the other sinks: over Spark Connect a query's id is known before its first start."""
    writer = Writer(ParquetSink("out", str(tmp_path / "target")))
    writer.query = replace(writer.query, replaces=writer.query.query_id)
    for _ in range(2):
        assert writer.sink.open(writer.query, SCHEMA) == -1


def test_a_merge_that_was_cut_off_changes_nothing(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver dies between the merged manifest and the deletes: both are there, and each row is read once."""
    monkeypatch.setattr(sink_module, "MERGED", 4)
    for batch in range(4):
        writer.write(batch, [batch])
    parts = {path: path.read_bytes() for path in writer.folder.iterdir()}
    writer.write(4, [4])
    for path, data in parts.items():
        path.write_bytes(data)
    assert keys_of(read_parquet(writer.sink.url)) == list(range(5))
    for batch in range(5, 12):
        writer.write(batch, [batch])
    assert keys_of(read_parquet(writer.sink.url)) == list(range(12))
    assert len(list(writer.folder.iterdir())) < 7


def test_a_merge_whose_put_comes_late_changes_nothing(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store did not answer in time, or its driver was asleep: meanwhile the next micro-batch has merged more."""
    monkeypatch.setattr(sink_module, "MERGED", 4)
    put, late = Manifests._put, []

    def put_late(self: Manifests, manifest: ManifestName, files: pa.Table) -> None:
        if manifest.level and not late:
            late.append((self, manifest, files))
            raise UnavailableError("no answer")
        put(self, manifest, files)

    monkeypatch.setattr(Manifests, "_put", put_late)
    for batch in range(6):
        writer.write(batch, [batch])
    put(*late[0])
    assert keys_of(read_parquet(writer.sink.url)) == list(range(6))
    for batch in range(6, 12):
        writer.write(batch, [batch])
    assert keys_of(read_parquet(writer.sink.url)) == list(range(12))
    assert not Path(writer.folder, late[0][1].name).exists()


def test_manifests_that_overlap_are_refused() -> None:
    inside, across = ManifestName(0, 3, 3), ManifestName(1, 3, 9)
    assert in_force([ManifestName(1, 1, 4), inside]) == [ManifestName(1, 1, 4)]
    with pytest.raises(CorruptionError):
        in_force([ManifestName(1, 1, 4), across])


@pytest.mark.parametrize("damage", [lambda data: data[:-1], flipped, lambda _: b""])
def test_damaged_manifests_are_refused(writer: Writer, damage: Callable[[bytes], bytes]) -> None:
    writer.write(0, [1])
    (path,) = writer.folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CorruptionError):
        read_parquet(writer.sink.url)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("attempt", "../../../etc/passwd"),
        ("attempt", "000000000000000009-000000-" + "a" * 32),
        ("digest", "x"),
        ("number", -1),
        ("rows", -1),
        ("size_bytes", -5),
        ("batch", 9),
    ],
)
def test_hostile_manifests_are_refused(writer: Writer, column: str, value: object) -> None:
    writer.write(0, [1])
    (path,) = writer.folder.iterdir()
    row = {
        "batch": 0,
        "attempt": "000000000000000000-000000-" + "a" * 32,
        "number": 0,
        "rows": 1,
        "size_bytes": 1,
        "digest": "b" * 32,
    }
    table = pa.Table.from_pylist([{**row, column: value}], FILES)

    def write(out: pa.NativeFile) -> None:
        with pa.ipc.new_stream(out, FILES) as stream:
            stream.write_table(table)

    header = {"sink": "out", "query_id": writer.query.query_id, "level": 0, "first": 0, "last": 0}
    path.write_bytes(stored_file.encode(KIND, header, {"files": write}, encoding="lz4")[0])
    with pytest.raises(CorruptionError):
        read_parquet(writer.sink.url)
    with pytest.raises(CorruptionError):
        parquet_files(writer.sink.url)


def test_a_committed_file_that_was_changed_is_noticed(writer: Writer) -> None:
    """Rows are those that were committed, or an error."""
    writer.write(0, [1])
    (path,) = Path(writer.sink.url, "_data").iterdir()
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"\x00" + data[9:])
    with pytest.raises(CorruptionError, match="altered"):
        read_parquet(writer.sink.url)
    path.unlink()
    with pytest.raises(CorruptionError, match="gone"):
        read_parquet(writer.sink.url)


def test_a_prepared_file_that_is_lost_is_never_committed(writer: Writer) -> None:
    """The decision stands, and the sink says that it cannot be kept."""
    handle = writer.prepared(0, [1])
    for path in Path(writer.sink.url, "_data").iterdir():
        path.unlink()
    with pytest.raises(StateLostError):
        writer.sink.commit(writer.query, 0, [handle])
    with pytest.raises(NotFoundError):
        read_parquet(str(Path(writer.sink.url, "elsewhere")))


def test_other_readers_see_what_counts(writer: Writer) -> None:
    writer.write(0, [1, 2])
    writer.prepared(1, [3])
    files = parquet_files(writer.sink.url)
    assert keys_of(ds.dataset(files).to_table()) == [1, 2]
    assert duckdb.read_parquet(files).fetchall() == [(1, "word 1"), (2, "word 2")]
    assert ds.dataset(writer.sink.url, format="parquet").files == []


@pytest.mark.parametrize("name", ["queries", "schema", "attempts", "batches"])
def test_a_sink_may_have_a_name_that_stands_in_keys(tmp_path: Path, name: str) -> None:
    writer = Writer(ParquetSink(name, str(tmp_path / "target")))
    for batch in range(2):
        assert writer.sink.open(writer.query, SCHEMA) == batch - 1
        handle = writer.write(batch, [batch])
    left = writer.prepared(2, [2])
    assert writer.sink.open(writer.query, SCHEMA) == 1
    writer.sink.commit(writer.query, 1, [handle])
    assert writer.sink.leftovers(writer.query) == [left]
    writer.sink.abort(writer.query, [left])
    assert keys_of(read_parquet(writer.sink.url)) == [0, 1]
    with pytest.raises(ConflictError, match=writer.query.query_id):
        writer.sink.open(SinkQuery(name, clock.new_uuid()), SCHEMA)


def test_results_of_a_replaced_query_stay_first(writer: Writer) -> None:
    """A query that goes on with another's results numbers its micro-batches anew."""
    writer.write(5, [1])
    heir = Writer(writer.sink, replaces=writer.query.query_id)
    assert heir.sink.open(heir.query, SCHEMA) == -1
    heir.write(0, [2])
    assert keys_of(read_parquet(writer.sink.url)) == [1, 2]
    with pytest.raises(ConflictError):
        writer.sink.open(writer.query, SCHEMA)


def test_a_url_has_one_name(writer: Writer) -> None:
    """A reader need not know names."""
    other = Writer(ParquetSink("other", writer.sink.url))
    with pytest.raises(ConflictError):
        other.sink.open(other.query, SCHEMA)


@pytest.mark.parametrize(
    ("column", "word"),
    [
        (pa.field("word", pa.duration("us")), "bigint"),
        (pa.field("word", pa.timestamp("ns")), "cast"),
        (pa.field("word", pa.null()), "cast"),
        (pa.field("word", pa.large_string()), "cast"),
        (pa.field("word", pa.list_(pa.struct([("x", pa.uint8())]))), "cast"),
        (
            pa.field("word", pa.list_(pa.struct([("x", pa.int64()), ("X", pa.int64())]))),
            "two fields with the same name",
        ),
        (pa.field("KEY", pa.string()), "ignoring case"),
    ],
)
def test_columns_that_not_every_reader_knows(tmp_path: Path, column: pa.Field, word: str) -> None:
    """They are refused by name before anything is written."""
    sink = ParquetSink("out", str(tmp_path / "target"))
    with pytest.raises(SchemaMismatchError, match=word) as raised:
        sink.open(SinkQuery("out", "q"), SCHEMA.set(1, column))
    assert raised.value.facts["column"] in ("word", "key")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("columns", [["nothing"], [], ["key", "key"]])
def test_columns_that_cannot_be_read_are_named(writer: Writer, columns: list[str]) -> None:
    writer.write(0, [1])
    with pytest.raises(InvalidArgumentError, match="key, word"):
        read_parquet(writer.sink.url, columns=columns)


def test_a_new_column_is_offered_what_a_sink_of_files_has(writer: Writer) -> None:
    """Nobody can add a column to files that are written: "add it there" would send people searching."""
    more = Writer(writer.sink, replaces=writer.query.query_id)
    with pytest.raises(SchemaMismatchError, match=r"no such column: write to another URL, or drop it.*column=more"):
        writer.sink.open(more.query, SCHEMA.append(pa.field("more", pa.int64())))


def test_a_delta_sink_below_the_url_is_refused(writer: Writer) -> None:
    """Nobody could read the Parquet sink any more: readers do not know whose names to believe."""
    writer.write(0, [1])
    with pytest.raises(ConflictError, match="another name"):
        DeltaSink("table", writer.sink.url, create=True).open(SinkQuery("table", clock.new_uuid()), SCHEMA)
    assert keys_of(read_parquet(writer.sink.url)) == [1]


@pytest.mark.parametrize(
    "columns",
    ["", "AAAA", "§", base64.b64encode(SCHEMA.serialize().to_pybytes().replace(b"word", b"w\xff\xfed")).decode()],
)
def test_columns_that_nobody_has_written_are_refused(writer: Writer, columns: str) -> None:
    """By a reader and by the next start, each with the error for what is damaged."""
    header = {"number": 2, "queries": {"out": [writer.query.query_id]}, "columns": columns}
    Path(writer.sink.url, "_holdfast", "queries", f"{2:020}").write_bytes(stored_file.encode("sink-queries", header)[0])
    for act in (lambda: read_parquet(writer.sink.url), lambda: writer.sink.open(writer.query, SCHEMA)):
        with pytest.raises(CorruptionError, match="schema cannot be decoded"):
            act()


def test_columns_of_several_sinks_are_refused(writer: Writer) -> None:
    header = {"number": 2, "queries": {"a": ["q"], "b": ["q"]}, "columns": encode_schema(SCHEMA)}
    Path(writer.sink.url, "_holdfast", "queries", f"{2:020}").write_bytes(stored_file.encode("sink-queries", header)[0])
    with pytest.raises(CorruptionError, match=r"sinks='?a, b"):
        read_parquet(writer.sink.url)


def test_claims_do_not_pile_up(writer: Writer) -> None:
    """A query that is upgraded each week replaces itself for years; every start lists what there is."""
    for _ in range(20):
        heir = Writer(writer.sink, replaces=writer.query.query_id)
        heir.sink.open(heir.query, SCHEMA)
        writer = heir
    writer.write(0, [1])
    assert len(list(Path(writer.sink.url, "_holdfast", "queries").iterdir())) <= 3
    assert keys_of(read_parquet(writer.sink.url)) == [1]
