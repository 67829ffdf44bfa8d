"""The demo's stateful query: running totals for each aircraft, carrier and route."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

import holdfast
from holdfast.examples.flights.data import TOTALS

OPERATOR = "flight_totals"
STATE = """flights long, departures long, dep_delay long, worst_dep_delay long,
           arrivals long, arr_delay long, worst_arr_delay long, last_airport string"""
OUTPUT = """kind string, name string, flights long, mean_dep_delay double, worst_dep_delay long,
            mean_arr_delay double, worst_arr_delay long, last_airport string"""


def running_totals(flights: DataFrame) -> DataFrame:
    """Return the new totals of every subject in a micro-batch."""
    subjects = F.array(
        F.struct(F.lit("aircraft").alias("kind"), F.col("tailnum").alias("name")),
        F.struct(F.lit("carrier").alias("kind"), F.col("carrier").alias("name")),
        F.struct(F.lit("route").alias("kind"), F.concat_ws("-", "origin", "dest").alias("name")),
    )
    # The location of an aircraft is unknown after a cancelled or diverted flight.
    arrived = F.when(F.col("arr_delay").isNotNull(), F.struct("seq", "dest"))
    events = flights.select(
        F.inline(subjects), "dep_delay", "arr_delay", arrived["seq"].alias("seq"), arrived["dest"].alias("dest")
    )
    return (
        holdfast.stream(events)
        .groupBy("kind", "name")
        .applyInArrowWithState(add_flights, OUTPUT, STATE, "update", name=OPERATOR)
    )


def add_flights(batch: holdfast.ShardBatch) -> pa.Table:
    """Add a micro-batch's flights to the totals of all subjects of a shard at once."""
    new, old = batch.groups, batch.state.get()
    totals = {
        "flights": _sum(old["flights"], new.count()),
        "departures": _sum(old["departures"], new.count("dep_delay")),
        "dep_delay": _sum(old["dep_delay"], new.sum("dep_delay")),
        "worst_dep_delay": pc.max_element_wise(old["worst_dep_delay"], new.max("dep_delay")),
        "arrivals": _sum(old["arrivals"], new.count("arr_delay")),
        "arr_delay": _sum(old["arr_delay"], new.sum("arr_delay")),
        "worst_arr_delay": pc.max_element_wise(old["worst_arr_delay"], new.max("arr_delay")),
        "last_airport": pc.coalesce(new.last("dest", order_by="seq"), old["last_airport"]),
    }
    batch.state.put(**totals)
    return with_means(pa.table({"kind": batch.keys["kind"], "name": batch.keys["name"], **totals}))


def with_means(totals: pa.Table) -> pa.Table:
    """Return totals for output: means instead of sums."""
    means = {
        "mean_dep_delay": _mean(totals["dep_delay"], totals["departures"]),
        "mean_arr_delay": _mean(totals["arr_delay"], totals["arrivals"]),
    }
    return pa.table({name: means[name] if name in means else totals[name] for name in ["kind", "name", *TOTALS]})


def _sum(old: pa.ChunkedArray, new: pa.Array) -> pa.ChunkedArray:
    return pc.add(pc.coalesce(old, 0), pc.coalesce(new, 0))


def _mean(total: pa.ChunkedArray, count: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.divide(total.cast("double"), pc.if_else(pc.equal(count, 0), None, count))
