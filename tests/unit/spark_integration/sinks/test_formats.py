"""A sink's arguments as options of its format, whose names lose their case on the way."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import sinks
from holdfast.errors import InvalidArgumentError
from holdfast.sinks import SinkSource, TwoPhaseSink
from holdfast.spark_integration.sink_source import (
    DeltaSource,
    KafkaSource,
    ParquetSource,
    PostgresSource,
    SourceOptions,
    options_of,
)
from tests.pages import ROOT

_AS_SPARK_HAS_THEM = {"url": "path", "partition_by": "partitionBy"}
_QUERY = {"checkpointLocation": "/nowhere/query", "spark.holdfast.state.dir": "/nowhere/durable"}


@pytest.mark.parametrize(
    ("source", "make"),
    [
        (PostgresSource, sinks.postgres),
        (KafkaSource, sinks.kafka),
        (ParquetSource, sinks.parquet),
        (DeltaSource, sinks.delta),
    ],
)
def test_every_argument_is_an_option(source: type[SinkSource], make: Callable[..., TwoPhaseSink]) -> None:
    arguments = [_AS_SPARK_HAS_THEM.get(name, name) for name in inspect.signature(make).parameters]
    assert sorted(source.arguments) == sorted(arguments)


@pytest.mark.parametrize(
    ("source", "given", "wanted"),
    [
        (KafkaSource, {"topic": "t", "timeout_s": "2.5"}, sinks.kafka("n", "t", timeout_s=2.5)),
        (KafkaSource, {"topic": "t"}, sinks.kafka("n", "t")),
        (
            ParquetSource,
            {"path": "/p", "compression": "none", "file_mb": "64"},
            sinks.parquet("n", "/p", compression="none", file_mb=64),
        ),
        (ParquetSource, {"path": "/p"}, sinks.parquet("n", "/p")),
        (
            DeltaSource,
            {"path": "/p", "compression": "lz4", "file_mb": "64"},
            sinks.delta("n", "/p", compression="lz4", file_mb=64),
        ),
        (DeltaSource, {"path": "/p"}, sinks.delta("n", "/p")),
    ],
)
def test_what_is_given_reaches_the_sink(source: type[SinkSource], given: dict[str, str], wanted: TwoPhaseSink) -> None:
    """And only the sink: nothing of it is left for the storage or the client."""
    given = {"name": "n"} | given
    made = source(given).sink()
    assert vars(made) == vars(wanted)
    assert SourceOptions.parse(given | _QUERY, made, source.arguments).sink == {}


@pytest.mark.parametrize(
    ("source", "given", "said"),
    [
        (KafkaSource, {"timeout_s": "soon"}, "the option timeout_s must be a number of seconds"),
        (KafkaSource, {"timeout_s": "-1"}, "the option timeout_s must be a number of seconds"),
        (KafkaSource, {"timeout_s": "0"}, "timeout_s must be from 0.001 to 3600"),
        (ParquetSource, {"path": "/p", "file_mb": "64m"}, "the option file_mb must be a whole number"),
        (ParquetSource, {"path": "/p", "file_mb": "0"}, "file_mb must be from 1 to 1024"),
        (DeltaSource, {"path": "/p", "compression": "zip"}, "no such compression"),
    ],
)
def test_what_cannot_be_is_refused(source: type[SinkSource], given: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        source({"name": "n"} | given).sink()


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
def test_kafka_is_waited_for_some_time(timeout_s: float) -> None:
    with pytest.raises(InvalidArgumentError, match="timeout_s must be"):
        sinks.kafka("n", "t", timeout_s=timeout_s)


@pytest.mark.slow(1)
def test_what_spark_imports_to_look_for_sources_is_light() -> None:
    """Spark does so in a new process, in each session and for each read or write: pandas alone would take 0.5 s."""
    found = sorted(path.name for path in (ROOT / "found_by_spark").iterdir() if path.name.startswith("pyspark_"))
    code = f"""
import sys
import {", ".join(found)}
print(sorted({{"pandas", "rocksdict", "fsspec", "s3fs", "deltalake", "psycopg", "confluent_kafka"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


RETAINED = "spark.sql.streaming.minBatchesToRetain"


def parsed(tmp_path: Path, **settings: str) -> SourceOptions:
    """Return what a data source makes of a session's settings, in lower case as Spark hands them over."""
    sink = sinks.parquet("out", tmp_path / "target")
    session = {"spark.holdfast.state.dir": str(tmp_path / "durable"), **settings}
    given = options_of(session, sink) | {"checkpointLocation": str(tmp_path / "query")}
    return SourceOptions.parse({name.lower(): value for name, value in given.items()}, sink, ["name", "path"])


@pytest.mark.parametrize(("settings", "kept"), [({}, 100), ({RETAINED: "7"}, 7), ({RETAINED: "0"}, 1)])
def test_as_many_decisions_are_kept_as_the_session_says(tmp_path: Path, settings: dict[str, str], kept: int) -> None:
    """As by `exactly_once`, and never as an option of the sink."""
    options = parsed(tmp_path, **settings)
    decisions, retained = options.open_decisions()
    decisions.close()
    assert retained == kept
    assert options.sink == {}


def test_how_many_is_a_number(tmp_path: Path) -> None:
    """Spark checks settings only: an option may hold anything."""
    with pytest.raises(InvalidArgumentError, match=f"{RETAINED} cannot be 'all': it must be a whole number"):
        parsed(tmp_path, **{RETAINED: "all"}).open_decisions()


@pytest.mark.parametrize(
    "name",
    ["spark.holdfast.sink.uot.key", "spark.holdfast.storage.key", "spark.holdfast.backend", "spark.holdfast.sink.o"],
)
def test_an_option_of_another_sink_is_refused(tmp_path: Path, name: str) -> None:
    """A stream has one sink, so it can be known; the client of the target would have to make sense of it."""
    sink = sinks.parquet("Out", tmp_path / "target")
    given = {
        "checkpointlocation": str(tmp_path / "query"),
        "spark.holdfast.state.dir": str(tmp_path / "durable"),
        "spark.holdfast.sink.out.key": "a",
        "secret": "b",
    }
    assert SourceOptions.parse(given, sink, ["name", "path"]).sink == {"key": "a", "secret": "b"}
    with pytest.raises(InvalidArgumentError, match=r"options spark\.holdfast\.sink\.Out\.<option>") as refused:
        SourceOptions.parse(given | {name: "not-to-be-seen"}, sink, ["name", "path"])
    assert "not-to-be-seen" not in str(refused.value)
