"""Spark's daemon of Python workers for the tests: all that a worker imports is there before it forks.

A task that fails takes its worker along, and each new one would import Spark's worker, pandas and holdfast again, for
longer than most tests take. The programs of users have Spark's own daemon, and so has the demo.
"""

import gc
import importlib

import pandas as pd
import pyarrow.compute as pc
import pyspark
from pyarrow import pandas_compat
from pyspark import daemon, worker

from holdfast.backends.rocksdb import backend as rocksdb
from holdfast.backends.run_files import backend, memory
from holdfast.snapshotter.storage import local
from holdfast.spark_integration.keyed import pandas_with_state
from holdfast.spark_integration.processor import transform_with_state
from holdfast.spark_integration.shard_call import call
from holdfast.spark_integration.sinks import writing
from holdfast.spark_integration.transport import output, packed
from holdfast.spark_integration.vectorised import arrow_with_state
from tests.spark import conftest

LOADED = (
    *(pd, pc, pandas_compat, worker, conftest),
    *(backend, memory, local, rocksdb),
    *(call, output, packed, pandas_with_state, arrow_with_state),
    *(transform_with_state, writing),
)

if not pyspark.__version__.startswith(("4.0.", "4.1.", "4.2.")):
    # Asked whether numpy is there when a worker converts rows. In older versions it loads gRPC, which must not fork.
    importlib.import_module("pyspark.testing")

if __name__ == "__main__":
    # What is loaded is no garbage: a collection in a worker would copy its pages.
    gc.freeze()
    daemon.manager()
