"""State that has gone cold lies in a database, and a query does not notice."""

from __future__ import annotations

import pyarrow as pa
import pytest

from holdfast.spark_integration.client.connection import client_of
from holdfast.spark_integration.executor.local_dirs import LOCK_NAME
from tests.spark.conftest import Lab

pytestmark = [pytest.mark.spark, pytest.mark.slow]

KEYS = 300_000


def test_cold_keys_are_counted_on(lab: Lab) -> None:
    """Moved by the state server, read and replaced by workers, uploaded, and restored elsewhere."""
    lab.configure({"backend": "rocksdb", "rocksdb.memory": "16m", "shards": "2", "snapshot.maxCommits": "4"})
    lab.feed(pa.table({"key": [f"key {i}" for i in range(KEYS)], "v": list(range(KEYS))}))
    few = [(f"key {i}", 1) for i in range(0, KEYS, KEYS // 50)]
    for _ in range(4):
        lab.feed(few)
        lab.run(lab.totals())
        for lock in lab.local.glob(f"**/{LOCK_NAME}"):
            assert client_of(lock.parent).call("drain", b'{"timeout_seconds": 60.0}', 90.0)
    assert list(lab.local.glob("*/executor-*/disk/*/totals/shard-*/generations/*/generation"))
    expected = {f"key {i}": (1, i) for i in range(KEYS)}
    expected |= {key: (5, int(key.split()[1]) + 4) for key, _ in few}
    assert lab.state() == expected
    lab.lose_local_state()
    lab.feed(few)
    lab.run(lab.totals())
    assert lab.state() == expected | {key: (n + 1, total + 1) for key, (n, total) in expected.items() if n == 5}
