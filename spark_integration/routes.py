"""Which shard a key belongs to, and which partition of Spark's shuffle runs a shard.

A shard is a contiguous range of the 64-bit key hash, so that changing the number of shards intersects
ranges. ``shard = ((hash >>> 32) * S) >>> 32``: the same arithmetic here and in SQL.

Spark sends a row to the partition ``pmod(murmur3(route, seed 42), N)``. Each shard gets a route, an int
chosen so that shard i runs in partition i mod N: one shard for each partition, or the same number in each.
"""

from __future__ import annotations

import struct

import mmh3
import numpy as np
import numpy.typing as npt
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from holdfast.backends.arrow_rows import HashArray

_SPARK_SEED = 42


def partition_of_route(route: int, partitions: int) -> int:
    """Return the shuffle partition in which Spark places an int key."""
    return mmh3.hash(struct.pack("<i", route), _SPARK_SEED) % partitions


def choose_routes(shards: int, partitions: int) -> list[int]:
    """Return one route for each shard, evenly over the partitions, the same ones every time."""
    wanted = [shard % partitions for shard in range(shards)]
    waiting: dict[int, list[int]] = {}
    for shard in reversed(range(shards)):
        waiting.setdefault(wanted[shard], []).append(shard)
    routes = [0] * shards
    route = 0
    while waiting:
        partition = partition_of_route(route, partitions)
        if partition in waiting:
            routes[waiting[partition].pop()] = route
            if not waiting[partition]:
                del waiting[partition]
        route += 1
    return routes


def shards_of(hashes: HashArray, shards: int) -> npt.NDArray[np.intp]:
    """Return the shard of each hash."""
    high = hashes >> np.uint64(32)
    return ((high * np.uint64(shards)) >> np.uint64(32)).astype(np.intp)


def shard_column(hash_column: Column, shards: int) -> Column:
    """Return `shards_of` as a Spark expression on a ``bigint`` hash."""
    high = F.shiftrightunsigned(hash_column, 32)
    return F.shiftrightunsigned(high * F.lit(shards).cast("long"), 32).cast("int")


def route_column(hash_column: Column, routes: list[int]) -> Column:
    """Return the route of each row's shard as a Spark expression."""
    if len(routes) == 1:
        return F.lit(routes[0]).cast("int")
    all_routes = F.array(*[F.lit(route).cast("int") for route in routes])
    return F.element_at(all_routes, shard_column(hash_column, len(routes)) + 1)
