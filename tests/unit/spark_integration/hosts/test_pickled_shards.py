"""The processor that Spark unpickles at the start of each query, in a process that only calls its ``init``."""

from __future__ import annotations

import subprocess
import sys

import pandas as pd
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql.types import StructType

from holdfast.spark_integration.hosts.pickled_shards import PickledShards

INIT = """
import sys
from pyspark.serializers import CloudPickleSerializer

class Handle:
    def getValueState(self, name, schema):
        return print("declared", name, schema)

CloudPickleSerializer().loads(sys.stdin.buffer.read()).init(Handle())
print(sorted({"numpy", "pandas", "pyarrow", "holdfast.spark_integration.shard_call.call"} & set(sys.modules)))
"""


def test_init_loads_nothing_that_only_rows_need() -> None:
    """Each query waits for that process at its start: with pandas and pyarrow it took three times as long."""
    pickled = CloudPickleSerializer().dumps(PickledShards(pd.DataFrame({"a": [1]}), "pointer", StructType()))
    done = subprocess.run([sys.executable, "-c", INIT], input=pickled, capture_output=True, check=False)
    assert done.stdout.decode().splitlines() == ["declared pointer StructType([])", "[]"], done.stderr.decode()
