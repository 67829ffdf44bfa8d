"""Functions that see one key at a time: the chains of an aircraft's flights, and running statistics.

Both are written for Spark's ``applyInPandasWithState``, and run unchanged on Spark and on holdfast; docs/sessions.md
walks through them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import sqrt
from typing import Any, NamedTuple

import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.streaming.state import GroupState

import holdfast

LEGS = "seq long, tailnum string, dest string, departure timestamp, departure_ms long"
CHAIN = "legs long, first_ms long, last_ms long, airports string"
CHAINS = f"tailnum string, {CHAIN}"
STATISTICS = "carrier string, departures long, mean_delay double, deviation double"
GAP_MS = 4 * 3600 * 1000


class Chain(NamedTuple):
    """The flights of one aircraft that followed each other within four hours: what is kept for it."""

    legs: int
    first_ms: int
    last_ms: int
    airports: str


def follow(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Add an aircraft's flights to its chain; give out the chains that have ended."""
    chain = Chain(*state.get) if state.exists else None
    ended = []
    if state.hasTimedOut:
        ended.append(chain)
        state.remove()
    else:
        legs = pd.concat(frames).sort_values(["departure_ms", "seq"])
        for departure_ms, airport in zip(legs["departure_ms"].tolist(), legs["dest"].tolist(), strict=True):
            if chain is None or departure_ms - chain.last_ms > GAP_MS:
                ended += [chain] if chain is not None else []
                chain = Chain(1, departure_ms, departure_ms, airport)
            else:
                chain = Chain(chain.legs + 1, chain.first_ms, departure_ms, f"{chain.airports} {airport}")
        assert chain is not None  # a key that is called has rows, or has timed out
        state.update(chain)
        state.setTimeoutTimestamp(chain.last_ms + GAP_MS)
    yield pd.DataFrame(ended, columns=list(Chain._fields)).assign(tailnum=key[0])


def chains(flights: DataFrame) -> DataFrame:
    """Return each aircraft's chains of flights when they have ended: after four hours without a departure."""
    legs = flights.where("tailnum is not null").select(
        "seq", "tailnum", "dest", "departure", F.unix_millis("departure").alias("departure_ms")
    )
    return (
        holdfast.stream(legs.withWatermark("departure", "1 hour"))
        .groupBy("tailnum")
        .applyInPandasWithState(follow, CHAINS, CHAIN, "append", "EventTimeTimeout", name="chains")
    )


def add_delays(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Keep number, mean and sum of squared deviations of a carrier's delays, and give out what they are now."""
    n, mean, squares = state.getOption or (0, 0.0, 0.0)
    for frame in frames:
        delays = frame["dep_delay"].dropna()
        if len(delays):
            step, both = delays.mean() - mean, n + len(delays)
            squares += ((delays - delays.mean()) ** 2).sum() + step**2 * n * len(delays) / both
            mean += step * len(delays) / both
            n = both
    state.update((n, mean, squares))
    deviation = sqrt(squares / (n - 1)) if n > 1 else None
    yield pd.DataFrame(
        {"carrier": [key[0]], "departures": [n], "mean_delay": [mean if n else None], "deviation": [deviation]}
    )


def delay_statistics(flights: DataFrame) -> DataFrame:
    """Return for each carrier that a micro-batch touches the statistics of its delays at departure so far."""
    return (
        holdfast.stream(flights.select("carrier", "dep_delay"))
        .groupBy("carrier")
        .applyInPandasWithState(
            add_delays, STATISTICS, "n long, mean double, squares double", "update", "NoTimeout", name="delays"
        )
    )
