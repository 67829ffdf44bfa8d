"""Which shard a key belongs to and which partition runs a shard: the same here and in Spark."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.spark_integration.routes import choose_routes, partition_of_route, shards_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXTREMES = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 2**32 - 1, 2**64 - 2**32, 2**64 - 1]


@given(st.integers(1, 60), st.integers(1, 30))
def test_shard_i_runs_in_partition_i_modulo_the_partitions(shards: int, partitions: int) -> None:
    """So each partition has the same number of shards, or one more; and some have none where shards are fewer."""
    routes = choose_routes(shards, partitions)
    assert [partition_of_route(route, partitions) for route in routes] == [s % partitions for s in range(shards)]
    assert len(set(routes)) == shards
    assert all(0 <= route < 2**31 for route in routes)
    held = Counter(partition_of_route(route, partitions) for route in routes)
    assert max(held.values()) - min(held.values()) <= 1
    assert len(held) == min(shards, partitions)


def test_routes_are_the_same_for_ever() -> None:
    """They are keys of Spark's state: other ones would lose every pointer."""
    assert choose_routes(1, 1) == [0]
    assert choose_routes(4, 4) == [12, 6, 2, 0]
    assert choose_routes(8, 4) == [12, 6, 2, 0, 13, 9, 4, 1]
    assert choose_routes(2, 5) == choose_routes(2, 5)


def test_many_shards_are_routed_quickly() -> None:
    assert len(choose_routes(1000, 200)) == 1000


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


@pytest.mark.spark
def test_spark_computes_the_same_and_places_shards_where_we_say(spark: SparkSession) -> None:
    """Else rows of one key would meet two shards, or two busy shards one partition."""
    from pyspark.sql import functions as F  # noqa: N812

    from holdfast.spark_integration.routes import route_column, shard_column

    random = np.random.default_rng(7).integers(0, 2**64, 200, np.uint64, endpoint=False)
    hashes = np.concatenate([np.array(EXTREMES, np.uint64), random])
    frame = spark.createDataFrame([(int(h),) for h in hashes.view(np.int64)], "h long").coalesce(1)
    for shards, partitions in ((1, 3), (2, 2), (7, 3), (8, 4)):
        routes = choose_routes(shards, partitions)
        routed = frame.select(
            "h", shard_column(F.col("h"), shards).alias("shard"), route_column(F.col("h"), routes).alias("route")
        )
        rows = routed.repartition(partitions, "route").withColumn("partition", F.spark_partition_id()).collect()
        assert len(rows) == len(hashes)
        wanted = dict(zip(hashes.view(np.int64).tolist(), shards_of(hashes, shards).tolist(), strict=True))
        for row in rows:
            assert row.shard == wanted[row.h]
            assert row.route == routes[row.shard]
            assert row.partition == partition_of_route(row.route, partitions) == row.shard % partitions
