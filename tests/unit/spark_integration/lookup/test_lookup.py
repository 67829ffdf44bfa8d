"""Look-ups without Spark: keys as they were given, their hash, what is shown of state, and files that go again."""

from __future__ import annotations

import datetime as dt
import os
import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import xxhash

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.run import TableSchema
from holdfast.errors import InvalidArgumentError, NotFoundError
from holdfast.snapshotter.lineage import ChainEntry
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator
from holdfast.snapshotter.ownership.queries import NotedLocation
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.snapshotter.snapshots import Snapshots
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.version_reader import VersionReader
from holdfast.spark_integration.executor import local_dirs, takeover
from holdfast.spark_integration.lookup import places
from holdfast.spark_integration.lookup.keys import hash_of_key, key_option, keys_of, parse_key, same_rows
from holdfast.spark_integration.lookup.query_pointers import QueryPointers, ShardReaders, grouping_of
from holdfast.spark_integration.shard.pointer_row import PointerRow
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests.faults.elsewhere import run_elsewhere

TIME, LIST = pa.timestamp("us", "UTC"), pa.large_list(pa.int64())
NESTED = pa.struct([("a", pa.int64()), ("t", TIME)])
NOON = dt.datetime(2024, 1, 2, 12, tzinfo=dt.UTC)


def key_of(value: object, t: pa.DataType) -> Any:
    table = TableSchema.of("state", pa.schema([("k", t)]), pa.schema([("v", pa.int64())]))
    return keys_of(table, ("k",), [{"k": value}]).columns.column(0)[0].as_py()


#: By type, values that no key of that type has.
UNFIT: list[tuple[pa.DataType, list[object]]] = [
    (pa.int64(), [1.5, Decimal("1.5"), True]),
    (pa.int8(), [float("nan"), 300]),
    (pa.bool_(), [1]),
    (pa.decimal128(10, 2), [1.5, Decimal("1.005")]),
    (pa.duration("us"), [1]),
    (pa.date32(), [1, NOON]),
    (pa.timestamp("us"), [NOON]),
    (TIME, [10**18, NOON.replace(tzinfo=None), "2024-01-02T12:00:00"]),
    (pa.large_string(), [b"ann", "\ud800"]),
    (pa.large_binary(), ["no base64!"]),
    (LIST, [b"ab", "ab", [1.5]]),
    (NESTED, [{"a": 1}, {"a": 1, "t": None, "b": 2}, {"a": True, "t": None}, object()]),
]


@pytest.mark.parametrize(("value", "t"), [(value, t) for t, values in UNFIT for value in values])
def test_a_value_of_another_type_is_refused(value: object, t: pa.DataType) -> None:
    with pytest.raises(InvalidArgumentError, match="has the wrong type"):
        key_of(value, t)


def test_a_refused_value_is_told_by_the_type_that_it_has_and_the_one_that_the_key_has() -> None:
    with pytest.raises(InvalidArgumentError, match=r"the key's 'k' has the wrong type: it is int, type=string$"):
        key_of(5, pa.large_string())


@pytest.mark.parametrize(
    ("value", "t", "wanted"),
    [
        (2.0, pa.int64(), 2),
        ("-7", pa.int64(), -7),
        (3, pa.float64(), 3.0),
        (3, pa.decimal128(10, 2), Decimal("3.00")),
        ("2024-01-02T13:00:00+01:00", TIME, NOON),
        ("2024-01-02", pa.date32(), dt.date(2024, 1, 2)),
        ("YW5u", pa.large_binary(), b"ann"),
        ({"a": 1, "t": "2024-01-02T12:00:00Z"}, NESTED, {"a": 1, "t": NOON}),
        ({"a": None, "t": NOON}, NESTED, {"a": None, "t": NOON}),
        (["1", None], LIST, [1, None]),
    ],
)
def test_a_value_is_taken_as_it_is(value: object, t: pa.DataType, wanted: object) -> None:
    """Numbers, and texts as JSON has them, at every depth."""
    assert key_of(value, t) == wanted
    if not isinstance(value, dict | list):
        assert key_of(parse_key(key_option({"k": value}))["k"], t) == wanted


NAN = float("nan")


def table(name: str, keys: str, values: str = "v") -> TableSchema:
    return TableSchema.of(name, *(pa.schema([(one, pa.int64()) for one in names.split()]) for names in (keys, values)))


@pytest.mark.parametrize(
    "tables",
    [
        [table("state", "a b")],
        [table("timers", "a b", "due_ms"), table("state", "a b")],
        [table("m.seen", "a b entry.id"), table("v.total", "a b")],
        [table("l.seen", "a b seq")],
        [table("m.seen", "a b entry.id entry.day")],
        [table("m.one", "a b entry.id"), table("m.other", "a b entry.day")],
        [table("timers", "a b due_ms", "")],
        [table("m.seen", "a b entry.id"), table("timers", "a b due_ms", "")],
        [table("s.state", "a b session_start")],
        [table("j.left", "a b at number"), table("j.right", "a b paid number")],
    ],
    ids=lambda tables: " ".join(one.name for one in tables),
)
def test_keys_are_given_by_the_grouping_columns(tables: list[TableSchema]) -> None:
    """Also where all tables have key columns of their own: part of a key would find nothing, and say so of all."""
    assert grouping_of({one.name: one for one in tables}) == ("a", "b")


def test_a_value_that_is_not_a_number_is_still_the_same() -> None:
    rows = {"state": pa.table({"f": [NAN, 1.0, None], "l": [[NAN], [], None]})}
    assert same_rows(rows, {"state": pa.concat_tables([rows["state"].slice(0, 1), rows["state"].slice(1)])})
    for other in ([NAN, 2.0, None], [NAN, 1.0, 0.0], [None, 1.0, None]):
        assert not same_rows(rows, {"state": rows["state"].set_column(0, "f", pa.array(other))})
    assert not same_rows(rows, {"state": rows["state"].slice(0, 2)})
    assert not same_rows(rows, {})


SEED = 42


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ("12345678901234567890123456789012345678", 0),
        ("-99999999999999999999999999999999999999", 0),
        ("123456789012345678901234567890.12345678", 8),
        ("1.000000000000000000000000000000000001", 36),
    ],
)
def test_a_decimal_is_hashed_with_all_its_digits(text: str, scale: int) -> None:
    """Python's decimals keep 28 unless they are told otherwise: a look-up then finds nothing, and says so."""
    unscaled = int(text.replace(".", ""))
    data = unscaled.to_bytes(unscaled.bit_length() // 8 + 1, "big", signed=True)
    key = pa.scalar(Decimal(text), pa.decimal128(38, scale))
    assert hash_of_key([key]) == xxhash.xxh64_intdigest(data, SEED)


STATE = TableSchema.of("state", pa.schema([("user", pa.string())]), pa.schema([("n", pa.int64())]))
ROW = PointerRow("q-1", "totals", 0, 1, Pointer(7, "aa"), None, None, 0)


def killed_looking_up(state_dir: Path, temporary: Path) -> None:
    os.environ.pop("SPARK_LOCAL_DIRS", None)
    tempfile.tempdir = str(temporary)
    lineage = SimpleNamespace(commits=(), snapshot=ChainEntry("snapshot", Pointer(7, "aa"), 100, "0" * 32))
    changed: Any = VersionReader, Snapshots, ShardReaders
    changed[0].newest = lambda *_: SimpleNamespace(lineage=lineage, run_of=lambda _: None)
    changed[1].read_manifest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    changed[2].tables = lambda *_: StoredTables.of_first_run({"state": STATE})
    with ThreadPoolExecutor(1) as threads, open_storage(str(state_dir)) as storage:
        ShardReaders(storage, threads).first_rows(("totals", ROW), STATE, 0, 1)


@pytest.mark.slow(1)
def test_what_a_killed_look_up_brought_goes(tmp_path: Path) -> None:
    """The parts of snapshots that it had read stayed in the temporary directory for good."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = run_elsewhere(killed_looking_up, tmp_path / "state", temporary)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list(temporary.rglob("files"))
    takeover.remove_dead_executors(temporary, clock.now_ms())
    assert list(temporary.rglob("*")) == [local_dirs.user_directory(temporary)]


@pytest.mark.parametrize(
    ("state_dir", "noted", "opened"),
    [
        ("hdfs:///app", "hdfs://namenode:8020/q", "hdfs:///q"),
        ("hdfs://namenode:8020/app", "hdfs://namenode:8020/q", "hdfs://namenode:8020/q"),
        ("hdfs://namenode:8020/app", "hdfs://attacker:8020/q", None),
        ("s3://bucket/app", "s3a://bucket/q", "s3a://bucket/q"),
        ("s3://bucket/app", "s3a://attacker/q", None),
    ],
)
def test_a_noted_location_is_opened_on_the_store_of_the_directory(
    monkeypatch: pytest.MonkeyPatch, state_dir: str, noted: str, opened: str | None
) -> None:
    """On no other, even where Spark calls by its name what the directory leaves to ``fs.defaultFS``."""
    urls: list[str] = []

    def opens(url: str, _: object) -> None:
        urls.append(url)
        raise NotFoundError("enough is known")

    monkeypatch.setattr(places, "open_storage", opens)
    states: Any = SimpleNamespace(url=state_dir)
    with pytest.raises(NotFoundError, match="enough is known" if opened else "on a different store"):
        places.location_of(NotedLocation("state-1", "query-1", noted, "host"), states, {})
    assert urls == ([opened] if opened else [])


def test_no_query_of_a_state_directory_hides_behind_one_of_an_odd_name(tmp_path: Path) -> None:
    """Asked for none, an operator's name tells no queries apart, not even one that is no name."""
    with open_storage(str(tmp_path), {}) as storage:
        for query, operator in [("query-1", "totals"), ("query-2", "-odd")]:
            declare_operator(
                storage, OperatorRecord(operator, query, "definition", "run", 1, {"state": table("state", "k")}, 2)
            )
    with pytest.raises(InvalidArgumentError, match="of several queries") as refused:
        places.find_places(tmp_path, {})
    assert "query-1" in str(refused.value)
    assert "query-2" in str(refused.value)


def test_a_location_that_hangs_holds_up_no_other_query(tmp_path: Path) -> None:
    """The page asks all queries at once, each in a thread of its own."""
    is_asked, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        is_asked.set()
        goes_on.wait(20)

    with ThreadPoolExecutor(2) as threads, open_storage(str(tmp_path)) as storage:
        storage.put("metadata", b'{"id": "7c1e"}')
        hanging = QueryPointers(FaultyStorage(storage, [Fault("delay", wait=hang)]), threads)
        first = threads.submit(lambda: hanging.query_id)
        try:
            assert is_asked.wait(20)
            other = QueryPointers(storage, threads)
            assert threads.submit(lambda: other.query_id).result(timeout=10) == "7c1e"
        finally:
            goes_on.set()
        assert first.result() == "7c1e"
