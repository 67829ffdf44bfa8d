"""Aggregates the measures of an executor's shard calls, and serves them to Prometheus.

::

    announcement of a call ─▶ micro-batch, one call per shard ─▶ totals since the server started ─▶ Prometheus
                                       │
                                       └─▶ the last micro-batches, on request

A shard's second call in a micro-batch counts only as repeated; calls on different executors both count. Memory is
bounded by the number of shards on the executor and by `BATCHES_KEPT` per operator.

A state server listens on the first free of `PORTS` consecutive ports. If no port is free or ``prometheus-client`` is
not installed, the server logs the problem once and runs without the endpoint.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import clock
from holdfast.distribution import pip_install
from holdfast.spark_integration.client.measures import METRICS, merged
from holdfast.spark_integration.client.messages import Committed, MeasuredBatch

if TYPE_CHECKING:
    from prometheus_client.core import Metric

BATCHES_KEPT = 128
#: Number of ports to try.
PORTS = 32
RETRY_AFTER_MS = 60_000
_LABELS = ("query", "operator")
_US = 1_000_000
# An operator's counters: name, help text, measure, and the measure's units per counter unit.
_COUNTERS: Sequence[tuple[str, str, str, int]] = (
    ("batches", "Micro-batches that called a shard on this executor.", "batches", 1),
    ("calls", "Shard calls.", "calls", 1),
    ("repeated_calls", "Repeated shard calls in a micro-batch.", "repeated_calls", 1),
    *((one.name, one.text, one.measure, one.unit) for one in METRICS if one.kind == "total" and one.text),
)
# The server's counters: name, help text, counter.
_SERVER_COUNTERS: Sequence[tuple[str, str, str]] = (
    ("snapshots", "Snapshots written.", "snapshots"),
    ("snapshot_bytes", "Bytes uploaded for snapshots.", "snapshot_new_bytes"),
    ("snapshot_failures", "Snapshots that failed.", "snapshot_errors"),
    ("snapshots_missed", "Versions dropped before their snapshot started.", "snapshots_missed"),
    ("clean_ups", "Clean-ups of durable storage.", "clean_ups"),
    ("clean_up_failures", "Clean-ups that failed.", "clean_up_errors"),
    ("deleted_objects", "Objects deleted by clean-ups.", "deleted_objects"),
    ("merges", "Background merges.", "merged"),
    ("versions_dropped", "Local versions dropped.", "dropped"),
    ("housekeeping_failures", "Failures of background work.", "errors"),
)
_log = logging.getLogger(__name__)


class OperatorName(NamedTuple):
    query: str  #: The query's id
    operator: str  #: The name of the operator's directory

    @classmethod
    def of(cls, directory: str) -> OperatorName:
        """Return the operator of a shard's local directory."""
        operator = Path(directory).parent
        return cls(operator.parent.name, operator.name)


@dataclass
class _Batch:
    batch_id: int | None
    values: dict[str, int] = field(default_factory=dict)
    shards: set[str] = field(default_factory=set)


@dataclass
class OperatorTotals:
    """An operator's micro-batches on this executor."""

    #: Sums of measures since the server started, and ``batches``, ``calls`` and ``repeated_calls``
    values: Counter[str] = field(default_factory=Counter)
    #: Measures of each shard's last call, by shard directory
    newest: dict[str, dict[str, int]] = field(default_factory=dict)
    batches: OrderedDict[int, _Batch] = field(default_factory=OrderedDict)  #: The latest, by planning time

    def add(self, directory: str, measured: MeasuredBatch) -> None:
        """Add the measures of a shard's call."""
        values = {name: value for name, value in measured.values.items() if value is not None}
        batch = self.batches.get(measured.batch_ms)
        if batch is None:
            batch = self.batches[measured.batch_ms] = _Batch(measured.batch_id)
            self.values["batches"] += 1
            if len(self.batches) > BATCHES_KEPT:
                self.batches.popitem(last=False)
        self.newest[directory] = values
        if directory in batch.shards:
            self.values["repeated_calls"] += 1
            return
        batch.shards.add(directory)
        batch.values = merged(batch.values, values)
        self.values["calls"] += 1
        self.values.update(values)


class MeasuredBatches:
    """The totals and recent micro-batches of an executor's operators; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operators: dict[OperatorName, OperatorTotals] = {}

    def announce(self, message: Committed) -> None:
        """Count the announced shard call."""
        if message.measured is None:
            return
        with self._lock:
            totals = self._operators.setdefault(OperatorName.of(message.shard.directory), OperatorTotals())
            totals.add(message.shard.directory, message.measured)

    def forget(self, directory: str) -> None:
        """Forget a dropped shard, and its operator if it has no other shards."""
        with self._lock:
            name = OperatorName.of(directory)
            totals = self._operators.get(name)
            if totals is not None:
                totals.newest.pop(directory, None)
                if not totals.newest:
                    del self._operators[name]

    def totals(self) -> dict[OperatorName, tuple[Counter[str], dict[str, dict[str, int]]]]:
        """Return copies of each operator's totals and its shards' newest measures."""
        with self._lock:
            return {name: (Counter(o.values), dict(o.newest)) for name, o in self._operators.items()}

    def recent(self) -> list[dict[str, Any]]:
        """Return every operator's last micro-batches as JSON values, oldest first per operator."""
        with self._lock:
            return [
                {"batch_id": of.batch_id, "batch_ms": batch_ms, "shards": len(of.shards), "values": dict(of.values)}
                | name._asdict()
                for name, totals in self._operators.items()
                for batch_ms, of in totals.batches.items()
            ]


def _largest(values: Sequence[int]) -> int:
    return max(values, default=0)


# An operator's gauges: name, help text, aggregation over the shards' last calls, measure, and unit as above.
_GAUGES: Sequence[tuple[str, str, Callable[[Sequence[int]], int], str, int]] = (
    ("shards", "Shards on this executor.", len, "calls", 1),
    *((one.name, one.text, sum, one.measure, one.unit) for one in METRICS if one.kind == "level"),
    ("shard_state_rows_max", "State rows of the largest shard.", _largest, "state_rows", 1),
    ("shard_state_bytes_max", "Bytes in local storage of the largest shard.", _largest, "state_bytes", 1),
    ("shard_rows_max", "Input rows of the busiest shard in its last call.", _largest, "rows", 1),
    ("shard_call_seconds_max", "Duration of the longest last call of a shard.", _largest, "call_us", _US),
    *((one.name, one.text, _largest, one.measure, one.unit) for one in METRICS if one.kind == "largest" and one.text),
)


@dataclass(frozen=True)
class ServerMetrics:
    """A state server's metrics, as a collector for ``prometheus-client``."""

    batches: MeasuredBatches
    counters: Callable[[], Mapping[str, int]]
    snapshot_ages_ms: Callable[[], Mapping[str, int]]  #: Age of each shard's last snapshot, by shard directory

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        operators, ages_ms = self.batches.totals(), self.snapshot_ages_ms()
        newest = {
            labels: [values | {"snapshot_lag_ms": ages_ms.get(shard, 0)} for shard, values in shards.items()]
            for labels, (_, shards) in operators.items()
        }
        for name, text, measure, unit in _COUNTERS:
            counter = CounterMetricFamily(f"holdfast_{name}", text, labels=_LABELS)
            for labels, (totals, _) in operators.items():
                counter.add_metric(labels, totals[measure] / unit)
            yield counter
        for name, text, of, measure, unit in _GAUGES:
            gauge = GaugeMetricFamily(f"holdfast_{name}", text, labels=_LABELS)
            for labels, shards in newest.items():
                gauge.add_metric(labels, of([values.get(measure, 0) for values in shards]) / unit)
            yield gauge
        counters = self.counters()
        for name, text, counted in _SERVER_COUNTERS:
            yield CounterMetricFamily(f"holdfast_{name}", text, value=counters[counted])


class Exposition:
    """Serves metrics to Prometheus once an announcement names a port; only one thread searches for a free port."""

    def __init__(self, collector: ServerMetrics, monotonic_ms: Callable[[], int] = clock.monotonic_ms) -> None:
        self._collector = collector
        self._monotonic_ms = monotonic_ms
        self._looking = threading.Lock()
        self._server: Any = None
        self._retry_ms: int | None = None
        self.port: int | None = None
        self.failures = 0

    def announce(self, message: Committed) -> None:
        """Start the metrics endpoint if the announcement names a port and none is running."""
        if message.metrics_port is None or not self._looking.acquire(blocking=False):
            return
        try:
            if self.port is not None or (self._retry_ms is not None and self._monotonic_ms() < self._retry_ms):
                return
            problem = self._begin(message.metrics_address, message.metrics_port)
            if problem is not None:
                self._retry_ms = self._monotonic_ms() + RETRY_AFTER_MS
                self.failures += 1
                if self.failures == 1:
                    _log.warning("cannot serve metrics to Prometheus: %s", problem)
        finally:
            self._looking.release()

    def _begin(self, address: str, first_port: int) -> str | None:
        """Listen on the first free port; return why this failed, or None."""
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            return f"prometheus-client is not installed on this executor: {pip_install('metrics')}"
        try:  # once, not per port: DNS may take seconds
            host = str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError) as exc:
            return f"spark.holdfast.metrics.address={address!r} is not an address of this machine: {exc}"
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._collector)
        problem = ""
        for port in range(first_port, min(first_port + PORTS, 1 << 16)):
            try:
                self._server, _ = start_http_server(port, host, registry)
            except OSError as exc:
                problem = f"no port from {first_port} to {port} on {address!r} is free: {exc}"
                continue
            self.port = port
            _log.info("metrics for Prometheus: http://%s:%d/metrics", address, port)
            return None
        return problem

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = self.port = None
