"""Sources of every kind: a restored query reads on where the original was saved, and says the same from then on."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyspark
import pytest
from pyspark.errors import StreamingQueryException

import holdfast
from holdfast import savepoints
from tests.servers.downloads import SPARK_KAFKA
from tests.servers.kafka import Kafka
from tests.spark.conftest import Lab
from tests.spark.parity.engines import configured
from tests.spark.savepoints.queries import counts, restored, rows
from tests.spark.savepoints.sources import (
    STEP,
    Files,
    Named,
    Rate,
    Reader,
    Source,
    Topic,
    Twice,
    Two,
    clicks,
    numbers_of,
    open_sessions,
)
from tests.tiers import cases

pytestmark = pytest.mark.spark

TABLES = ("state", "timers")


@pytest.fixture
def topic(lab: Lab, kafka: Kafka) -> Iterator[Topic]:
    if pyspark.__version__.startswith(("4.0.", "4.1.")):
        pytest.skip(f"Spark's connector to Kafka {SPARK_KAFKA} needs Spark 4.2 or newer")
    found = Topic(lab.spark, lab.folder / "topic", kafka)
    yield found
    found.close()


def run(lab: Lab, source: Source, query: str = "query", durable: str = "durable") -> list[list[str]]:
    lab.configure({"state.dir": str(lab.folder / durable)})
    return rows(lab.run(open_sessions(source.numbers()), query, "append"))


def ends(lab: Lab, query: str) -> tuple[list[str], int]:
    """Return where the sources of a query are, and its watermark."""
    location = lab.folder / query
    last = max(int(path.name) for path in (location / "commits").iterdir() if path.name.isdigit())
    _, _, *offsets = (location / f"offsets/{last}").read_text().splitlines()
    _, commit = (location / f"commits/{last}").read_text().splitlines()
    return sorted(offsets), json.loads(commit)["nextBatchWatermarkMs"]


def state(lab: Lab, query: str, durable: str) -> list[str]:
    lab.configure({"state.dir": str(lab.folder / durable)})
    tables = [holdfast.read_state(lab.spark, lab.folder / query, "sessions", table=name) for name in TABLES]
    return sorted(repr(row) for table in tables for row in table.to_pylist())


def saved(lab: Lab, source: Source) -> None:
    """Run a query over the first two steps, and save it."""
    for step in (0, 1):
        source.feed(step)
        run(lab, source)
    savepoints.create(lab.spark, lab.folder / "query", lab.folder / "savepoints", "one")


def require_the_same(lab: Lab, source: Source) -> None:
    said = []
    with configured(lab.spark, dict(source.settings)):
        saved(lab, source)
        restored(lab, shards=5)
        for step in (2, 3):
            source.feed(step)
            original = run(lab, source)
            assert run(lab, source, "again", "durable-again") == original
            said += [row for batch in original for row in batch]
    assert any("'quiet'" in row for row in said), "a timer of a shard that had no more rows"
    assert ends(lab, "again") == ends(lab, "query")
    assert state(lab, "again", "durable-again") == state(lab, "query", "durable")


@pytest.mark.parametrize("kind", cases([Files, Rate, Reader, Two], quick=1))
def test_a_restored_query_reads_on(lab: Lab, kind: type[Source]) -> None:
    """Rows, timers, watermark, positions and state: as in the original, which never stopped."""
    require_the_same(lab, kind(lab.spark, lab.folder / "source"))


@pytest.mark.all
def test_a_source_that_is_read_twice_is_read_on(lab: Lab) -> None:
    """Spark's log has a position for each time, and one folder for the source: the others' numbers differ."""
    source = Twice(lab.spark, lab.folder / "source")
    require_the_same(lab, source)
    assert len(ends(lab, "query")[0]) == 3
    assert sorted(path.name for path in (lab.folder / "again/sources").iterdir()) == ["0", "1"]


@pytest.mark.all
def test_named_sources_may_change_places(lab: Lab) -> None:
    """Each is given its own position by its name."""
    if not hasattr(lab.spark.readStream, "name"):
        pytest.skip("Spark has names of sources from 4.2 on")
    require_the_same(lab, Named(lab.spark, lab.folder / "source"))


@pytest.mark.kafka
@pytest.mark.all
def test_a_topic_of_kafka_is_read_on(lab: Lab, topic: Topic) -> None:
    """Its new partition, too, from the first record on; what the topic has forgotten fails the query, as documented."""
    require_the_same(lab, topic)
    topic.forget(0, 9)
    restored(lab, "later")
    lab.configure({"state.dir": str(lab.folder / "durable-later")})
    with pytest.raises(StreamingQueryException):  # Spark's words for it are lost with classes that were added later
        lab.run(open_sessions(topic.numbers()), "later", "append")
    restored(lab, "lossy")
    lab.configure({"state.dir": str(lab.folder / "durable-lossy")})
    assert lab.run(open_sessions(topic.numbers(failOnDataLoss="false")), "lossy", "append")


@pytest.mark.all
def test_sources_of_two_kinds_begin_anew(lab: Lab) -> None:
    """With ``sources="fresh"`` a savepoint is initial state: all rows of both are read again."""
    source = Two(lab.spark, lab.folder / "source")

    def by_user(query: str, durable: str) -> dict[str, int]:
        lab.configure({"state.dir": str(lab.folder / durable)})
        lab.run(counts(clicks(source.numbers()), ["user"], "clicks"), query)
        found = holdfast.read_state(lab.spark, lab.folder / query, "clicks").to_pylist()
        return {row["user"]: row["n"] for row in found}

    source.feed(0)
    once = by_user("query", "durable")
    assert sum(once.values()) == 2 * len(numbers_of(0)) == 2 * STEP
    savepoints.create(lab.spark, lab.folder / "query", lab.folder / "savepoints", "one")
    restored(lab, sources="fresh")
    assert by_user("again", "durable-again") == {user: 2 * n for user, n in once.items()}
