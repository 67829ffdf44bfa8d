"""What the demo says of a sink: right where each micro-batch is there once, and wrong, by name, where it is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from click.testing import CliRunner

from holdfast import sinks
from holdfast.errors import InvalidArgumentError
from holdfast.examples.flights import data
from holdfast.examples.flights.command import demo
from holdfast.examples.flights.results import looking
from holdfast.examples.flights.results.files import ParquetResults
from holdfast.examples.flights.results.looking import Look
from holdfast.examples.flights.results.places import RESULTS
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_storage_options
from tests import sink_logs

FLIGHTS = pd.DataFrame(
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
        touched = data.expected_totals(FLIGHTS.iloc[begin:end]).set_index(["kind", "name"]).index
        totals = data.expected_totals(FLIGHTS.iloc[:end]).set_index(["kind", "name"])
        batches.append(totals.loc[totals.index.isin(touched)].reset_index().assign(batch=batch))
    return pd.concat(batches, ignore_index=True)


@pytest.mark.slow(0.5)
@pytest.mark.parametrize("ends", [ENDS, (1, 2, 3, 4, 5, 6), (6,)])
def test_each_micro_batch_once_is_right(ends: tuple[int, ...]) -> None:
    assert looking.not_once(results(ends), FLIGHTS, len(ends)) == []


def test_a_row_too_many_or_too_few_is_named() -> None:
    rows = results()
    at = rows.index[(rows["batch"] == 1) & (rows["kind"] == "route")]
    assert looking.not_once(rows.drop(at), FLIGHTS, 3) == ["micro-batch 1: route LGA-ORD with 1 flights: missing"]
    doubled = pd.concat([rows, rows.loc[at]])
    assert looking.not_once(doubled, FLIGHTS, 3) == ["micro-batch 1: route LGA-ORD with 1 flights: more than once"]


def test_a_micro_batch_that_is_missing_or_shown_under_two_numbers_is_named() -> None:
    rows = results()
    assert "micro-batch 1: missing" in looking.not_once(rows[rows["batch"] != 1], FLIGHTS, 3)
    again = pd.concat([rows, rows[rows["batch"] == 2].assign(batch=3)])
    assert looking.not_once(again, FLIGHTS, 3)


def look(rows: pd.DataFrame, ended: int, decided: dict[int, int]) -> Look:
    return Look(rows, ended, decided, "table", "a reader")


def test_what_is_said_at_the_kill() -> None:
    """Each moment at which a driver may die between decision, commit and Spark's log."""
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


def test_what_may_not_be_seen_at_the_kill_is_wrong() -> None:
    rows = results()
    last = int((rows["batch"] == 2).sum())
    assert look(rows, 2, {1: 3}).wrong() == ["micro-batch 2 is visible, and not decided"]
    assert look(rows[rows["batch"] != 1], 3, {2: last}).wrong() == ["micro-batch 1 is missing"]
    assert look(rows.iloc[:-1], 3, {2: last}).wrong() == [f"micro-batch 2 has {last - 1} rows, not {last}"]
    assert "not the same" in look(rows, 2, {1: 3}).said()


def test_the_state_at_the_kill_is_compared_with_what_was_whole() -> None:
    rows = results()
    then = data.expected_totals(FLIGHTS.iloc[:3])
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
        return open_storage(str(tmp_path / "state"), parse_storage_options({}))

    for batch in (0, 1):
        table = pa.Table.from_pandas(rows[rows["batch"] == batch], preserve_index=False)
        if batch == 0:
            sink.open(query, table.schema)
        transaction = sink.begin(sinks.SinkAttempt(query, batch, 0, f"{batch:032x}"), table.schema)
        for part in table.to_batches():
            transaction.write(part)
        handles.append(transaction.prepare())
        with open_storage(str(tmp_path / "state"), parse_storage_options({})) as storage:
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


@pytest.mark.slow(1)
def test_a_refused_demo_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.examples.flights.command.ensure_java", lambda: None)
    monkeypatch.delenv("KAFKA_TOPIC", raising=False)
    arguments = ["--flights", "1000", "--sink", "kafka", "--work-dir", str(tmp_path / "work")]
    result = CliRunner().invoke(demo, arguments)
    assert isinstance(result.exception, InvalidArgumentError)
    assert not (tmp_path / "work").exists()
