"""Stateful PySpark streaming, with state kept outside Spark's state store.

``import holdfast`` gives the public names below and loads none of their modules before they are used:
``import holdfast.errors`` in a Spark worker costs neither pyspark nor pyarrow. A new public name is one line in
`_EXPORTS` and one in the block for type checkers; a test keeps the two equal.
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
    from holdfast.spark_integration.sink_source.registering import register as register
    from holdfast.spark_integration.state_source.reading import read_state as read_state
    from holdfast.spark_integration.state_source.reading import state as state
    from holdfast.spark_integration.stream import stream as stream
    from holdfast.spark_integration.vectorised.arrow_with_state import StateTable as StateTable
    from holdfast.spark_integration.vectorised.batch import ShardBatch as ShardBatch
    from holdfast.spark_integration.vectorised.groups import Groups as Groups
    from holdfast.spark_integration.vectorised.state import ShardState as ShardState
    from holdfast.spark_integration.vectorised.state import ShardTimers as ShardTimers

# Public name: the module that defines it (PEP 562).
_EXPORTS = {
    "Aggregate": "holdfast.spark_integration.operators.aggregates",
    "ClosedError": "holdfast.errors",
    "ConflictError": "holdfast.errors",
    "CorruptionError": "holdfast.errors",
    "FencedError": "holdfast.errors",
    "Groups": "holdfast.spark_integration.vectorised.groups",
    "HoldfastError": "holdfast.errors",
    "InvalidArgumentError": "holdfast.errors",
    "NotFoundError": "holdfast.errors",
    "Pointer": "holdfast.backends.base",
    "SchemaMismatchError": "holdfast.errors",
    "ShardBatch": "holdfast.spark_integration.vectorised.batch",
    "ShardState": "holdfast.spark_integration.vectorised.state",
    "ShardTimers": "holdfast.spark_integration.vectorised.state",
    "StateLostError": "holdfast.errors",
    "StateTable": "holdfast.spark_integration.vectorised.arrow_with_state",
    "StoredQuery": "holdfast.spark_integration.lookup.stored_query",
    "UnavailableError": "holdfast.errors",
    "VersionedStore": "holdfast.mvcc.store",
    "aggregate": "holdfast.spark_integration.operators.aggregates",
    "all": "holdfast.spark_integration.operators.aggregates",
    "any": "holdfast.spark_integration.operators.aggregates",
    "approx_count_distinct": "holdfast.spark_integration.operators.aggregates",
    "avg": "holdfast.spark_integration.operators.aggregates",
    "collect_list": "holdfast.spark_integration.operators.aggregates",
    "collect_set": "holdfast.spark_integration.operators.aggregates",
    "count": "holdfast.spark_integration.operators.aggregates",
    "count_distinct": "holdfast.spark_integration.operators.aggregates",
    "explain": "holdfast.spark_integration.failures",
    "first": "holdfast.spark_integration.operators.aggregates",
    "last": "holdfast.spark_integration.operators.aggregates",
    "max": "holdfast.spark_integration.operators.aggregates",
    "max_by": "holdfast.spark_integration.operators.aggregates",
    "mean": "holdfast.spark_integration.operators.aggregates",
    "metrics": "holdfast.spark_integration.progress_metrics",
    "min": "holdfast.spark_integration.operators.aggregates",
    "min_by": "holdfast.spark_integration.operators.aggregates",
    "open_query": "holdfast.spark_integration.lookup.stored_query",
    "percentile_approx": "holdfast.spark_integration.operators.aggregates",
    "read_state": "holdfast.spark_integration.state_source.reading",
    "register": "holdfast.spark_integration.sink_source.registering",
    "run": "holdfast.spark_integration.restarting",
    "state": "holdfast.spark_integration.state_source.reading",
    "stddev": "holdfast.spark_integration.operators.aggregates",
    "stddev_pop": "holdfast.spark_integration.operators.aggregates",
    "stream": "holdfast.spark_integration.stream",
    "sum": "holdfast.spark_integration.operators.aggregates",
    "var_pop": "holdfast.spark_integration.operators.aggregates",
    "variance": "holdfast.spark_integration.operators.aggregates",
}

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
