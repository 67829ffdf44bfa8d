"""What plain pandas makes of the flights, to hold against the functions of `holdfast.examples.flights.sessions`."""

from __future__ import annotations

import pandas as pd


def expected_chains(flights: pd.DataFrame, gap_ms: int) -> pd.DataFrame:
    """Compute with pandas the chains of flights of each aircraft: a longer gap between departures ends one."""
    known = flights[flights["tailnum"].notna()].sort_values(["tailnum", "departure", "seq"])
    known = known.assign(departure_ms=known["departure"].dt.tz_convert("UTC").astype("int64") // 1_000_000)
    is_new = ~(known.groupby("tailnum")["departure_ms"].diff() <= gap_ms)
    return (
        known.groupby([known["tailnum"], is_new.cumsum().rename("chain")])
        .agg(
            legs=("seq", "size"),
            first_ms=("departure_ms", "min"),
            last_ms=("departure_ms", "max"),
            airports=("dest", " ".join),
        )
        .reset_index("tailnum")
        .reset_index(drop=True)
    )


def expected_statistics(flights: pd.DataFrame) -> pd.DataFrame:
    """Compute with pandas the number, mean and standard deviation of each carrier's delays at departure."""
    delays = flights.assign(dep_delay=flights["dep_delay"].astype("float64")).groupby("carrier")["dep_delay"]
    return delays.agg(departures="count", mean_delay="mean", deviation="std").reset_index()
