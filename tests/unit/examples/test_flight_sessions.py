"""The functions of the sessions example, on the tester and against plain pandas."""

from __future__ import annotations

import pandas as pd
import pytest

from holdfast.examples.flights import data, sessions
from holdfast.testing import PandasWithStateTester
from tests import flights_by_pandas

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
