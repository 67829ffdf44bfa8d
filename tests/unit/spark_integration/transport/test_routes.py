"""Which shard a key belongs to and which partition runs a shard: the same here and in Spark."""

from __future__ import annotations

import struct

import mmh3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import SchemaMismatchError
from holdfast.spark_integration.transport.routes import (
    hash_of_route,
    route_of_hash,
    routes_of,
    shard_of_route,
    shards_of,
)

EXTREMES = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 2**32 - 1, 2**64 - 2**32, 2**64 - 1]


FIRST_ROUTES = [-1693959553, -1910889132, -1382833682, -876271479]
INTS = st.integers(-(2**31), 2**31 - 1)


@given(INTS)
def test_the_hash_is_murmur3_with_the_seed_of_spark_and_each_int_has_its_own(route: int) -> None:
    assert hash_of_route(route) == mmh3.hash(struct.pack("<i", route), 42, signed=False)
    assert route_of_hash(hash_of_route(route)) == route


@pytest.mark.parametrize("value", [0, 1, 2, 2**16, 2**31 - 1, 2**31, 2**32 - 1])
def test_each_hash_has_its_int(value: int) -> None:
    route = route_of_hash(value)
    assert -(2**31) <= route < 2**31
    assert mmh3.hash(struct.pack("<i", route), 42, signed=False) == value


@given(st.integers(1, 2000), st.integers(1, 500))
def test_shard_i_runs_in_partition_i_modulo_the_partitions_whatever_they_are(shards: int, partitions: int) -> None:
    """So each partition has the same number of shards, or one more; and the session may change their number."""
    routes = routes_of(shards)
    hashes = [mmh3.hash(struct.pack("<i", route), 42) for route in routes]
    assert [value % partitions for value in hashes] == [shard % partitions for shard in range(shards)]
    assert [shard_of_route(route, shards) for route in routes] == list(range(shards))


def test_routes_are_the_same_for_ever() -> None:
    """They are keys of Spark's state: other ones would lose every pointer."""
    assert routes_of(4) == FIRST_ROUTES
    assert routes_of(2) == FIRST_ROUTES[:2]


def test_a_route_of_no_shard_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(SchemaMismatchError, match=r"set spark\.holdfast\.shards.*shards=3"):
        shard_of_route(routes_of(4)[3], 3)


@given(st.lists(st.one_of(st.sampled_from(EXTREMES), st.integers(0, 2**64 - 1)), max_size=50), st.integers(1, 5000))
def test_shards_are_contiguous_ranges_of_hashes(hashes: list[int], shards: int) -> None:
    """Rescaling intersects ranges, so a larger hash is never in a smaller shard."""
    found = shards_of(np.array(sorted(hashes), np.uint64), shards)
    assert ((found >= 0) & (found < shards)).all()
    assert (np.diff(found) >= 0).all()
    assert found.tolist() == [((h >> 32) * shards) >> 32 for h in sorted(hashes)]


@pytest.mark.parametrize("shards", [1, 2, 3, 200, 1024])
def test_every_shard_has_its_share_of_the_hashes(shards: int) -> None:
    first = [-(-(i << 32) // shards) << 32 for i in range(shards)]
    assert shards_of(np.array(first, np.uint64), shards).tolist() == list(range(shards))
    last = [*(h - 1 for h in first[1:]), 2**64 - 1]
    assert shards_of(np.array(last, np.uint64), shards).tolist() == list(range(shards))
