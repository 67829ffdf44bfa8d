"""What a session has set for a sink arrives in its data source, whose options lose their case on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import sinks
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.sink_source.options import SourceOptions, options_of

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
    with pytest.raises(InvalidArgumentError, match=r"those are spark\.holdfast\.sink\.Out\.<option>") as refused:
        SourceOptions.parse(given | {name: "not-to-be-seen"}, sink, ["name", "path"])
    assert "not-to-be-seen" not in str(refused.value)
