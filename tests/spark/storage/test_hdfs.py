"""Durable state on HDFS, written by Spark's forked workers."""

from __future__ import annotations

import pytest

from tests.servers.hdfs import Hdfs
from tests.spark.conftest import Lab

pytestmark = [pytest.mark.spark, pytest.mark.hdfs]


@pytest.mark.all
def test_state_on_hdfs_outlives_local_state_and_its_daemons(lab: Lab, hdfs: Hdfs) -> None:
    lab.configure({"state.dir": f"{hdfs.url}/app", "storage.dfs.client.socket-timeout": "3000"})
    lab.feed([("a", 1), ("b", 2), (None, 3)])
    lab.run(lab.totals())
    lab.lose_local_state()
    hdfs.namenode.kill()
    hdfs.datanode.kill()
    hdfs.revive()
    lab.feed([("a", 10)])
    lab.run(lab.totals())
    assert lab.state() == {"a": (2, 11), "b": (1, 2), None: (1, 3)}
    assert not [path for path in hdfs.files("/app") if ".tmp-" in path or "/probes/" in path]
