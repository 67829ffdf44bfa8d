"""What one micro-batch can show of a processor's state: the probes of `probes/`, on Spark's operator and on ours.

On Spark all run in one batch query, but for those that end its task; ours runs them in a stream on each backend, and in
a batch query as well.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark.errors import PythonException

from tests.spark.answers import Book, Questions
from tests.spark.once import Once
from tests.spark.parity.engines import Open, trial
from tests.spark.processors.engines import SPARK
from tests.spark.processors.probes import calls, lists, maps, types, values
from tests.spark.processors.probes.probe import INPUT, OUTPUT, Probe, Probing, findings_in, probes_of
from tests.spark.processors.ways import Way, by_way, ways
from tests.spark.questions import digest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.parity.engines import Trial

pytestmark = [pytest.mark.spark, pytest.mark.slow(0.3)]

PROBES = [probe for module in (values, lists, maps, types, calls) for probe in probes_of(module)]
TOGETHER = [probe for probe in PROBES if not probe.ends_spark]
ALONE = [probe for probe in PROBES if probe.ends_spark]


WAYS = ways(streams=True)
Find = Callable[[Way], dict[str, list[str]]]


def run(way: Way, probes: list[Probe], on: Trial, *, raises: bool = False) -> dict[str, list[str]]:
    """Return what probes find, by name."""
    names = [probe.name for probe in probes]
    table = pa.table({"key": pa.array(names, pa.string()), "v": pa.array(range(len(names)), pa.int64())})
    processor = Probing(way.api, [probe.function for probe in probes], raises=raises)
    rows = way.rows(on, table, INPUT, ["key"], processor, OUTPUT)
    return {key: findings_in(f"<found>{found}</found>") for key, found in rows}


def run_together(way: Way, on: Trial) -> dict[str, list[str]]:
    """Return what those find that can share a query."""
    return run(way, TOGETHER if way.is_spark else PROBES, on)


@pytest.fixture(scope="module")
def find(spark: SparkSession, local_state: Path, tmp_path_factory: pytest.TempPathFactory) -> Find:
    """Return a function that runs, once, the probes that can share a query, and returns what they find."""
    found = Once[dict[str, list[str]]]()

    def find_it(way: Way) -> dict[str, list[str]]:
        questions = Questions(Book.of(Path(__file__)), "all together", digest(run_together))
        with trial(spark, way.engine, tmp_path_factory.mktemp("probes"), local_state, questions=questions) as on:
            return run_together(way, on)

    return lambda way: found.get(way.name, lambda: find_it(way))


@by_way(WAYS)
@pytest.mark.parametrize("probe", TOGETHER, ids=lambda probe: probe.name)
def test_probe(probe: Probe, way: Way, find: Find) -> None:
    is_spark = way.is_spark
    assert probe.seen(find(way)[probe.name], is_spark=is_spark) == probe.wanted(is_spark=is_spark)


@by_way([way for way in WAYS if not way.is_spark])
@pytest.mark.parametrize("probe", ALONE, ids=lambda probe: probe.name)
def test_probe_that_ends_the_task_on_spark(probe: Probe, way: Way, find: Find) -> None:
    """X1, Q4: here it is an error like others, and all other keys go on."""
    assert probe.seen(find(way)[probe.name], is_spark=False) == probe.wanted(is_spark=False)


@pytest.mark.live
@pytest.mark.parametrize("probe", ALONE, ids=lambda probe: probe.name)
@by_way([Way(engine, is_batch=True) for engine in SPARK])
def test_what_ends_the_task_on_spark(probe: Probe, way: Way, run_on: Open) -> None:
    """X1: so that we learn when it changes."""
    with run_on(way.engine) as on, pytest.raises(PythonException) as error:
        run(way, [probe], on, raises=True)
    assert probe.seen(findings_in(error.value), is_spark=True) == probe.wanted(is_spark=True)
