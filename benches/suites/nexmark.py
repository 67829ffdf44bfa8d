"""Nexmark: each query vectorised and by key on holdfast, and on Spark's own operators, which must find the same."""

from __future__ import annotations

from functools import partial

from holdfast.benches.nexmark.equality import checked
from holdfast.benches.nexmark.job import Nexmark
from holdfast.benches.nexmark.queries import QUERIES
from holdfast.benches.nexmark.query import Query
from holdfast.benches.runs.paired import Entry
from holdfast.benches.suites.measurement import Measurement, Profile

BASELINE = "nexmark-spark"
ENGINES = ("nexmark-memory", "nexmark-rocksdb", "nexmark-memory-by-key", BASELINE)
_QUICK = "5"


def measurements(profile: Profile) -> list[Measurement]:
    """Return the questions of this suite: one for each query."""
    numbers = [_QUICK] if profile.quick else list(QUERIES)
    return [_measurement(number, quick=profile.quick) for number in numbers]


def _measurement(number: str, *, quick: bool) -> Measurement:
    query = QUERIES[number]
    job = Nexmark(query=number, batches=6, warmup=3) if quick else Nexmark(query=number)
    engines = _engines_of(query)
    return Measurement(
        suite="nexmark",
        name=f"query-{int(number):02}",
        question=f"Nexmark {number}, {query.title}: how fast is it?",
        entries={name: Entry(name, job) for name in engines},
        minutes=1.5 if quick else 2.5,
        baseline=BASELINE if BASELINE in engines else "",
        check=partial(checked, job, engines),
    )


def _engines_of(query: Query) -> tuple[str, ...]:
    """Return who runs a query: Spark 4.0 has no operator by Row for what its own operators cannot say."""
    from pyspark.sql import GroupedData

    if query.on_spark is None and not hasattr(GroupedData, "transformWithState"):
        return tuple(name for name in ENGINES if name != BASELINE)
    return ENGINES
