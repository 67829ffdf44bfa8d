"""Shards and their routes as Spark expressions: what `holdfast.spark_integration.transport.routes` computes."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from holdfast.spark_integration.transport.routes import routes_of


def shard_column(hash_column: Column, shards: int) -> Column:
    """Return what `shards_of` computes, as a Spark expression on a ``bigint`` hash."""
    high = F.shiftrightunsigned(hash_column, 32)
    return F.shiftrightunsigned(high * F.lit(shards).cast("long"), 32).cast("int")


def route_column(hash_column: Column, shards: int) -> Column:
    """Return the route of each row's shard as a Spark expression.

    No route is null, but Spark must take the column for one that may be, as that of packed rows is: Spark 4.0 and
    4.1 refuse to go on with a state whose key was declared otherwise.
    """
    all_routes = F.array(*[F.lit(route).cast("int") for route in routes_of(shards)])
    return F.try_element_at(all_routes, shard_column(hash_column, shards) + 1)
