"""Stateful PySpark streaming, with state kept outside Spark's state store.

The public names below are imported on first use, so that ``import holdfast.errors`` in a Spark worker loads neither
pyspark nor pyarrow. Add a public name to `_NAMES` and to the block for type checkers; a test compares them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from holdfast.distribution import VERSION, refuse_old_spark

if TYPE_CHECKING:
    from holdfast.backends.base import Pointer as Pointer
    from holdfast.errors import ClosedError as ClosedError
    from holdfast.errors import ConflictError as ConflictError
    from holdfast.errors import CorruptionError as CorruptionError
    from holdfast.errors import FencedError as FencedError
    from holdfast.errors import HoldfastError as HoldfastError
    from holdfast.errors import InvalidArgumentError as InvalidArgumentError
    from holdfast.errors import NotFoundError as NotFoundError
    from holdfast.errors import SchemaMismatchError as SchemaMismatchError
    from holdfast.errors import StateLostError as StateLostError
    from holdfast.errors import UnavailableError as UnavailableError
    from holdfast.mvcc.store import VersionedStore as VersionedStore
    from holdfast.spark_integration.failures import explain as explain
    from holdfast.spark_integration.lookup.stored_query import StoredQuery as StoredQuery
    from holdfast.spark_integration.lookup.stored_query import open_query as open_query
    from holdfast.spark_integration.operators.aggregates import Aggregate as Aggregate
    from holdfast.spark_integration.operators.aggregates import aggregate as aggregate
    from holdfast.spark_integration.operators.aggregates import all as all
    from holdfast.spark_integration.operators.aggregates import any as any
    from holdfast.spark_integration.operators.aggregates import approx_count_distinct as approx_count_distinct
    from holdfast.spark_integration.operators.aggregates import avg as avg
    from holdfast.spark_integration.operators.aggregates import collect_list as collect_list
    from holdfast.spark_integration.operators.aggregates import collect_set as collect_set
    from holdfast.spark_integration.operators.aggregates import count as count
    from holdfast.spark_integration.operators.aggregates import count_distinct as count_distinct
    from holdfast.spark_integration.operators.aggregates import first as first
    from holdfast.spark_integration.operators.aggregates import last as last
    from holdfast.spark_integration.operators.aggregates import max as max
    from holdfast.spark_integration.operators.aggregates import max_by as max_by
    from holdfast.spark_integration.operators.aggregates import mean as mean
    from holdfast.spark_integration.operators.aggregates import min as min
    from holdfast.spark_integration.operators.aggregates import min_by as min_by
    from holdfast.spark_integration.operators.aggregates import percentile_approx as percentile_approx
    from holdfast.spark_integration.operators.aggregates import stddev as stddev
    from holdfast.spark_integration.operators.aggregates import stddev_pop as stddev_pop
    from holdfast.spark_integration.operators.aggregates import sum as sum
    from holdfast.spark_integration.operators.aggregates import var_pop as var_pop
    from holdfast.spark_integration.operators.aggregates import variance as variance
    from holdfast.spark_integration.progress_metrics import metrics as metrics
    from holdfast.spark_integration.restarting import run as run
    from holdfast.spark_integration.sink_source import register as register
    from holdfast.spark_integration.state_source.reading import read_state as read_state
    from holdfast.spark_integration.state_source.reading import state as state
    from holdfast.spark_integration.stream import stream as stream
    from holdfast.spark_integration.vectorised.arrow_with_state import StateTable as StateTable
    from holdfast.spark_integration.vectorised.batch import ShardBatch as ShardBatch
    from holdfast.spark_integration.vectorised.groups import Groups as Groups
    from holdfast.spark_integration.vectorised.state import ShardState as ShardState
    from holdfast.spark_integration.vectorised.state import ShardTimers as ShardTimers

# Public names by the module that defines them, imported on first use (PEP 562).
_NAMES = {
    "backends.base": "Pointer",
    "errors": (
        "ClosedError ConflictError CorruptionError FencedError HoldfastError InvalidArgumentError NotFoundError "
        "SchemaMismatchError StateLostError UnavailableError"
    ),
    "mvcc.store": "VersionedStore",
    "spark_integration.failures": "explain",
    "spark_integration.lookup.stored_query": "StoredQuery open_query",
    "spark_integration.operators.aggregates": (
        "Aggregate aggregate all any approx_count_distinct avg collect_list collect_set count count_distinct first "
        "last max max_by mean min min_by percentile_approx stddev stddev_pop sum var_pop variance"
    ),
    "spark_integration.progress_metrics": "metrics",
    "spark_integration.restarting": "run",
    "spark_integration.sink_source": "register",
    "spark_integration.state_source.reading": "read_state state",
    "spark_integration.stream": "stream",
    "spark_integration.vectorised.arrow_with_state": "StateTable",
    "spark_integration.vectorised.batch": "ShardBatch",
    "spark_integration.vectorised.groups": "Groups",
    "spark_integration.vectorised.state": "ShardState ShardTimers",
}
_EXPORTS = {name: f"holdfast.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_EXPORTS)

__version__ = VERSION


def __getattr__(name: str) -> object:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(module), name)
    except ImportError as exc:
        refuse_old_spark(exc)
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
