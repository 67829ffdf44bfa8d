"""The examples without Spark: the demo's parts, sessions, and stateful ones in both forms."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType
from rich.console import Console

from holdfast import clock, sinks
from holdfast.errors import InvalidArgumentError
from holdfast.examples.flights import data, report, sessions
from holdfast.examples.flights.command import _how_to_look, demo
from holdfast.examples.flights.query import Job
from holdfast.examples.flights.results import looking
from holdfast.examples.flights.results.files import ParquetResults
from holdfast.examples.flights.results.looking import Look
from holdfast.examples.flights.results.places import RESULTS
from holdfast.examples.flights.starts import Start, StartWatch, note_session
from holdfast.examples.stateful import deduplication, fraud, top_bids
from holdfast.examples.stateful import sessions as stateful_sessions
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.processor.exchange import RowExchange
from holdfast.spark_integration.processor.handle import PickledProcessor, declaration_of
from holdfast.spark_integration.processor.transform_with_state import TransformWithState
from holdfast.spark_integration.shard.operator import STATE_TABLE, ShardFunction
from holdfast.spark_integration.shard.timeout import TimeMode
from holdfast.spark_integration.spark_types import arrow_schema
from holdfast.spark_integration.vectorised.arrow_with_state import ArrowFunction, ArrowWithState, StateColumns
from holdfast.testing import PandasWithStateTester, TwsTester
from holdfast.testing.ddl import parse_schema
from holdfast.testing.embedded_shard import EmbeddedShard
from tests import flights_by_pandas, sink_logs
from tests.tiers import repetitions

FLIGHTS = pd.DataFrame(
    {
        "seq": [0, 1, 2, 3],
        "carrier": ["UA", "UA", "AA", "AA"],
        "tailnum": ["N1", None, "N1", None],
        "origin": ["JFK", "JFK", "LGA", "LGA"],
        "dest": ["LAX", "LAX", "ORD", "BOS"],
        "dep_delay": pd.array([5, None, 10, -3], "Int64"),
        "arr_delay": pd.array([1, None, None, -8], "Int64"),
    }
)


def test_totals_by_pandas() -> None:
    totals = data.expected_totals(FLIGHTS).set_index(["kind", "name"])
    n1 = totals.loc[("aircraft", "N1")]
    assert (n1["flights"], n1["mean_dep_delay"], n1["worst_dep_delay"], n1["mean_arr_delay"]) == (2, 7.5, 10, 1.0)
    assert n1["last_airport"] == "LAX"  # the later flight did not arrive
    assert set(totals.loc["route"].index) == {"JFK-LAX", "LGA-ORD", "LGA-BOS"}
    assert len(totals.loc["aircraft"]) == 2, "unknown aircraft are one subject"


def test_differences_are_missing_unexpected_and_repeated_subjects() -> None:
    totals = data.expected_totals(FLIGHTS)
    shuffled = totals.sample(frac=1, random_state=1).astype({"name": object}).replace({"name": {float("nan"): None}})
    assert report.differences(shuffled, totals) == []
    assert report.differences(totals.iloc[1:], totals) == ["('aircraft', 'N1'): missing"]
    assert report.differences(totals, totals.iloc[1:]) == ["('aircraft', 'N1'): unexpected"]
    assert report.differences(pd.concat([totals, totals]), totals) == ["a subject occurs twice"]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("flights", 7),
        ("mean_dep_delay", 7.500001),
        ("worst_arr_delay", None),
        ("last_airport", "SFO"),
        ("last_airport", None),
    ],
)
def test_one_wrong_value_is_found(column: str, value: object) -> None:
    totals = data.expected_totals(FLIGHTS)
    wrong = totals.copy()
    wrong.loc[wrong["name"] == "N1", column] = value
    assert len(report.differences(wrong, totals)) == 1
    assert column in report.differences(wrong, totals)[0]


@pytest.mark.slow(1)
def test_flights_come_in_time_order() -> None:
    flights = data.load_flights(1000)
    assert len(flights) == 1000
    assert flights["seq"].tolist() == list(range(1000))


def test_missing_flights_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidArgumentError, match=r"pip install 'holdfast-spark\[demo\]'"):
        data.load_flights(1000)


def test_a_setting_without_value_is_refused_and_not_shown() -> None:
    result = CliRunner().invoke(demo, ["--conf", "secret"])
    assert isinstance(result.exception, InvalidArgumentError)
    assert "secret" not in str(result.exception)


@pytest.mark.slow(1)
def test_a_refused_demo_leaves_a_work_dir_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.examples.flights.command.ensure_java", lambda: None)
    (tmp_path / "mine").touch()
    result = CliRunner().invoke(demo, ["--flights", "1000", "--work-dir", str(tmp_path)])
    assert isinstance(result.exception, InvalidArgumentError)
    assert "must be empty" in str(result.exception)
    assert (tmp_path / "mine").exists()
    monkeypatch.delenv("KAFKA_TOPIC", raising=False)
    arguments = ["--flights", "1000", "--sink", "kafka", "--work-dir", str(tmp_path / "work")]
    result = CliRunner().invoke(demo, arguments)
    assert isinstance(result.exception, InvalidArgumentError)
    assert not (tmp_path / "work").exists()


def test_the_command_that_opens_the_page_works_as_it_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """``make demo`` calls the program by its path: a shell may not find it by name."""
    job = Job("/work dir", "/work dir/state", {"spark.holdfast.storage.secret": "hunter2"}, 0)
    monkeypatch.setattr("sys.argv", ["/opt/my venv/bin/holdfast", "demo"])
    monkeypatch.setenv("PATH", "/nowhere")
    shown = _how_to_look(job, keep=True)
    assert "'/opt/my venv/bin/holdfast' ui '/work dir/state' '/work dir/query' --option secret=…" in shown
    monkeypatch.setattr("sys.argv", ["/usr/lib/python/pytest"])
    assert ": holdfast ui " in _how_to_look(job, keep=True)


HOUR_MS = 3_600_000


@pytest.fixture(scope="module")
def flights() -> pd.DataFrame:
    return data.load_flights(1500)


def follower() -> PandasWithStateTester:
    return PandasWithStateTester(
        sessions.follow,
        "tailnum",
        sessions.LEGS,
        sessions.CHAINS,
        sessions.CHAIN,
        "EventTimeTimeout",
        eventTime="departure",
    )


def as_set(rows: pd.DataFrame) -> set[tuple[object, ...]]:
    return set(rows[["tailnum", *sessions.Chain._fields]].itertuples(index=False, name=None))


@pytest.mark.all
@pytest.mark.slow
def test_chains_are_those_of_pandas(flights: pd.DataFrame) -> None:
    """Every flight is in the chain that it belongs to, whichever micro-batch brings it, and each chain comes once."""
    chains, found = follower(), []
    legs = flights[flights["tailnum"].notna()]
    legs = legs.assign(departure_ms=legs["departure"].dt.tz_convert("UTC").astype("int64") // 1_000_000)
    for start in range(0, len(legs), 500):
        batch = legs.iloc[start : start + 500]
        found.append(chains.testInPandas(batch[["seq", "tailnum", "dest", "departure", "departure_ms"]]))
        newest_ms = int(batch["departure_ms"].max())
        found.append(
            pd.DataFrame(chains.setWatermark(newest_ms - HOUR_MS), columns=["tailnum", *sessions.Chain._fields])
        )
    found.append(pd.DataFrame(chains.setWatermark(newest_ms + 5 * HOUR_MS), columns=found[-1].columns))
    expected = flights_by_pandas.expected_chains(flights, sessions.GAP_MS)
    together = pd.concat(found)
    assert len(together) == len(expected) > 400
    assert as_set(together) == as_set(expected)
    assert expected["legs"].max() > 2


@pytest.mark.slow(1)
def test_statistics_are_those_of_pandas(flights: pd.DataFrame) -> None:
    columns = "carrier string, dep_delay long"
    delays = PandasWithStateTester(
        sessions.add_delays, "carrier", columns, sessions.STATISTICS, "n long, mean double, squares double"
    )
    rows = flights[["carrier", "dep_delay"]]
    found = [delays.testInPandas(rows.iloc[start : start + 700]) for start in range(0, len(rows), 700)]
    newest = pd.concat(found).groupby("carrier").tail(1).sort_values("carrier", ignore_index=True)
    pd.testing.assert_frame_equal(newest, flights_by_pandas.expected_statistics(flights), check_dtype=False)


@pytest.mark.parametrize(
    ("delays", "mean", "deviation"), [([None], None, None), ([5], 5.0, None), ([4, 6], 5.0, 2**0.5)]
)
def test_statistics_of_few_flights(delays: list[int | None], mean: float | None, deviation: float | None) -> None:
    columns = "carrier string, dep_delay long"
    few = PandasWithStateTester(
        sessions.add_delays, "carrier", columns, sessions.STATISTICS, "n long, mean double, squares double"
    )
    [row] = few.test([("AA", delay) for delay in delays])
    assert (row["mean_delay"], row["deviation"]) == (mean, pytest.approx(deviation) if deviation else None)


SHOWN_FLIGHTS = pd.DataFrame(
    {
        "seq": range(6),
        "carrier": ["UA", "UA", "AA", "UA", "AA", "UA"],
        "tailnum": ["N1", None, "N1", None, "N2", "N1"],
        "origin": ["JFK", "JFK", "LGA", "LGA", "JFK", "JFK"],
        "dest": ["LAX", "LAX", "ORD", "BOS", "LAX", "LAX"],
        "dep_delay": pd.array([5, None, 10, -3, 0, 2], "Int64"),
        "arr_delay": pd.array([1, None, None, -8, 0, 2], "Int64"),
    }
)
ENDS = (2, 3, 6)


def results(ends: tuple[int, ...] = ENDS) -> pd.DataFrame:
    """Return what micro-batches that end there show, by plain pandas."""
    batches = []
    for batch, (begin, end) in enumerate(zip((0, *ends), ends, strict=False)):
        touched = data.expected_totals(SHOWN_FLIGHTS.iloc[begin:end]).set_index(["kind", "name"]).index
        totals = data.expected_totals(SHOWN_FLIGHTS.iloc[:end]).set_index(["kind", "name"])
        batches.append(totals.loc[totals.index.isin(touched)].reset_index().assign(batch=batch))
    return pd.concat(batches, ignore_index=True)


@pytest.mark.slow(0.5)
@pytest.mark.parametrize("ends", [ENDS, (1, 2, 3, 4, 5, 6), (6,)])
def test_each_micro_batch_once_is_right(ends: tuple[int, ...]) -> None:
    assert looking.not_once(results(ends), SHOWN_FLIGHTS, len(ends)) == []


def test_rows_and_micro_batches_too_many_or_too_few_are_named() -> None:
    rows = results()
    at = rows.index[(rows["batch"] == 1) & (rows["kind"] == "route")]
    assert looking.not_once(rows.drop(at), SHOWN_FLIGHTS, 3) == ["micro-batch 1: route LGA-ORD with 1 flights: missing"]
    doubled = pd.concat([rows, rows.loc[at]])
    assert looking.not_once(doubled, SHOWN_FLIGHTS, 3) == [
        "micro-batch 1: route LGA-ORD with 1 flights: more than once"
    ]
    assert "micro-batch 1: missing" in looking.not_once(rows[rows["batch"] != 1], SHOWN_FLIGHTS, 3)
    again = pd.concat([rows, rows[rows["batch"] == 2].assign(batch=3)])
    assert looking.not_once(again, SHOWN_FLIGHTS, 3)


def look(rows: pd.DataFrame, ended: int, decided: dict[int, int]) -> Look:
    return Look(rows, ended, decided, "table", "a reader")


def test_what_is_said_and_what_is_wrong_at_the_kill() -> None:
    rows = results()
    before, last = rows[rows["batch"] < 2], int((rows["batch"] == 2).sum())
    cases = {
        "the same": look(rows, 3, {2: last}),
        "one more, which was decided": look(rows, 2, {2: last}),
        "2 was decided, and is not visible yet: the next start commits it": look(before, 2, {2: last}),
        f"1 of its {last} rows are visible": look(rows.iloc[: len(before) + 1], 2, {2: last}),
    }
    for text, seen in cases.items():
        assert text in seen.said()
        assert seen.wrong() == []
    assert [seen.newest for seen in cases.values()] == [2, 2, 1, 1]
    last = int((rows["batch"] == 2).sum())
    assert look(rows, 2, {1: 3}).wrong() == ["micro-batch 2 is visible but was not decided"]
    assert look(rows[rows["batch"] != 1], 3, {2: last}).wrong() == ["micro-batch 1 is missing"]
    assert look(rows.iloc[:-1], 3, {2: last}).wrong() == [f"micro-batch 2 has {last - 1} rows, not {last}"]
    assert "not the same" in look(rows, 2, {1: 3}).said()
    then = data.expected_totals(SHOWN_FLIGHTS.iloc[:3])
    partly = look(rows.iloc[:-1], 2, {2: int((rows["batch"] == 2).sum())})
    assert partly.check(then).wrong == []
    assert partly.check(then.assign(flights=7)).wrong


def test_a_decision_without_a_commit_is_seen_in_a_real_sink(tmp_path: Path) -> None:
    """As a driver leaves it that dies between the two; the commit of the next start makes it visible."""
    place = ParquetResults(tmp_path / "output", "1", {})
    sink, query = place.sink(), sinks.SinkQuery(place.name, "11111111-1111-1111-1111-111111111111")
    (tmp_path / "query" / "commits").mkdir(parents=True)
    (tmp_path / "query" / "commits" / "0").touch()
    (tmp_path / "query" / "metadata").write_text(f'{{"id": "{query.query_id}"}}')
    rows, handles = results(), []

    def checkpoint() -> object:
        return open_storage(str(tmp_path / "state"), {})

    for batch in (0, 1):
        table = pa.Table.from_pandas(rows[rows["batch"] == batch], preserve_index=False)
        if batch == 0:
            sink.open(query, table.schema)
        transaction = sink.begin(sinks.SinkAttempt(query, batch, 0, f"{batch:032x}"), table.schema)
        for part in table.to_batches():
            transaction.write(part)
        handles.append(transaction.prepare())
        with open_storage(str(tmp_path / "state"), {}) as storage:
            sink_logs.decide(storage, place.name, query.query_id, batch, handles[-1], rows=table.num_rows)
        if batch == 0:
            sink.commit(query, 0, handles)
    seen = place.look(tmp_path / "query", checkpoint)  # type: ignore[arg-type]
    assert seen is not None
    assert "1 was decided, and is not visible yet: the next start commits it" in seen.said()
    sink.commit(query, 1, handles[1:])
    seen = place.look(tmp_path / "query", checkpoint)  # type: ignore[arg-type]
    assert seen is not None
    assert "one more, which was decided" in seen.said()


@pytest.mark.parametrize(
    ("sink", "environment", "named"),
    [
        ("postgres", {"PGHOST": "127.0.0.1", "PGPORT": "1", "PGPASSWORD": "canary"}, "`make postgres`"),
        ("kafka", {"KAFKA_SERVERS": "", "KAFKA_TOPIC": ""}, "`make kafka`"),
    ],
)
def test_a_missing_server_is_named_before_anything_starts(
    sink: str, environment: dict[str, str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgumentError, match=named) as raised:
        RESULTS[sink](tmp_path, "1", {}).prepare()
    assert "canary" not in str(raised.value)


def test_a_connection_string_that_is_none_is_refused_and_not_shown(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        RESULTS["postgres"](tmp_path, "1", {"dsn": "host=db secret"}).prepare()
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("sink", "package"), [("delta", "deltalake"), ("postgres", "psycopg"), ("kafka", "confluent_kafka")]
)
def test_a_missing_extra_is_named(sink: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `pip install holdfast-spark[demo]`."""
    monkeypatch.setenv("KAFKA_SERVERS", "127.0.0.1:1")
    monkeypatch.setenv("KAFKA_TOPIC", "totals")
    for name in [name for name in sys.modules if name.startswith(f"holdfast.spark_integration.sinks.{sink}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InvalidArgumentError, match=rf"pip install 'holdfast-spark\[{sink}\]'"):
        RESULTS[sink](tmp_path, "1", {}).prepare()


Rows = list[tuple[Any, ...]]


class SideBySide:
    """Runs micro-batches on both forms."""

    def __init__(self, columns: str, output: str) -> None:
        self._columns, self._output = parse_schema(columns), parse_schema(output)
        self._key = StructType([self._columns[0]])
        self._key_types = arrow_schema(self._key, "the keys")
        self._sides: list[tuple[ShardFunction, EmbeddedShard]] = []

    def add_processor(self, processor: StatefulProcessor, time_mode: TimeMode) -> None:
        pickled = PickledProcessor(processor)
        function = TransformWithState(
            processor=pickled,
            declared=declaration_of(pickled, time_mode, lambda text, _: parse_schema(text)),
            key_types=self._key_types,
            key_schema=self._key,
            given_keys=[0],
            shown_columns=self._columns.names,
            exchange=RowExchange(self._output, "UTC", 10_000),
            time_mode=time_mode,
            output_mode="append",
            is_streaming=True,
        )
        self._add(function)

    def add_vectorised(
        self, function: ArrowFunction, state: str, time_mode: TimeMode, ttl_ms: int | None = None
    ) -> None:
        states = {STATE_TABLE: StateColumns(arrow_schema(parse_schema(state), "the state"), ttl_ms)}
        output = arrow_schema(self._output, "the output")
        self._add(ArrowWithState(function, self._key_types, output, states, time_mode))

    def _add(self, function: ShardFunction) -> None:
        self._sides.append((function, EmbeddedShard("example", function, self._key_types)))

    def run(self, rows: Sequence[tuple[Any, ...]], now_ms: int = 0) -> Rows:
        """Run a micro-batch at a time on both clocks; return the output, sorted, which is the same of both."""
        schema = arrow_schema(self._columns, "the input")
        given = pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema)
        first, second = (self._run(function, shard, given, now_ms) for function, shard in self._sides)
        assert first == second
        return first

    def _run(self, function: ShardFunction, shard: EmbeddedShard, rows: pa.Table, now_ms: int) -> Rows:
        batches = shard.run(function, rows, rows.select(self._key.names).combine_chunks(), now_ms, now_ms)
        found = [tuple(row[name] for name in self._output.names) for batch in batches for row in batch.to_pylist()]
        return sorted(found, key=repr)

    def stored(self) -> int:
        """Return how many rows both sides hold, of state and of timers."""
        held = 0
        for _, shard in self._sides:
            with shard.begin() as transaction:
                held += sum(len(run) for table in shard.tables for run in transaction.scan(table))
        return held


def on_time(rows: Sequence[tuple[Any, ...]], watermark_ms: int) -> Rows:
    """Return the rows that are not late; their last value is their time."""
    return [row for row in rows if row[-1] > watermark_ms]


MINUTE_MS = 60_000
END_MS = 1 << 50
seeds = pytest.mark.parametrize("seed", repetitions(1, 40))


class Stream:
    """Micro-batches of events, out of order; the watermark follows the newest one that was seen."""

    def __init__(self, generator: np.random.Generator, delay_ms: int) -> None:
        self._generator = generator
        self._delay_ms = delay_ms
        self.events: Rows = []

    def micro_batches(self, rows: list[Rows]) -> Iterator[tuple[Rows, int]]:
        """Yield the rows of each that are not late, and its watermark; at the end the watermark passes everything."""
        watermark_ms = late_ms = 0
        newest_ms = 0
        for given in rows:
            seen = on_time(given, late_ms)
            self.events += seen
            yield seen, watermark_ms
            late_ms = watermark_ms
            newest_ms = max([newest_ms, *(row[-1] for row in given)])
            watermark_ms = max(watermark_ms, newest_ms - self._delay_ms)
        yield [], watermark_ms
        yield [], END_MS

    def times(self, n: int, batches: int, span_ms: int, spread_ms: int) -> list[list[int]]:
        """Return the times of events by micro-batch: they go forward, with a spread."""
        starts = np.arange(batches) * span_ms + 10 * span_ms
        return [(start + self._generator.integers(0, spread_ms, n)).tolist() for start in starts]


def sessions_by_loop(clicks: Rows) -> Rows:
    """Return what a loop over all clicks in order of time finds."""
    by_user: dict[Any, list[int]] = defaultdict(list)
    for user, at_ms in clicks:
        by_user[user].append(at_ms)
    found = []
    for user, times in by_user.items():
        times.sort()
        cuts = [0, *(i for i in range(1, len(times)) if times[i] - times[i - 1] > stateful_sessions.GAP_MS), len(times)]
        found += [(user, times[a], times[b - 1], b - a) for a, b in itertools.pairwise(cuts)]
    return sorted(found, key=repr)


@pytest.mark.slow(1)
@seeds
def test_sessions(seed: int) -> None:
    """Each click that is not late is in one session, whenever it comes; nothing is left when all are over."""
    stream = Stream(generator := np.random.default_rng(seed), 10 * MINUTE_MS)
    side = SideBySide("user string, at_ms long", stateful_sessions.SESSIONS)
    side.add_processor(stateful_sessions.Sessions(), "EventTime")
    side.add_vectorised(stateful_sessions.sessions_of_shard, stateful_sessions.STATE, "EventTime")
    times = stream.times(4, 40, 10 * MINUTE_MS, 45 * MINUTE_MS)
    batches = [[(f"u{generator.integers(9)}", at_ms // MINUTE_MS * MINUTE_MS) for at_ms in some] for some in times]
    found = [row for rows, watermark_ms in stream.micro_batches(batches) for row in side.run(rows, watermark_ms)]
    assert sorted(found, key=repr) == sessions_by_loop(stream.events)
    assert len(found) > 20
    assert sum(map(len, batches)) > len(stream.events), "some were late"
    assert side.stored() == 0


def test_a_session_is_over_when_the_watermark_says_so() -> None:
    """A click at the very end of the gap joins; the timer of what was the end then finds nothing."""
    tester = TwsTester(stateful_sessions.Sessions(), timeMode="EventTime", eventTimeExtractor=lambda row: row.at_ms)
    tester.test("ann", [Row(at_ms=1), Row(at_ms=stateful_sessions.GAP_MS + 1)])
    tester.test("ann", [Row(at_ms=5 * stateful_sessions.GAP_MS)])
    assert tester.setWatermark(2 * stateful_sessions.GAP_MS) == []
    [over] = tester.setWatermark(2 * stateful_sessions.GAP_MS + 1)
    assert (over.first_ms, over.last_ms, over.clicks) == (1, stateful_sessions.GAP_MS + 1, 2)
    assert tester.peekListState("open", "ann") == [(5 * stateful_sessions.GAP_MS, 5 * stateful_sessions.GAP_MS, 1)]


@pytest.mark.slow(1)
@seeds
def test_deduplication(seed: int) -> None:
    """An order is given out when it was not given out for a day, with its first delivery in the micro-batch."""
    generator = np.random.default_rng(seed)
    side = SideBySide(deduplication.ORDERS, deduplication.ORDERS)
    side.add_processor(deduplication.FirstDeliveries(), "ProcessingTime")
    side.add_vectorised(deduplication.first_deliveries_of_shard, "delivery long", "None", deduplication.DAY_MS)
    seen_ms: dict[int, int] = {}
    deliveries: Counter[int] = Counter()
    given_twice = 0
    for now_ms in range(0, 3 * deduplication.DAY_MS, deduplication.DAY_MS // 8):
        rows: Rows = []
        for order in generator.integers(0, 40, 12).tolist():
            deliveries[order] += 1
            rows.append((order, f"item {order}", deliveries[order]))
        expected = {
            row[0]: row for row in reversed(rows) if now_ms - seen_ms.get(row[0], -END_MS) >= deduplication.DAY_MS
        }
        given_twice += len(expected.keys() & seen_ms)
        seen_ms |= dict.fromkeys(expected, now_ms)
        generator.shuffle(rows)
        assert side.run(rows, now_ms) == sorted(expected.values(), key=repr)
    assert given_twice
    side.run([], 9 * deduplication.DAY_MS)
    assert side.stored() == 0


@pytest.mark.slow(1)
@seeds
def test_fraud(seed: int) -> None:
    """Each payment without its confirmation is reported once, and too much whenever a card with rows waits for it."""
    generator = np.random.default_rng(seed)
    stream = Stream(generator, MINUTE_MS)
    side = SideBySide("card string, payment string, cents long, at_ms long", fraud.ALERTS)
    side.add_processor(fraud.Watch(), "EventTime")
    side.add_vectorised(fraud.alerts_of_shard, fraud.STATE, "EventTime")
    batches: list[Rows] = [[] for _ in range(40)]
    for number, times in enumerate(stream.times(4, 30, 2 * MINUTE_MS, 2 * MINUTE_MS)):
        for i, at_ms in enumerate(times):
            card, payment = f"c{generator.integers(4)}", f"p{number}-{i}"
            batches[number].append((card, payment, int(generator.integers(1, 90)) * 1000, at_ms))
            if generator.random() < 0.8:  # its confirmation, perhaps earlier or in a later micro-batch
                come = max(0, number + int(generator.integers(-1, 4)))
                batches[come].append((card, payment, None, at_ms + int(generator.integers(0, 4 * MINUTE_MS))))
    waiting: dict[tuple[str, str], tuple[int | None, int]] = {}
    kinds: Counter[str] = Counter()
    for rows, watermark_ms in stream.micro_batches(batches):
        expected: Rows = []
        for card, payment, cents, at_ms in rows:
            if waiting.pop((card, payment), None) is None:
                waiting[card, payment] = cents, at_ms + fraud.WAIT_MS
        for card in {row[0] for row in rows}:
            total = sum(cents or 0 for (of, _), (cents, _) in waiting.items() if of == card)
            expected += [(card, "too much", None, total)] if total > fraud.LIMIT_CENTS else []
        for (card, payment), (cents, due_ms) in list(waiting.items()):
            if due_ms <= watermark_ms:
                del waiting[card, payment]
                expected += [(card, "not confirmed", payment, cents)] if cents is not None else []
        assert side.run(rows, watermark_ms) == sorted(expected, key=repr)
        kinds.update(alert for _, alert, _, _ in expected)
    assert min(kinds.values()) > 3
    assert len(kinds) == 2
    assert side.stored() == 0


@seeds
def test_top_bids(seed: int) -> None:
    """The top of an auction is given out where it differs from the one before, ties and equal bids included."""
    generator = np.random.default_rng(seed)
    side = SideBySide(top_bids.BIDS, top_bids.TOP)
    side.add_processor(top_bids.TopBids(), "None")
    side.add_vectorised(top_bids.top_bids_of_shard, top_bids.STATE, "None")
    bids: dict[int, Rows] = defaultdict(list)
    unchanged = 0
    for _ in range(12):
        batch = zip(*(generator.integers(0, n, 15).tolist() for n in (6, 4, 30)), strict=True)
        rows = [(auction, f"b{bidder}", price) for auction, bidder, price in batch]
        expected: Rows = []
        for auction in {row[0] for row in rows}:
            before = sorted(bids[auction], key=lambda bid: (-bid[0], bid[1]))[: top_bids.PLACES]
            bids[auction] += [(price, bidder) for of, bidder, price in rows if of == auction]
            top = sorted(bids[auction], key=lambda bid: (-bid[0], bid[1]))[: top_bids.PLACES]
            if top != before:
                expected += [(auction, place, bidder, price) for place, (price, bidder) in enumerate(top, 1)]
            unchanged += top == before
        assert side.run(rows) == sorted(expected, key=repr)
    assert unchanged > 5


def test_a_start_is_told_in_its_parts() -> None:
    """Each figure is a duration of its own: they add up to the whole."""
    shown = str(Start(session_ms=9000, first_call_ms=12500, commit_ms=14000))
    assert shown == "9.0 s until Spark was up, 3.5 s until its workers called holdfast, 1.5 s until Spark had committed"


def test_the_first_call_is_seen_in_its_own_local_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier executor has left, or another query, is no call of this start."""
    now_ms = [0]
    monkeypatch.setattr(clock, "monotonic_ms", lambda: now_ms[0])
    user = tmp_path / f"holdfast-{os.getuid()}"
    (tmp_path / "query").mkdir()
    (tmp_path / "query" / "metadata").write_text(json.dumps({"id": "mine"}))
    (user / "executor-1-1" / "disk" / "mine").mkdir(parents=True)
    now_ms[0] = 1000
    watch = StartWatch(tmp_path, tmp_path)
    for ms, place in ((4000, None), (5000, "executor-2-2/disk/another"), (6000, "executor-2-2/memory/mine")):
        now_ms[0] = ms
        if place is None:
            note_session(tmp_path)
        else:
            (user / place).mkdir(parents=True)
        watch.look()
    now_ms[0] = 9000
    watch.look()
    assert watch.committed() == Start(session_ms=3000, first_call_ms=5000, commit_ms=8000)


def test_a_query_that_has_not_begun_has_called_nothing(tmp_path: Path) -> None:
    """Spark writes the query's id some time after the watch has begun."""
    watch = StartWatch(tmp_path, tmp_path)
    watch.look()
    note_session(tmp_path)
    start = watch.committed()
    assert start.session_ms <= start.first_call_ms == start.commit_ms


def test_figures_tell_both_starts_in_their_parts(tmp_path: Path) -> None:
    """Nobody is to take the start of a JVM for holdfast's recovery."""
    (tmp_path / "progress.jsonl").write_text(json.dumps({"batch": 0, "rows": 1, "ms": 700}))
    sizes = {"state_rows": 3, "state_bytes": 100, "read_ms": 5, "durable_bytes": 2_000, "durable_objects": 4}
    (tmp_path / "result.json").write_text(json.dumps({**sizes, "restarts": 0}))
    console = Console(width=200, file=io.StringIO())
    starts = [Start(9000, 12_500, 14_000), Start(20_000, 28_000, 30_500)]
    report.show_figures(console, tmp_path, starts, report.Kill(2, 31_000, "local files"))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "first start      9.0 s until Spark was up, 3.5 s until" in shown
    assert "recovery         31.0 s from kill to next commit: 20.0 s until Spark was up, 8.0 s until" in shown
