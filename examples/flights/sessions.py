"""Chains of an aircraft's flights, by functions of one key and of all keys of a shard, and running statistics.

Functions of one key are written for ``applyInPandasWithState`` and run unchanged on Spark and on holdfast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
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
    """An aircraft's flights with gaps of at most four hours: its state."""

    legs: int
    first_ms: int
    last_ms: int
    airports: str


def follow(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Add an aircraft's flights to its chain; emit chains that have ended."""
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
    """Return each aircraft's chains of flights, which end after four hours without a departure."""
    return (
        holdfast.stream(_legs(flights))
        .groupBy("tailnum")
        .applyInPandasWithState(follow, CHAINS, CHAIN, "append", "EventTimeTimeout", name="chains")
    )


def follow_all(batch: holdfast.ShardBatch) -> pa.Table:
    """Do the same as `follow` for all aircraft of a shard at once."""
    parts = pa.concat_tables([_open_chains(batch), _single_legs(batch)])
    parts = parts.take(pc.sort_indices(parts, [(name, "ascending") for name in ("key", "last_ms", "seq")]))
    key, first_ms, last_ms = (parts[name].to_numpy() for name in ("key", "first_ms", "last_ms"))
    begins = np.ones(len(parts), np.bool_)
    begins[1:] = (key[1:] != key[:-1]) | (first_ms[1:] - last_ms[:-1] > GAP_MS)
    found = (
        parts.append_column("chain", pa.array(np.cumsum(begins)))
        .group_by("chain", use_threads=False)
        .aggregate([("legs", "sum"), ("first_ms", "min"), ("last_ms", "max"), ("airports", "list"), ("key", "min")])
    )
    chains = pa.table(
        [found["legs_sum"], found["first_ms_min"], found["last_ms_max"], pc.binary_join(found["airports_list"], " ")],
        names=list(Chain._fields),
    )
    of_key = found["key_min"].to_numpy()
    is_last = np.append(of_key[1:] != of_key[:-1], [True] * (len(of_key) > 0))
    newest = chains.filter(pa.array(is_last))  # one per key, in the order of the keys
    has_rows = pc.greater(batch.groups.count(), 0)
    batch.state.put(newest)
    batch.state.delete(where=pc.invert(has_rows))
    batch.timers.set(pc.add(newest["last_ms"], GAP_MS), where=has_rows)
    has_ended = pa.array(~is_last | ~has_rows.to_numpy(zero_copy_only=False)[of_key])
    return chains.append_column("tailnum", batch.keys["tailnum"].take(pa.array(of_key))).filter(has_ended)


def _open_chains(batch: holdfast.ShardBatch) -> pa.Table:
    chains = batch.state.get().append_column("key", pa.array(np.arange(batch.keys.num_rows)))
    return chains.append_column("seq", pa.array(np.full(len(chains), -1))).filter(batch.state.exists())


def _single_legs(batch: holdfast.ShardBatch) -> pa.Table:
    rows, ones = batch.rows, np.ones(batch.rows.num_rows, np.int64)
    columns = [ones, rows["departure_ms"], rows["departure_ms"], rows["dest"], batch.groups.index, rows["seq"]]
    return pa.table(columns, names=[*Chain._fields, "key", "seq"])


def vectorised_chains(flights: DataFrame) -> DataFrame:
    """Return the same chains as `chains`, vectorised."""
    return (
        holdfast.stream(_legs(flights))
        .groupBy("tailnum")
        .applyInArrowWithState(follow_all, CHAINS, CHAIN, "append", name="chains", timeMode="EventTime")
    )


def _legs(flights: DataFrame) -> DataFrame:
    legs = flights.where("tailnum is not null").select(
        "seq", "tailnum", "dest", "departure", F.unix_millis("departure").alias("departure_ms")
    )
    return legs.withWatermark("departure", "1 hour")


def add_delays(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Update number, mean and sum of squared deviations of a carrier's delays; emit the statistics."""
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
    """Return the statistics of departure delays for each carrier in a micro-batch."""
    return (
        holdfast.stream(flights.select("carrier", "dep_delay"))
        .groupBy("carrier")
        .applyInPandasWithState(
            add_delays, STATISTICS, "n long, mean double, squares double", "update", "NoTimeout", name="delays"
        )
    )
