"""What is written of Spark's state without Spark is what Spark writes, byte for byte, on each version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.backends.base import Pointer
from holdfast.spark_integration.savepoints.by_spark import run_stub, session_of_stub
from holdfast.spark_integration.shard.pointer_row import GROUP_STATE, PointerRow
from holdfast.spark_integration.shard.timeout import TIMEOUT_CONF, TimeMode
from holdfast.spark_integration.spark_state.pointers import NewState, PointerOperator
from holdfast.spark_integration.spark_state.row_streams import decompressed
from tests.spark.conftest import Lab
from tests.tiers import cases

pytestmark = pytest.mark.spark
IN_2100_MS = 4_102_444_800_000


def an_operator(time_mode: TimeMode, shards: int) -> PointerOperator:
    """Return one with shards that have a timer, and others, and a long pointer."""
    rows = tuple(
        PointerRow(
            *("query", "totals", shard, shards, Pointer(1, f"{shard:016x}"), None),
            earliest_timer_ms=None if time_mode == "None" or shard % 2 else IN_2100_MS + shard,
            batch_ms=shard,
            state_dir="/data/" + "x" * 700 * shard,
        )
        for shard in range(shards)
    )
    return PointerOperator(GROUP_STATE, TIMEOUT_CONF[time_mode], time_mode, "update", rows)


@pytest.mark.all
@pytest.mark.smoke
@pytest.mark.parametrize("codec", cases(["lz4", "zstd"]))
def test_state_is_what_spark_makes_of_the_same_pointers(lab: Lab, codec: str) -> None:
    """With and without timeouts, in partitions that have several pointers, one, or none."""
    operators = [an_operator("None", 7), an_operator("ProcessingTime", 3), an_operator("EventTime", 1)]
    conf = {"spark.sql.shuffle.partitions": "3", "spark.sql.streaming.stateStore.compression.codec": codec}
    location = lab.folder / "stub"
    with session_of_stub(lab.spark, conf) as own:
        run_stub(own, operators, str(location))
    pinned = json.loads((location / "offsets/0").read_text().split("\n")[1])["conf"]
    made = dict(NewState.of(pinned, 3, {GROUP_STATE}).files(operators))
    by_spark = files(location)
    assert made.keys() == by_spark.keys()
    for key, data in made.items():
        assert plain(key, data, codec) == plain(key, by_spark[key], codec), key
    assert json.loads((location / "commits/0").read_text().split("\n")[1]).keys() == {"nextBatchWatermarkMs"}


def files(location: Path) -> dict[str, bytes]:
    every = (path for path in (location / "state").rglob("*") if path.is_file() and path.suffix != ".crc")
    return {path.relative_to(location).as_posix(): path.read_bytes() for path in every}


def plain(key: str, data: bytes, codec: str) -> bytes:
    if key.endswith(".delta"):
        return decompressed(memoryview(data), codec, 1 << 20, key)
    if not key.endswith("/schema"):
        return data
    # Spark 4.0 says of the timeout's column that it is never null, and takes one that may be for fitting.
    at = data.index(b'{"type":"struct","fields":[{"name":"groupState"')
    return data[: at - 2] + data[at:].replace(b'"long","nullable":false', b'"long","nullable":true')
