"""Which shard a key belongs to, and which partition of Spark's shuffle runs a shard.

A shard is a contiguous range of the 64-bit key hash, so changing the number of shards means intersecting ranges.
``shard = ((hash >>> 32) * S) >>> 32``: the same arithmetic here and in SQL.

Spark sends a row to the partition ``pmod(murmur3(route, seed 42), N)``. On one 4-byte block murmur3 is a bijection:
each 32-bit number is the hash of exactly one int. **The route of shard i is the int whose hash is i**, so shard i runs
in partition ``i mod N`` for any N, which spreads shards evenly. Routes are keys of Spark's state, so they are constants
and depend neither on the session nor on the number of partitions or shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from holdfast.backends.arrow.rows import HashArray
from holdfast.errors import SchemaMismatchError

if TYPE_CHECKING:  # look-ups run without Spark
    from pyspark.sql import Column

#: The column of routes, by which Spark groups.
ROUTE = "__holdfast_route"
_SPARK_SEED = 42
_MODULUS = 1 << 32
# The constants of murmur3_x86_32 (block, mixing, finalizer), and the inverses of its multipliers.
_C1, _C2, _M, _N, _F1, _F2 = 0xCC9E2D51, 0x1B873593, 5, 0xE6546B64, 0x85EBCA6B, 0xC2B2AE35
_C1_INVERSE, _C2_INVERSE, _M_INVERSE, _F1_INVERSE, _F2_INVERSE = (
    pow(factor, -1, _MODULUS) for factor in (_C1, _C2, _M, _F1, _F2)
)
_BLOCK_BYTES = 4


def _rotated(value: int, bits: int) -> int:
    return (value << bits | value >> (32 - bits)) % _MODULUS


def hash_of_route(route: int) -> int:
    """Return Spark's hash of an int key, as unsigned."""
    block = _rotated(route * _C1 % _MODULUS, 15) * _C2 % _MODULUS
    mixed = (_rotated(_SPARK_SEED ^ block, 13) * _M + _N) % _MODULUS
    end = mixed ^ _BLOCK_BYTES
    end = (end ^ end >> 16) * _F1 % _MODULUS
    end = (end ^ end >> 13) * _F2 % _MODULUS
    return end ^ end >> 16


def route_of_hash(value: int) -> int:
    """Return the int key that has this hash: the inverse of `hash_of_route`."""
    end = (value ^ value >> 16) * _F2_INVERSE % _MODULUS
    end = (end ^ end >> 13 ^ end >> 26) * _F1_INVERSE % _MODULUS
    mixed = end ^ end >> 16 ^ _BLOCK_BYTES
    block = _rotated((mixed - _N) * _M_INVERSE % _MODULUS, 32 - 13) ^ _SPARK_SEED
    route = _rotated(block * _C2_INVERSE % _MODULUS, 32 - 15) * _C1_INVERSE % _MODULUS
    return route - _MODULUS if route >= _MODULUS // 2 else route


def routes_of(shards: int) -> list[int]:
    """Return the route of each shard; routes never change."""
    return [route_of_hash(shard) for shard in range(shards)]


def shard_of_route(route: int, shards: int) -> int:
    """Return the shard with this route. Raises `SchemaMismatchError`."""
    shard = hash_of_route(route)
    if shard >= shards:
        raise SchemaMismatchError(
            "Spark calls a shard that the operator does not have: set spark.holdfast.shards to the number with which "
            "the query started, and check that the checkpoint location is this query's",
            route=route,
            shards=shards,
        )
    return shard


def shards_of(hashes: HashArray, shards: int) -> npt.NDArray[np.intp]:
    high = hashes >> np.uint64(32)
    return ((high * np.uint64(shards)) >> np.uint64(32)).astype(np.intp)


def shard_column(hash_column: Column, shards: int) -> Column:
    """Return `shards_of` as a Spark expression on a ``bigint`` hash."""
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    high = F.shiftrightunsigned(hash_column, 32)
    return F.shiftrightunsigned(high * F.lit(shards).cast("long"), 32).cast("int")


def route_column(hash_column: Column, shards: int) -> Column:
    """Return the route of each row's shard as a Spark expression, nullable as in packed rows.

    Spark 4.0 and 4.1 refuse a restart if the nullability of the state's key has changed.
    """
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    all_routes = F.array(*[F.lit(route).cast("int") for route in routes_of(shards)])
    return F.try_element_at(all_routes, shard_column(hash_column, shards) + 1)
