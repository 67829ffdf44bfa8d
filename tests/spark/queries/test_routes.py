"""Spark computes the routes that we compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from holdfast.spark_integration.transport.routes import routes_of, shards_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXTREMES = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 2**32 - 1, 2**64 - 2**32, 2**64 - 1]


@pytest.mark.spark
def test_spark_computes_the_same_and_places_shards_where_we_say(spark: SparkSession) -> None:
    """Else rows of one key would meet two shards, or two busy shards one partition."""
    from pyspark.sql import functions as F  # noqa: N812

    from holdfast.spark_integration.transport.routes import route_column, shard_column

    random = np.random.default_rng(7).integers(0, 2**64, 200, np.uint64, endpoint=False)
    hashes = np.concatenate([np.array(EXTREMES, np.uint64), random])
    frame = spark.createDataFrame([(int(h),) for h in hashes.view(np.int64)], "h long").coalesce(1)
    for shards, partitions in ((1, 3), (2, 2), (7, 3), (8, 4)):
        routes = routes_of(shards)
        routed = frame.select(
            "h", shard_column(F.col("h"), shards).alias("shard"), route_column(F.col("h"), shards).alias("route")
        )
        rows = routed.repartition(partitions, "route").withColumn("partition", F.spark_partition_id()).collect()
        assert len(rows) == len(hashes)
        wanted = dict(zip(hashes.view(np.int64).tolist(), shards_of(hashes, shards).tolist(), strict=True))
        for row in rows:
            assert row.shard == wanted[row.h]
            assert row.route == routes[row.shard]
            assert row.partition == row.shard % partitions
