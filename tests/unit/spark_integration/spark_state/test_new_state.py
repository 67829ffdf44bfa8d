"""Spark's state as it is written here: what is read of it again, and what is left to Spark."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from holdfast.backends.base import Pointer
from holdfast.snapshotter.storage.local import LocalStorage
from holdfast.spark_integration.shard.pointer_row import GROUP_STATE, STATE_VARIABLES, PointerRow
from holdfast.spark_integration.spark_state import row_streams
from holdfast.spark_integration.spark_state.operators import NotKnownError
from holdfast.spark_integration.spark_state.pointers import NewState, PointerOperator, stored_steps
from holdfast.spark_integration.spark_state.query_location import LoggedBatch
from holdfast.spark_integration.spark_state.row_streams import Named

STORE = "spark.sql.streaming.stateStore."
PROVIDERS = "org.apache.spark.sql.execution.streaming.state."
PINNED = {
    f"{STORE}providerClass": f"{PROVIDERS}HDFSBackedStateStoreProvider",
    f"{STORE}compression.codec": "lz4",
    "spark.sql.streaming.flatMapGroupsWithState.stateFormatVersion": "2",
}


def a_row(shard: int, shards: int, due_ms: int | None = None) -> PointerRow:
    state_dir = "/data/" + "x" * (shard % 9)  # rows of several lengths
    return PointerRow("q", "totals", shard, shards, Pointer(1, f"{shard:016x}"), None, due_ms, 0, state_dir)


def an_operator(rows: tuple[PointerRow, ...], *, has_timeout: bool = False) -> PointerOperator:
    timeout_conf = "EventTimeTimeout" if has_timeout else "NoTimeout"
    return PointerOperator(GROUP_STATE, timeout_conf, "EventTime" if has_timeout else "None", "update", rows)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize(("shards", "partitions"), [(1, 1), (3, 8), (700, 2)])
def test_pointers_that_are_written_are_read(tmp_path: Path, codec: str, shards: int, partitions: int) -> None:
    """Of all operators, in partitions without and with many, in blocks that fit one after the other."""
    pinned = PINNED | {f"{STORE}compression.codec": codec}
    operators = [
        an_operator(tuple(a_row(shard, shards) for shard in range(shards))),
        an_operator(()),
        an_operator(tuple(a_row(shard, shards, shard - 1) for shard in range(shards)), has_timeout=True),
    ]
    batch = LoggedBatch(0, "v1", json.dumps({"conf": pinned}), (), 0)
    with LocalStorage(str(tmp_path)) as location:
        for key, data in NewState.of(pinned, partitions, {GROUP_STATE}).files(operators):
            location.put(key, data)
        found = stored_steps(location, batch)
    assert [step.has_timeout for step in found] == [False, False, True]
    for step, operator in zip(found, operators, strict=True):
        assert step.is_ours
        assert sorted(step.pointers.get("totals", [])) == sorted(operator.pointers)


def test_no_timeout_is_not_the_time_of_its_number(tmp_path: Path) -> None:
    """Spark takes -1 for none: a timer that is due then must not wait for ever."""
    rows = tuple(a_row(shard, 4, due_ms) for shard, due_ms in enumerate([None, -1, 0, -(1 << 62)]))
    state = NewState.of(PINNED, 1, {GROUP_STATE}).files([an_operator(rows, has_timeout=True)])
    with LocalStorage(str(tmp_path)) as partition:
        partition.put("1.delta", dict(state)["state/0/0/1.delta"])
        values = row_streams.read_rows(partition, Named(1), "lz4", 1 << 20).values()
    assert sorted(struct.unpack_from("<q", value, 16)[0] for value in values) == [-(1 << 62), -2, -1, 0]


@pytest.mark.parametrize(
    ("given", "host", "said"),
    [
        ({f"{STORE}providerClass": f"{PROVIDERS}RocksDBStateStoreProvider"}, GROUP_STATE, "RocksDBStateStoreProvider"),
        ({f"{STORE}providerClass": "com.example.Theirs"}, GROUP_STATE, r"com\.example\.Theirs"),
        ({f"{STORE}providerClass": None}, GROUP_STATE, "its session chooses"),
        ({f"{STORE}compression.codec": "snappy"}, GROUP_STATE, "snappy"),
        ({f"{STORE}rowChecksum.enabled": "true"}, GROUP_STATE, "rowChecksum"),
        ({f"{STORE}encodingFormat": "avro"}, GROUP_STATE, "avro"),
        ({"spark.sql.streaming.flatMapGroupsWithState.stateFormatVersion": "1"}, GROUP_STATE, "stateFormatVersion=1"),
        ({"spark.sql.streaming.flatMapGroupsWithState.stateFormatVersion": None}, GROUP_STATE, "stateFormatVersion"),
        ({}, STATE_VARIABLES, STATE_VARIABLES),
    ],
)
def test_what_is_not_known_is_left_to_spark(given: dict[str, str | None], host: str, said: str) -> None:
    pinned = {name: value for name, value in (PINNED | given).items() if value is not None}
    with pytest.raises(NotKnownError, match=said):
        NewState.of(pinned, 2, {GROUP_STATE, host})
