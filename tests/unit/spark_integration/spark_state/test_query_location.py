"""Spark's checkpoint location without Spark: micro-batches, state, logs of sources, and its operators."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.snapshotter.storage.local import LocalStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.savepoints.from_spark import require_readable
from holdfast.spark_integration.shard.pointer_row import GROUP_STATE, POINTER_COLUMN, STATE_VARIABLES, PointerRow
from holdfast.spark_integration.spark_state import row_streams
from holdfast.spark_integration.spark_state.pointers import (
    NeedsSparkError,
    NewState,
    PointerOperator,
    StateOperators,
    stored_steps,
)
from holdfast.spark_integration.spark_state.query_location import LoggedBatch, QueryLocation
from holdfast.spark_integration.spark_state.row_streams import Named

BATCH = '{"batchWatermarkMs":5,"batchTimestampMs":1700000000000,"conf":{"spark.sql.shuffle.partitions":"2"}}'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A location as Spark leaves it after micro-batches 3 to 5, while 6 is under way."""
    files = {
        "metadata": '{"id":"5d1f2c"}',
        **{f"offsets/{n}": f'v1\n{BATCH}\n{{"logOffset":{n}}}\n-' for n in range(3, 7)},
        **{f"commits/{n}": f'v1\n{{"nextBatchWatermarkMs":{n * 1000}}}' for n in range(2, 6)},
        **{f"sources/0/{n}": "v1" for n in (*range(10, 13),)},
        "sources/0/9.compact": "v1",
        **{f"{folder}/{name}": "?" for folder in ("offsets", "commits") for name in ("12.tmp", "07", "x.crc", "-1")},
        "offsets/.7.crc": "?",
        "commits/.8.8c1e.tmp": "?",
        "sources/0/.12.crc": "?",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.fixture
def location(root: Path) -> Iterator[QueryLocation]:
    with open_storage(str(root)) as storage:
        yield QueryLocation(storage)


def test_the_last_committed_micro_batch(location: QueryLocation) -> None:
    assert location.query_id() == "5d1f2c"
    assert location.committed() == [3, 4, 5]
    batch = location.batch()
    assert (batch.batch_id, batch.offsets_version, batch.batch, batch.next_watermark_ms) == (5, "v1", BATCH, 5000)
    assert batch.sources == (("0", '{"logOffset":5}'), ("1", "-"))
    assert location.batch(3).next_watermark_ms == 3000


@pytest.mark.parametrize("batch_id", [2, 6, 7])
def test_a_micro_batch_that_is_not_there(location: QueryLocation, batch_id: int) -> None:
    with pytest.raises(NotFoundError, match=rf"batch_id={batch_id} first=3 last=5"):
        location.batch(batch_id)


def test_named_sources(root: Path, location: QueryLocation) -> None:
    (root / "offsets/5").write_text(f'v2\n{BATCH}\nleft:{{"pos": 5}}\nright:{{"a:b": 1}}')
    assert location.batch().sources == (("left", '{"pos": 5}'), ("right", '{"a:b": 1}'))


def test_a_source_keeps_files_up_to_its_offset(root: Path, location: QueryLocation) -> None:
    assert location.source_logs("0", '{"logOffset":11}') == ["9.compact", "10", "11"]
    assert location.source_logs("1", "-") == []
    for nonsense in ("[" * 60_000, '{"logOffset":' * 10_000, '{"logOffset":true}'):
        assert set(location.source_logs("0", nonsense)) == {"9.compact", "10", "11", "12"}
    assert bytes(location.source_log("0", "9.compact")) == b"v1"
    (root / "sources/2/_schema_log").mkdir(parents=True)
    for name in ("0", "shards-7", "_schema_log/3", "_schema_log/.3.crc", "1.tmp"):
        (root / "sources/2" / name).write_text("?")
    assert location.source_logs("2", '{"topic":{"0":57}}') == ["0", "_schema_log/3", "shards-7"]


@pytest.mark.parametrize("lost", ["10", "11", "9.compact"])
def test_a_gap_in_the_log_of_files_is_no_log(root: Path, location: QueryLocation, lost: str) -> None:
    """The restored query would read those files again."""
    (root / "sources/0" / lost).unlink()
    with pytest.raises(UnavailableError, match="has a gap"):
        location.source_logs("0", '{"logOffset":11}')


A3, B5, RATE = '{"logOffset":3}', '{"logOffset":5}', '{"offset":3,"timestamp":1}'


def at(*offsets: str) -> list[tuple[str, str]]:
    return [(str(number), offset) for number, offset in enumerate(offsets)]


@pytest.mark.parametrize(
    ("offsets", "newest", "kept"),
    [
        ((A3, A3), [3], {"0": 3}),
        ((A3, A3), [4], {"0": 3}),
        ((A3, B5, A3), [3, 6], {"0": 3, "1": 5}),
        ((A3, A3, B5), [4, 5], {"0": 4, "1": 5}),
        ((B5, B5, A3, A3), [5, 3], {"0": 5, "1": 3}),
        ((RATE, RATE, A3), [-1, 3], {"1": 3}),
        *((offsets, [3], None) for offsets in ((A3, RATE, RATE), (A3, B5), (A3, A3, B5, B5))),
        *(((A3, A3), [3, 3], None), ((A3, A3, B5), [3, 4], None), ((RATE, RATE), [], None)),
    ],
)
def test_a_source_that_is_read_twice_has_one_folder(
    tmp_path: Path, offsets: Sequence[str], newest: Sequence[int], kept: dict[str, int] | None
) -> None:
    """Its lines are equal, and who comes later has a lower number; where that does not explain it, files are lost."""
    for source, last in enumerate(newest):
        for number in range(last + 1):
            path = tmp_path / f"sources/{source}/{number}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("v1")
    (tmp_path / "metadata").write_text("{}")
    with open_storage(str(tmp_path)) as storage:
        found = QueryLocation(storage).kept_sources(at(*offsets))
        if kept is None:
            assert found == at(*offsets)
        else:
            assert {name: json.loads(offset)["logOffset"] for name, offset in found} == kept
            for name, offset in found:
                assert QueryLocation(storage).source_logs(name, offset) == [str(n) for n in range(kept[name] + 1)]


def test_names_that_only_the_folders_tell(root: Path, location: QueryLocation) -> None:
    """Spark 4.2 by default: nothing says which of them the first position belongs to."""
    (root / "sources/0").rename(root / "sources/left")
    with pytest.raises(InvalidArgumentError, match=r"offsetLog.formatVersion=2"):
        location.source_logs("0", '{"logOffset":11}')


def test_what_others_put_beside_sources_is_no_name(root: Path, location: QueryLocation) -> None:
    """Nor is advice to begin anew with other settings, where files are missing."""
    shutil.rmtree(root / "sources/0")
    for foreign in ("0_$folder$", ".DS_Store", "README", "lost+found/x"):
        (root / "sources" / foreign).parent.mkdir(exist_ok=True)
        (root / "sources" / foreign).write_text("?")
    with pytest.raises(UnavailableError, match="has a gap"):
        location.source_logs("0", '{"logOffset":11}')


def test_a_query_without_a_commit(root: Path, location: QueryLocation) -> None:
    for file in (root / "commits").iterdir():
        file.unlink()
    with pytest.raises(NotFoundError, match="has not committed a micro-batch yet"):
        location.batch()


def test_what_is_no_location(tmp_path: Path) -> None:
    with open_storage(str(tmp_path)) as storage, pytest.raises(InvalidArgumentError, match="lacks the file metadata"):
        QueryLocation(storage).query_id()


@pytest.mark.parametrize(
    ("file", "text"),
    [
        *(("metadata", text) for text in ("{", "[]", '{"id":7}')),
        *(("offsets/5", text) for text in ("", "7\n{}", "v1", "v1\n[]", "v1\n{}", f"v2\n{BATCH}\n-")),
        *(("commits/5", f'v1\n{{"nextBatchWatermarkMs":{text}') for text in ('"1"}', "-1}")),
        *(("commits/5", text) for text in ("v1\n{", "\udcff")),
    ],
)
def test_damage_is_named(root: Path, location: QueryLocation, file: str, text: str) -> None:
    (root / file).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CorruptionError, match=file):
        location.query_id(), location.batch()


STORE = "spark.sql.streaming.stateStore."
PROVIDERS = "org.apache.spark.sql.execution.streaming.state."
PINNED = {
    f"{STORE}providerClass": f"{PROVIDERS}HDFSBackedStateStoreProvider",
    f"{STORE}compression.codec": "lz4",
    "spark.sql.streaming.flatMapGroupsWithState.stateFormatVersion": "2",
}


def a_row(shard: int, shards: int, due_ms: int | None = None) -> PointerRow:
    state_dir = "/data/" + "x" * (shard % 9)  # rows of several lengths
    return PointerRow("q", "totals", shard, shards, Pointer(1, f"{shard:016x}"), None, due_ms, 0, state_dir)


def an_operator(rows: tuple[PointerRow, ...], *, has_timeout: bool = False) -> PointerOperator:
    timeout_conf = "EventTimeTimeout" if has_timeout else "NoTimeout"
    return PointerOperator(GROUP_STATE, timeout_conf, "EventTime" if has_timeout else "None", "update", rows)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize(("shards", "partitions"), [(1, 1), (3, 8), (700, 2)])
def test_pointers_that_are_written_are_read(tmp_path: Path, codec: str, shards: int, partitions: int) -> None:
    """Of all operators, in partitions without and with many, in blocks that fit one after the other."""
    pinned = PINNED | {f"{STORE}compression.codec": codec}
    operators = [
        an_operator(tuple(a_row(shard, shards) for shard in range(shards))),
        an_operator(()),
        an_operator(tuple(a_row(shard, shards, shard - 1) for shard in range(shards)), has_timeout=True),
    ]
    batch = LoggedBatch("v1", json.dumps({"conf": pinned}), (), 0, 0)
    with LocalStorage(str(tmp_path)) as location:
        for key, data in NewState.of(pinned, partitions, {GROUP_STATE}).files(operators):
            location.put(key, data)
        found = stored_steps(location, batch)
    assert [step.has_timeout for step in found] == [False, False, True]
    for step, operator in zip(found, operators, strict=True):
        assert step.is_ours
        assert sorted(step.pointers.get("totals", {}).get("totals", [])) == sorted(operator.pointers)


def test_no_timeout_is_not_the_time_of_its_number(tmp_path: Path) -> None:
    """Spark takes -1 for none: a timer that is due then must not wait for ever."""
    rows = tuple(a_row(shard, 4, due_ms) for shard, due_ms in enumerate([None, -1, 0, -(1 << 62)]))
    state = NewState.of(PINNED, 1, {GROUP_STATE}).files([an_operator(rows, has_timeout=True)])
    with LocalStorage(str(tmp_path)) as partition:
        partition.put("1.delta", dict(state)["state/0/0/1.delta"])
        values = row_streams.read_rows(partition, Named(1), "lz4", 1 << 20).values()
    assert sorted(struct.unpack_from("<q", value, 16)[0] for value in values) == [-(1 << 62), -2, -1, 0]


@pytest.mark.parametrize(
    ("given", "host", "said"),
    [
        ({f"{STORE}providerClass": f"{PROVIDERS}RocksDBStateStoreProvider"}, GROUP_STATE, "RocksDBStateStoreProvider"),
        ({f"{STORE}providerClass": "com.example.Theirs"}, GROUP_STATE, r"com\.example\.Theirs"),
        ({f"{STORE}providerClass": None}, GROUP_STATE, "its session chooses"),
        ({f"{STORE}compression.codec": "snappy"}, GROUP_STATE, "snappy"),
        ({f"{STORE}rowChecksum.enabled": "true"}, GROUP_STATE, "rowChecksum"),
        ({f"{STORE}encodingFormat": "avro"}, GROUP_STATE, "avro"),
        ({"spark.sql.streaming.flatMapGroupsWithState.stateFormatVersion": "1"}, GROUP_STATE, "stateFormatVersion=1"),
        ({"spark.sql.streaming.flatMapGroupsWithState.stateFormatVersion": None}, GROUP_STATE, "stateFormatVersion"),
        ({}, STATE_VARIABLES, STATE_VARIABLES),
    ],
)
def test_what_is_not_known_is_left_to_spark(given: dict[str, str | None], host: str, said: str) -> None:
    pinned = {name: value for name, value in (PINNED | given).items() if value is not None}
    with pytest.raises(NeedsSparkError, match=said):
        NewState.of(pinned, 2, {GROUP_STATE, host})


def lines(first: int, last: int) -> list[str]:
    """Return what the log says of the files that were found from one time to another: two each."""
    return [
        json.dumps({"path": f"file:///input/{number}-{part}", "timestamp": 7, "batchId": number})
        for number in range(first, last + 1)
        for part in "ab"
    ]


def stored(root: Path, *names: str) -> Path:
    """Store a log of which these files are left."""
    folder = root / "sources/0"
    folder.mkdir(parents=True)
    for name in names:
        number = int(name.removesuffix(".compact"))
        first = 0 if name.endswith(".compact") else number
        (folder / name).write_text("\n".join(["v1", *lines(first, number)]))
    return folder


def read(root: Path, end: int) -> dict[str, list[str]]:
    with open_storage(str(root)) as storage:
        location = QueryLocation(storage)
        names = location.source_logs("0", f'{{"logOffset":{end}}}')
        return {name: bytes(location.source_log("0", name)).decode().split("\n") for name in names}


@pytest.mark.parametrize(
    ("left", "end", "made"),
    [
        (["19.compact", "20"], 15, {"15.compact": (0, 15)}),
        (["10", "11", "14", "19.compact", "29.compact"], 12, {"12.compact": (0, 12)}),
        (["19.compact", "29.compact"], 9, {"9.compact": (0, 9)}),
        (["19.compact", "29.compact"], 1, {"0": (0, 0), "1": (1, 1)}),
        (["19.compact"], 1, {"1.compact": (0, 1)}),
    ],
    ids=["between", "some are there", "compacted then", "before the first", "nobody knows how often"],
)
def test_a_log_is_cut_from_later(tmp_path: Path, left: list[str], end: int, made: dict[str, tuple[int, int]]) -> None:
    """No file too many, or the restored query would never read it; none too few, or it would read it twice."""
    stored(tmp_path, *left)
    assert read(tmp_path, end) == {name: ["v1", *lines(*of)] for name, of in made.items()}


@pytest.mark.parametrize("damage", ["lost", "cut", "strange"])
def test_a_later_file_that_is_damaged_is_no_log(tmp_path: Path, damage: str) -> None:
    folder = stored(tmp_path, "19.compact")
    kept = {"lost": lines(0, 4) + lines(6, 19), "cut": ["{", *lines(0, 19)], "strange": ['{"batchId":"5"}']}[damage]
    (folder / "19.compact").write_text("\n".join(["v1", *kept]))
    with pytest.raises(CorruptionError, match=r"19\.compact (lacks|has a line)"):
        read(tmp_path, 5)


def test_a_compacted_log_that_is_no_log_is_damaged(tmp_path: Path) -> None:
    """A line that is taken for the version is a file that a restored query would read again."""
    file = stored(tmp_path, "3.compact") / "3.compact"
    for data, match in (
        ("\n".join(lines(0, 3)).encode(), "does not begin with a version"),
        (b"v1\n" + "\n".join(lines(0, 3)).encode().replace(b"input", b"\xff"), "is not text"),
    ):
        file.write_bytes(data)
        with pytest.raises(CorruptionError, match=match):
            read(tmp_path, 1)


def test_a_number_that_no_log_has_reached_costs_nothing(tmp_path: Path) -> None:
    """Positions and names of files are what stands in storage: they are compared, not counted up to."""
    stored(tmp_path, "0", "3.compact")
    with pytest.raises(UnavailableError, match="missing=4"):
        read(tmp_path, 10**16)
    (tmp_path / f"sources/0/{10**17}.compact").write_text("\n".join(["v1", *lines(0, 3)]))
    with pytest.raises(CorruptionError, match="number=4"):
        read(tmp_path, 10**16)


def metadata(number: int, name: str, partitions: int = 4, *stores: str, **more: Any) -> dict[str, Any]:
    infos = [
        {"storeName": store, "numColsPrefixKey": 0, "numPartitions": partitions} for store in stores or ("default",)
    ]
    return {"operatorInfo": {"operatorId": number, "operatorName": name}, "stateStoreInfo": infos} | more


def put(root: Path, key: str, document: object, version: str = "v1") -> None:
    path = root / "state" / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{version}\n{json.dumps(document)}")


def schema(root: Path, columns: list[str], version: str = "v2", state: list[str] | None = None) -> None:
    """Store the schema of operator 0; the first column is a struct of `state`."""
    names = [POINTER_COLUMN] if state is None else state
    struct_type = {"type": "struct", "fields": [{"name": name, "type": "long"} for name in names]}
    fields = [{"name": name, "type": "long" if number else struct_type} for number, name in enumerate(columns)]
    texts = ['{"type":"struct","fields":[]}', json.dumps({"type": "struct", "fields": fields})]
    data = struct.pack(">H", len(version)) + version.encode()
    for text in texts:
        halves = text[: len(text) // 2].encode(), text[len(text) // 2 :].encode()
        data += struct.pack(">i", 2) + b"".join(struct.pack(">H", len(half)) + half for half in halves)
    path = root / "state/0/0/_metadata/schema"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_metadata_holds_from_a_micro_batch_on(tmp_path: Path) -> None:
    """What an operator was in a micro-batch is read, not what it is now; and a history lists it once."""
    put(tmp_path, "0/_metadata/metadata", metadata(0, "applyInPandasWithState"))
    variables = json.dumps({"stateVariables": [{"stateName": "holdfast_pointer"}]})
    put(tmp_path, "1/_metadata/v2/0", metadata(1, "transformWithStateInPandasExec", 8), "v2")
    put(
        tmp_path,
        "1/_metadata/v2/5",
        metadata(1, "transformWithStateInPandasExec", 8, operatorPropertiesJson=variables),
        "v2",
    )
    put(tmp_path, "1/_metadata/v2/.6.crc", {})
    put(tmp_path, "2/_metadata/metadata", metadata(2, "symmetricHashJoin", 4, "left", "right"))
    with LocalStorage(str(tmp_path)) as location:
        operators = StateOperators(location)
        newest = operators.at(9)
        assert [(one.number, one.partitions, one.variables) for one in newest] == [
            (0, 4, ()),
            (1, 8, ("holdfast_pointer",)),
            (2, 0, ()),
        ]
        lists = location.requests["list"]
        assert operators.at(4)[1].variables == ()
        assert operators.at(5) == newest
        assert location.requests["list"] == lists


@pytest.mark.parametrize(
    ("columns", "state", "holds"),
    [
        (["groupState"], None, True),
        (["groupState", "timeoutTimestamp"], None, True),
        (["groupState", "timeoutTimestamp"], ["n", "total"], False),
        (["groupState", "more"], None, False),
        (["value"], None, False),
    ],
)
def test_column_names_say_whose(tmp_path: Path, columns: list[str], state: list[str] | None, holds: bool) -> None:
    put(tmp_path, "0/_metadata/metadata", metadata(0, "applyInPandasWithState"))
    schema(tmp_path, columns, state=state)
    with LocalStorage(str(tmp_path)) as location:
        operators = StateOperators(location)
        assert operators.hold_pointers(operators.at(0)[0]) is holds


def test_another_format_is_said_and_damage_is_damage(tmp_path: Path) -> None:
    """A later Spark's files are refused; what is cut or altered is an error that names the file."""
    with LocalStorage(str(tmp_path)) as location:
        assert StateOperators(location).at(0) == []
        put(tmp_path, "0/_metadata/metadata", metadata(0, "applyInPandasWithState"), "v3")
        with pytest.raises(InvalidArgumentError, match=r"form of Spark's state.*metadata"):
            StateOperators(location).at(0)
        for wrong in ([], {}, metadata(1, "x"), metadata(0, "x", -1), metadata(0, "x", 1 << 40), {"operatorInfo": 5}):
            put(tmp_path, "0/_metadata/metadata", wrong)
            with pytest.raises(CorruptionError, match="_metadata"):
                StateOperators(location).at(0)
        put(tmp_path, "0/_metadata/metadata", metadata(0, "applyInPandasWithState"))
        operators = StateOperators(location)
        with pytest.raises(InvalidArgumentError, match="schema"):
            operators.hold_pointers(operators.at(0)[0])
        schema(tmp_path, ["groupState"], version="v9")
        with pytest.raises(InvalidArgumentError, match="schema"):
            operators.hold_pointers(operators.at(0)[0])
        schema(tmp_path, ["groupState"])
        path = tmp_path / "state/0/0/_metadata/schema"
        whole = path.read_bytes()
        for end in range(0, len(whole) - 1, 7):
            path.write_bytes(whole[:end])
            with pytest.raises(CorruptionError):
                operators.hold_pointers(operators.at(0)[0])


@pytest.mark.parametrize("location", ["/data/a-b_c.d~e", "s3a://bucket/a=b/c+d@e", "hdfs://host:9000/a", "/d/ü/日本"])
def test_locations_that_are_as_in_a_url(location: str) -> None:
    require_readable(location)


@pytest.mark.parametrize("name", ["a b", "a%20b", "100%", "a#b", "a?b", "a[b", "{b}", "a|b", "a\\b", "a\u00a0b"])
def test_locations_that_spark_would_escape_are_refused(name: str) -> None:
    """It would look for another location, where another query may be."""
    with pytest.raises(InvalidArgumentError, match="cannot read state in a checkpointLocation with these"):
        require_readable(f"/data/{name}/query")


@pytest.mark.parametrize("described", [0, 1])
def test_an_operator_whose_metadata_is_missing_is_not_left_out(tmp_path: Path, described: int) -> None:
    """A savepoint or a clone without one of two operators would look whole."""
    for number in range(2):
        (tmp_path / f"state/{number}/0").mkdir(parents=True)
        (tmp_path / f"state/{number}/0/1.delta").write_bytes(b"rows")
    for number in range(described):
        put(tmp_path, f"{number}/_metadata/metadata", metadata(number, "stateStoreSave"))
    batch = LoggedBatch("v1", '{"conf": {}}', (), 0, 0)
    with (
        LocalStorage(str(tmp_path)) as location,
        pytest.raises(CorruptionError, match=f"metadata of an operator with state is missing.*number={described}"),
    ):
        stored_steps(location, batch)
