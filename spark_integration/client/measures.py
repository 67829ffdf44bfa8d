"""Declares the measures of a shard call, and the metrics that users see.

::

    call of a shard ─▶ CallMeasures ─┬─ with the output ─▶ Spark's observe ─▶ the query's progress
                                     └─ announcement ─▶ state server ─┬─▶ the last micro-batches
                                                                      └─▶ Prometheus

``shard_call/call.py`` measures. ``server/exposition.py`` declares the state server's own counters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from typing import Literal

_NOT_ANNOUNCED = {"shard", "snapshot_lag_ms", "snapshot_bytes", "snapshot_failures", "unanswered"}
#: How a metric is computed from a micro-batch's calls: number of shards; number of calls; sum of a measure; sum of the
#: newest value of each shard; largest value; shard with the largest value.
Kind = Literal["shards", "calls", "total", "level", "largest", "where"]
_US, _MS = 1_000_000, 1_000


@dataclass(frozen=True)
class CallMeasures:
    """The measures of one call, in the order of a row's values; None if unknown. New fields go at the end."""

    shard: int
    rows: int  #: Input rows
    keys: int  #: Keys for which the user's function was called, with rows or by a timer
    #: State rows looked up, found absent and written; looked up, found and deleted
    keys_new: int
    keys_removed: int
    #: State rows written; deleted
    state_rows_put: int
    state_rows_deleted: int
    timers_due: int  #: Timers that fired
    #: Duration of the call, of its reads of state, and of its commit, in microseconds
    call_us: int
    look_up_us: int
    commit_us: int
    commit_bytes: int  #: Size of the commit
    stored_bytes: int  #: Size of the commit's object in durable storage; 0 if the pointer carries the commit
    #: The shard's rows in its newest version, and bytes in the executor's local storage
    state_rows: int | None = None
    state_bytes: int | None = None
    #: Versions and time since the last snapshot
    snapshot_lag_versions: int | None = None
    snapshot_lag_ms: int | None = None
    #: Bytes uploaded for the shard's snapshots since its previous micro-batch, and failures since then
    snapshot_bytes: int | None = None
    snapshot_failures: int | None = None
    unanswered: int = 0  #: 1 if the state server did not answer
    rows_late: int = 0  #: Rows dropped as late; not in `rows`

    def with_news(self, age_ms: int | None, stored_bytes: int, failures: int) -> CallMeasures:
        """Return the measures with the outcome of snapshots, as the state server reports it."""
        return replace(self, snapshot_lag_ms=age_ms, snapshot_bytes=stored_bytes, snapshot_failures=failures)

    def row(self) -> list[int | None]:
        """Return the values in the order of the fields."""
        return list(astuple(self))

    def announced(self) -> dict[str, int | None]:
        """Return the measures to send to the state server, by name, without those that it measures itself."""
        return {name: value for name, value in asdict(self).items() if name not in _NOT_ANNOUNCED}


#: The measures' names, in the order of a row's values.
MEASURES = tuple(found.name for found in fields(CallMeasures))


@dataclass(frozen=True)
class Metric:
    """One metric of an operator and micro-batch."""

    name: str
    kind: Kind
    measure: str  #: The field of `CallMeasures`
    text: str = ""  #: Help text for Prometheus; empty if Prometheus has no such metric
    unit: int = 1  #: The measure's units per unit of the metric

    @property
    def is_sum(self) -> bool:
        """Whether the values of several calls add up."""
        return self.kind in ("total", "level")


#: All metrics, in the order in which users see them.
METRICS: Sequence[Metric] = (
    Metric("shards", "shards", "shard"),
    Metric("calls", "calls", "shard"),
    Metric("rows", "total", "rows", "Input rows."),
    Metric("rows_late", "total", "rows_late", "Rows dropped because they were late."),
    Metric("keys", "total", "keys", "Keys for which the function was called."),
    Metric("keys_new", "total", "keys_new", "State rows looked up, found absent, and written."),
    Metric("keys_removed", "total", "keys_removed", "State rows looked up, found, and deleted."),
    Metric("state_rows_put", "total", "state_rows_put", "State rows written."),
    Metric("state_rows_deleted", "total", "state_rows_deleted", "State rows deleted."),
    Metric("timers_due", "total", "timers_due", "Timers that fired."),
    Metric("call_seconds", "total", "call_us", "Time in shard calls.", _US),
    Metric("call_seconds_max", "largest", "call_us", unit=_US),
    Metric("look_up_seconds", "total", "look_up_us", "Time in shard calls spent reading state.", _US),
    Metric("commit_seconds", "total", "commit_us", "Time in shard calls spent committing.", _US),
    Metric("commit_bytes", "total", "commit_bytes", "Size of commits, compressed."),
    Metric("stored_bytes", "total", "stored_bytes", "Size of commits stored as objects in durable storage."),
    Metric("state_rows", "level", "state_rows", "State rows in local storage."),
    Metric("state_bytes", "level", "state_bytes", "Bytes in local storage."),
    Metric("rows_max", "largest", "rows"),
    Metric("rows_max_shard", "where", "rows"),
    Metric("snapshot_lag_versions_max", "largest", "snapshot_lag_versions", "Versions since a shard's last snapshot."),
    Metric(
        "snapshot_lag_seconds_max",
        "largest",
        "snapshot_lag_ms",
        "Time since a shard's last snapshot, or since its first call on this executor.",
        _MS,
    ),
    Metric("snapshot_bytes", "total", "snapshot_bytes"),
    Metric("snapshot_failures", "total", "snapshot_failures"),
    Metric("servers_unanswered", "total", "unanswered"),
)

#: Measures that are merged by maximum; all others are summed.
_LARGEST = {one.measure for one in METRICS if one.kind == "largest"} - {one.measure for one in METRICS if one.is_sum}


def merged(some: Mapping[str, int], others: Mapping[str, int]) -> dict[str, int]:
    """Merge the measures of two groups of calls."""
    found = dict(some)
    for name, value in others.items():
        found[name] = max(found.get(name, 0), value) if name in _LARGEST else found.get(name, 0) + value
    return found


def of_group(shards: int, measured: Mapping[str, int]) -> dict[str, float | None]:
    """Return the metrics of a group with one call per shard; None if the group's measures do not determine a metric."""
    found: dict[str, float | None] = {}
    for metric in METRICS:
        is_known = metric.is_sum or (metric.kind == "largest" and metric.measure in _LARGEST)
        value = measured.get(metric.measure) if is_known else None
        found[metric.name] = value / metric.unit if value is not None and metric.unit != 1 else value
    return found | {"shards": shards}
