"""Queries that are saved half-way, and go on from there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Row
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import holdfast
from holdfast import savepoints
from holdfast.examples.flights import data
from holdfast.examples.flights.sessions import chains
from holdfast.examples.stateful import sessions
from holdfast.spark_integration.savepoints.tasks import OwnProcess
from holdfast.spark_integration.shard.pointer_row import GROUP_STATE, POINTER_COLUMN, POINTER_VARIABLE, PointerRow
from tests.spark.conftest import Lab, count
from tests.spark.processors.engines import NEEDED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@contextmanager
def without_spark(lab: Lab, state_dir: str) -> Iterator[OwnProcess]:
    """Give what commands save and clone with: this process, with the session's options of the storage."""
    prefix = "spark.holdfast.storage."
    given = {name: value for name, value in dict(lab.spark.conf.getAll).items() if name.startswith(prefix)}
    options = {name.removeprefix(prefix): value for name, value in given.items()}
    with ThreadPoolExecutor(4) as executor:
        yield OwnProcess(state_dir, options, executor, 2, lambda _: None)


def read_by_spark(
    spark: SparkSession, query: Path, batch_id: int
) -> list[tuple[int, str, bool, list[PointerRow] | None]]:
    """Return Spark's operators with state: number, name, whether with timeouts, and holdfast's pointers."""
    _ = spark.streams.active  # without which a read on Spark 4.1 may fail
    metadata = spark.read.format("state-metadata").option("batchId", batch_id).load(str(query))
    columns = metadata.select("operatorId", "operatorName", "operatorProperties").distinct()
    found = []
    for number, host, properties in columns.sort("operatorId").collect():
        source = spark.read.format("statestore").option("operatorId", number).option("batchId", batch_id)
        rows, has_timeout = None, False
        if host == GROUP_STATE:
            state = source.load(str(query))
            has_timeout = "timeoutTimestamp" in state.select("value.*").columns
            rows = state.select("value.groupState.*")
        elif POINTER_VARIABLE in (properties or ""):
            rows = source.option("stateVarName", POINTER_VARIABLE).load(str(query)).select("value.*")
        is_ours = rows is not None and rows.columns == [POINTER_COLUMN]
        pointers = (
            sorted(PointerRow.read(tuple(row)) for row in rows.collect()) if rows is not None and is_ours else None
        )
        found.append((number, host, has_timeout and is_ours, pointers))
    return found


@cache
def files_of_flights() -> list[pa.Table]:
    """Return four files; read when a test asks, since workers import this module too."""
    with tempfile.TemporaryDirectory() as folder:
        data.write_files(data.load_flights(3000), Path(folder) / "flights", 4)
        return [pq.read_table(file) for file in sorted(Path(folder).glob("flights/*.parquet"))]


@dataclass(frozen=True)
class Case:
    """A query, and the files that it reads, the last ones after the savepoint."""

    name: str
    schema: str
    query: Callable[[DataFrame], DataFrame]
    operator: str
    mode: str = "append"
    table: str = "state"
    has_timers: bool = True
    settings: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def files(self) -> list[pa.Table]:
        if self.schema == sessions.CLICKS:
            schema = pa.schema([("user", pa.string()), ("at", pa.timestamp("us", tz="UTC"))])
            return [
                pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema)
                for rows in sessions.BATCHES
            ]
        return list(files_of_flights())


def counts(frame: DataFrame, keys: list[str], name: str) -> DataFrame:
    columns = ", ".join(f"{key} string" for key in keys)
    grouped = holdfast.stream(frame).groupBy(*keys)
    return grouped.applyInArrowWithState(count, f"{columns}, n long", "n long", "update", name=name)


def totals(frame: DataFrame, name: str = "totals") -> DataFrame:
    return counts(frame, ["carrier"], name)


def two_operators(frame: DataFrame) -> DataFrame:
    """Count rows, and then how often each count has changed."""
    return counts(counts(frame, ["carrier", "origin"], "pairs"), ["origin"], "changes")


class Appending(StatefulProcessor):
    """Appends to a list, and gives it out as it stands."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.seen = handle.getListState("seen", "number long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for number in sorted(row.seq for row in rows):
            self.seen.appendValue((number,))
        yield Row(carrier=key[0], seen=",".join(str(number) for (number,) in self.seen.get()))


class Everything(StatefulProcessor):
    """Has a variable of each kind, with and without a time to live, and timers."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        hour_ms = 3_600_000
        self.values = [handle.getValueState("v", "n int, s string"), handle.getValueState("vt", "n int", hour_ms)]
        self.lists = [handle.getListState("l", "n int"), handle.getListState("lt", "n int", hour_ms)]
        self.maps = [
            handle.getMapState("m", "u string", "n int, parts array<int>"),
            handle.getMapState("mt", "u string", "n int", hour_ms),
        ]

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        numbers = [row.v for row in rows]
        for n in numbers:
            self.lists[0].appendValue((n,))
            self.lists[1].appendValue((n,))
            self.maps[0].updateValue((f"u{n}",), (n, [n, n + 1]))
            self.maps[1].updateValue((f"u{n}",), (n,))
        self.values[0].update((numbers[-1], "last"))
        self.values[1].update((numbers[-1],))
        self.handle.registerTimer(4_102_444_800_000 + numbers[-1])
        seen = [list(self.lists[0].get()), list(self.lists[1].get()), sorted(self.maps[0].keys()), self.values[1].get()]
        yield Row(key=key[0], seen=repr(seen), timers=repr(sorted(self.handle.listTimers())))


class Counting(StatefulProcessor):
    """Keeps the last number in as many variables as it is told to have."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.values = [handle.getValueState(name, "n long") for name in self.names]

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n = max(row.v for row in rows)
        for value in self.values:
            value.update((n,))
        yield Row(key=key[0])


class Passing(StatefulProcessor):
    """Hands rows on with their own time, and counts them."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.n = handle.getValueState("n", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        (n,) = self.n.get() or (0,)
        for row in rows:
            n += 1
            yield Row(user=key[0], at=row.at, at_ms=row.at_ms)
        self.n.update((n,))


def sessions_behind(frame: DataFrame) -> DataFrame:
    """Return sessions of what another processor hands on, by the watermark that it hands on, too."""
    clicks = frame.withWatermark("at", "10 minutes").withColumn("at_ms", F.unix_millis("at"))
    given, output = holdfast.stream(clicks).groupBy("user"), "user string, at timestamp, at_ms long"
    passed = given.transformWithState(
        *(Passing(), output, "append", "EventTime"), eventTimeColumnName="at", name="passed"
    )
    users = holdfast.stream(passed).groupBy("user")
    return users.transformWithState(sessions.Sessions(), sessions.SESSIONS, "append", "EventTime", name="sessions")


def appended(frame: DataFrame) -> DataFrame:
    grouped = holdfast.stream(frame).groupBy("carrier")
    output = "carrier string, seen string"
    return grouped.transformWithState(Appending(), output, "update", "None", name="appended")


UNCHECKED = {"spark.sql.streaming.unsupportedOperationCheck": "false"}
CASES = [
    Case("vectorised", data.TIMED_FLIGHT_COLUMNS, totals, "totals", "update", has_timers=False),
    Case("by key, event-time timeouts", data.TIMED_FLIGHT_COLUMNS, chains, "chains"),
    Case("vectorised, event-time timers", sessions.CLICKS, sessions.vectorised_sessions, "sessions"),
    Case("processor, event-time timers", sessions.CLICKS, sessions.sessions, "sessions", table="open", settings=NEEDED),
    Case(
        *("processor, an appended list", data.TIMED_FLIGHT_COLUMNS, appended, "appended", "update"),
        table="seen",
        has_timers=False,
        settings=NEEDED,
    ),
    Case("processors in a chain", sessions.CLICKS, sessions_behind, "sessions", table="open", settings=NEEDED),
    Case(
        *("two operators", data.TIMED_FLIGHT_COLUMNS, two_operators, "changes", "update"),
        has_timers=False,
        settings=UNCHECKED,
    ),
]


def rows(batches: list[list[dict[str, Any]]]) -> list[list[str]]:
    return [sorted(map(repr, batch)) for batch in batches]


def run(lab: Lab, case: Case, query: str = "query", durable: str = "durable") -> list[list[str]]:
    lab.configure({"state.dir": str(lab.folder / durable)})
    return rows(lab.run(case.query(lab.source(case.schema)), query, case.mode))


def state(lab: Lab, case: Case, query: str, durable: str) -> dict[str, list[str]]:
    """Return the rows by table, timers too."""
    lab.configure({"state.dir": str(lab.folder / durable)})
    found = {}
    for table in (case.table, *(["timers"] if case.has_timers else [])):
        rows = holdfast.read_state(lab.spark, lab.folder / query, case.operator, table=table).to_pylist()
        # The order of a list's elements is kept; the numbers that say it, and clocks, are not the same.
        rows.sort(key=lambda row: row.get("seq", 0))
        found[table] = sorted(repr({k: v for k, v in row.items() if k not in ("seq", "expires_ms")}) for row in rows)
    return found


def saved(lab: Lab, case: Case) -> list[pa.Table]:
    """Run a query over the first files, save it, and return the others."""
    files = case.files()
    for file in files[:2]:
        lab.feed(file)
    run(lab, case)
    savepoints.create(lab.spark, lab.folder / "query", lab.folder / "savepoints", "one", comment="half-way")
    return files[2:]


def restored(lab: Lab, query: str = "again", **options: Any) -> str:
    lab.configure({"state.dir": str(lab.folder / f"durable-{query}")})
    return savepoints.restore(lab.spark, lab.folder / "savepoints", "one", lab.folder / query, **options)
