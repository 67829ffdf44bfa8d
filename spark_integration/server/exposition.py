"""The state server's metrics for Prometheus; docs/metrics.md says what each means.

Several executors on a machine, and several state servers of an executor, take the first free of `PORTS` ports. Where
none is free, or ``prometheus-client`` is not installed, the server says so in its log once and works on without.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast import clock
from holdfast.distribution import pip_install
from holdfast.spark_integration.client.messages import Committed
from holdfast.spark_integration.server.batches import MeasuredBatches

if TYPE_CHECKING:
    from prometheus_client.core import Metric

#: How many ports there are to try.
PORTS = 32
RETRY_AFTER_MS = 60_000
_LABELS = ("query", "operator")
_US = 1e-6

# Counters of an operator: name, help, measure, unit.
_TOTALS: Sequence[tuple[str, str, str, float]] = (
    ("batches", "Micro-batches in which a shard was called here.", "batches", 1),
    ("calls", "Calls of shards.", "calls", 1),
    ("repeated_calls", "Calls of a shard for a micro-batch that it was called for before.", "repeated_calls", 1),
    ("rows", "Rows that came in.", "rows", 1),
    ("keys", "Keys that the function was called for.", "keys", 1),
    ("keys_new", "Rows of state that were looked up, absent and written.", "keys_new", 1),
    ("keys_removed", "Rows of state that were looked up, there and deleted.", "keys_removed", 1),
    ("state_rows_put", "Rows of state written.", "state_rows_put", 1),
    ("state_rows_deleted", "Rows of state deleted.", "state_rows_deleted", 1),
    ("timers_due", "Timers that have fired.", "timers_due", 1),
    ("call_seconds", "Time in calls of shards.", "call_us", _US),
    ("look_up_seconds", "Time of these in reading state.", "look_up_us", _US),
    ("commit_seconds", "Time of these in committing.", "commit_us", _US),
    ("commit_bytes", "Bytes of commits.", "commit_bytes", 1),
    ("stored_bytes", "Bytes of commits that became objects in durable storage.", "stored_bytes", 1),
)
# Counters of the server: name, help, counter.
_OF_SERVER: Sequence[tuple[str, str, str]] = (
    ("snapshots", "Snapshots written.", "snapshots"),
    ("snapshot_bytes", "Bytes that snapshots have uploaded.", "snapshot_new_bytes"),
    ("snapshot_failures", "Snapshots that failed.", "snapshot_errors"),
    ("snapshots_missed", "Versions that were gone before their snapshot began.", "snapshots_missed"),
    ("clean_ups", "Clean-ups of durable storage.", "clean_ups"),
    ("clean_up_failures", "Clean-ups that failed.", "clean_up_errors"),
    ("deleted_objects", "Objects that clean-ups have deleted.", "deleted_objects"),
    ("merges", "Merges in the background.", "merged"),
    ("versions_dropped", "Local versions dropped.", "dropped"),
    ("housekeeping_failures", "Failures of the work in the background.", "errors"),
)

_log = logging.getLogger(__name__)


class ServerMetrics:
    """What a state server shows to Prometheus: a collector, as ``prometheus-client`` calls it.

    Parameters
    ----------
    batches : MeasuredBatches
    counters : callable
        Returns the server's counters by name.
    snapshot_ages_ms : callable
        Returns by shard's directory how long ago its last snapshot was written.
    """

    def __init__(
        self,
        batches: MeasuredBatches,
        counters: Callable[[], Mapping[str, int]],
        snapshot_ages_ms: Callable[[], Mapping[str, int]],
    ) -> None:
        self._batches = batches
        self._counters = counters
        self._snapshot_ages_ms = snapshot_ages_ms

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        operators = self._batches.totals()
        for name, what, measure, unit in _TOTALS:
            counter = CounterMetricFamily(f"holdfast_{name}", what, labels=_LABELS)
            for labels, (values, _) in operators.items():
                counter.add_metric(labels, values[measure] * unit)
            yield counter
        ages_ms = self._snapshot_ages_ms()
        for name, what, of in _GAUGES:
            gauge = GaugeMetricFamily(f"holdfast_{name}", what, labels=_LABELS)
            for labels, (_, newest) in operators.items():
                gauge.add_metric(labels, of(newest, ages_ms))
            yield gauge
        counters = self._counters()
        for name, what, counted in _OF_SERVER:
            yield CounterMetricFamily(f"holdfast_{name}", what, value=counters[counted])


_Newest = Mapping[str, Mapping[str, int]]


def _sum_of(measure: str) -> Callable[[_Newest, Mapping[str, int]], float]:
    return lambda newest, _: sum(values.get(measure, 0) for values in newest.values())


def _max_of(measure: str) -> Callable[[_Newest, Mapping[str, int]], float]:
    return lambda newest, _: max((values.get(measure, 0) for values in newest.values()), default=0)


def _lag_seconds(newest: _Newest, ages_ms: Mapping[str, int]) -> float:
    return max((ages_ms.get(directory, 0) for directory in newest), default=0) / 1000


_GAUGES: Sequence[tuple[str, str, Callable[[_Newest, Mapping[str, int]], float]]] = (
    ("shards", "Shards that this server keeps.", lambda newest, _: len(newest)),
    ("state_rows", "Rows of state in local storage.", _sum_of("state_rows")),
    ("state_bytes", "Bytes of the shards in local storage.", _sum_of("state_bytes")),
    ("shard_state_rows_max", "Rows of state of the largest shard.", _max_of("state_rows")),
    ("shard_state_bytes_max", "Bytes of the largest shard.", _max_of("state_bytes")),
    ("shard_rows_max", "Rows that came into the busiest shard in its last call.", _max_of("rows")),
    ("shard_call_seconds_max", "Time of the longest of the shards' last calls.", lambda newest, _: _longest(newest)),
    ("snapshot_lag_versions_max", "Versions since the last snapshot of a shard.", _max_of("snapshot_lag_versions")),
    ("snapshot_lag_seconds_max", "Time since the last snapshot of a shard, or since it came here.", _lag_seconds),
)


def _longest(newest: _Newest) -> float:
    return _max_of("call_us")(newest, {}) * _US


class Exposition:
    """Answers Prometheus, from the first announcement on that names a port.

    Parameters
    ----------
    collector : ServerMetrics
    monotonic_ms : callable
        Returns a time in ms that never goes back.

    Attributes
    ----------
    port : int or None
        Where it answers.
    failures : int
        How often no port was found.

    Notes
    -----
    Threads: any; while one of them looks for a port, the others do not wait.
    """

    def __init__(self, collector: ServerMetrics, monotonic_ms: Callable[[], int] = clock.monotonic_ms) -> None:
        self._collector = collector
        self._monotonic_ms = monotonic_ms
        self._looking = threading.Lock()
        self._server: Any = None
        self._retry_ms: int | None = None
        self.port: int | None = None
        self.failures = 0

    def announce(self, message: Committed) -> None:
        """Begin to answer if the announcement names a port, and nothing answers yet."""
        if message.metrics_port is None or not self._looking.acquire(blocking=False):
            return
        try:
            if self.port is None and (self._retry_ms is None or self._monotonic_ms() >= self._retry_ms):
                self._look(message.metrics_address, message.metrics_port)
        finally:
            self._looking.release()

    def _look(self, address: str, first_port: int) -> None:
        problem = self._begin(address, first_port)
        if problem is not None:
            self._retry_ms = self._monotonic_ms() + RETRY_AFTER_MS
            self.failures += 1
            if self.failures == 1:
                _log.warning("there are no metrics for Prometheus from this state server: %s", problem)

    def _begin(self, address: str, first_port: int) -> str | None:
        """Listen at the first free port; return why that is not possible."""
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            return f"prometheus-client is not installed on this executor: {pip_install('metrics')}"
        try:  # once, not for each port: a name server may take seconds
            host = str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError) as exc:
            return f"spark.holdfast.metrics.address={address!r} is no address of this machine: {exc}"
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._collector)
        problem = ""
        for port in range(first_port, min(first_port + PORTS, 1 << 16)):
            try:
                self._server, _ = start_http_server(port, host, registry)
            except OSError as exc:
                problem = f"no port from {first_port} to {port} of {address!r} is free: {exc}"
                continue
            self.port = port
            _log.info("metrics for Prometheus: http://%s:%d/metrics", address, port)
            return None
        return problem

    def close(self) -> None:
        """Stop answering."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = self.port = None
