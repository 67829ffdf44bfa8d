"""The sessions example in Spark, over micro-batches of the flights, against plain pandas."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest

import holdfast
from holdfast.examples.flights import data, sessions
from tests import flights_by_pandas
from tests.spark.conftest import Lab

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def flights() -> pd.DataFrame:
    return data.load_flights(3000)


def source(lab: Lab, flights: pd.DataFrame) -> DataFrame:
    data.write_files(flights, lab.folder / "input", 3)
    return lab.source(data.TIMED_FLIGHT_COLUMNS)


def rows_of(frame: pd.DataFrame) -> set[tuple[Any, ...]]:
    return set(frame[["tailnum", *sessions.Chain._fields]].itertuples(index=False, name=None))


@pytest.mark.all
@pytest.mark.parametrize("chains", [sessions.chains, sessions.vectorised_chains], ids=["by key", "vectorised"])
def test_chains_end_after_four_hours(lab: Lab, flights: pd.DataFrame, chains: Callable[[DataFrame], DataFrame]) -> None:
    """Each chain has come out once or is still in the state; what pandas finds and what is there are the same."""
    batches = lab.run(chains(source(lab, flights)), mode="append")
    ended = pd.DataFrame([row for batch in batches for row in batch])
    still_open = holdfast.read_state(lab.spark, lab.folder / "query", "chains").to_pandas()
    expected = flights_by_pandas.expected_chains(flights, sessions.GAP_MS)
    assert len(ended) + len(still_open) == len(expected)
    assert rows_of(pd.concat([ended, still_open])) == rows_of(expected)
    newest_ms = expected["last_ms"].max()
    assert (still_open["last_ms"] >= newest_ms - sessions.GAP_MS - 3_600_000).all()
    assert ended["legs"].max() > 1


@pytest.mark.all
def test_statistics_of_delays(lab: Lab, flights: pd.DataFrame) -> None:
    """The newest row of each carrier is what pandas computes from all flights."""
    batches = lab.run(sessions.delay_statistics(source(lab, flights)))
    newest = {row["carrier"]: row for batch in batches for row in batch}
    found = pd.DataFrame(newest.values()).sort_values("carrier", ignore_index=True)
    pd.testing.assert_frame_equal(found, flights_by_pandas.expected_statistics(flights), check_dtype=False)
