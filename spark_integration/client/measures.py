"""What a shard's call measures, and the metrics that users see of it: each is declared here, and nowhere else.

::

    call of a shard ─▶ CallMeasures ─┬─ beside the output ─▶ Spark's observe ─▶ the query's progress
                                     └─ announcement ─▶ state server ─┬─▶ the last micro-batches
                                                                      └─▶ Prometheus

``shard_call/call.py`` measures. What the state server counts of itself is declared in ``server/exposition.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from typing import Literal

_NOT_ANNOUNCED = {"shard", "snapshot_lag_ms", "snapshot_bytes", "snapshot_failures", "unanswered"}
#: How a metric comes from the calls of a micro-batch: the shards called; the calls; the sum of a measure; the sum of
#: what shards hold after it, of which only the newest counts; the largest value; the shard that has it.
Kind = Literal["shards", "calls", "total", "level", "largest", "where"]
_US, _MS = 1_000_000, 1_000


@dataclass(frozen=True)
class CallMeasures:
    """The measurements of one call, in the order of a row's values; None if unknown. Add new ones at the end."""

    shard: int
    rows: int  #: Rows that came in
    keys: int  #: Keys that the user's function was called for, by their rows or by a timer
    #: Rows of state that were looked up, found absent and written; or found and deleted
    keys_new: int
    keys_removed: int
    #: Rows of state that were written
    state_rows_put: int
    state_rows_deleted: int
    timers_due: int  #: Timers that fired
    #: The whole call, and its part in reading state and in committing; in microseconds
    call_us: int
    look_up_us: int
    commit_us: int
    commit_bytes: int  #: Of the commit, stored or carried by the query's pointer
    stored_bytes: int  #: Of the commit, if it became an object in durable storage
    #: Rows of the newest version and bytes of the shard in the executor's local storage
    state_rows: int | None = None
    state_bytes: int | None = None
    #: How far the last snapshot is behind
    snapshot_lag_versions: int | None = None
    snapshot_lag_ms: int | None = None
    #: Bytes uploaded for the shard's snapshots since its previous micro-batch, and failures since then
    snapshot_bytes: int | None = None
    snapshot_failures: int | None = None
    unanswered: int = 0  #: 1 if the state server did not answer
    rows_late: int = 0  #: Rows dropped as late, besides `rows`

    def with_news(self, age_ms: int | None, stored_bytes: int, failures: int) -> CallMeasures:
        """Return the measures with the state server's news of snapshots."""
        return replace(self, snapshot_lag_ms=age_ms, snapshot_bytes=stored_bytes, snapshot_failures=failures)

    def row(self) -> list[int | None]:
        """Return the values in the order of the fields."""
        return list(astuple(self))

    def announced(self) -> dict[str, int | None]:
        """Return, by name, the measures to send to the state server, except those that it knows better."""
        return {name: value for name, value in asdict(self).items() if name not in _NOT_ANNOUNCED}


#: Names of `CallMeasures`, in the order of their values in a row.
MEASURES = tuple(found.name for found in fields(CallMeasures))


@dataclass(frozen=True)
class Metric:
    """One metric of an operator and micro-batch."""

    name: str
    kind: Kind
    measure: str  #: Of `CallMeasures`
    text: str = ""  #: What Prometheus says of it; empty if it has no such metric
    unit: int = 1  #: How many of the measure's units make one of the metric's

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
    Metric("keys", "total", "keys", "Keys that the function was called for."),
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
    Metric("stored_bytes", "total", "stored_bytes", "Size of the commits that became objects in durable storage."),
    Metric("state_rows", "level", "state_rows", "State rows in local storage."),
    Metric("state_bytes", "level", "state_bytes", "Local storage of the shards."),
    Metric("rows_max", "largest", "rows"),
    Metric("rows_max_shard", "where", "rows"),
    Metric("snapshot_lag_versions_max", "largest", "snapshot_lag_versions", "Versions since a shard's last snapshot."),
    Metric(
        "snapshot_lag_seconds_max",
        "largest",
        "snapshot_lag_ms",
        "Time since a shard's last snapshot, or since it came here.",
        _MS,
    ),
    Metric("snapshot_bytes", "total", "snapshot_bytes"),
    Metric("snapshot_failures", "total", "snapshot_failures"),
    Metric("servers_unanswered", "total", "unanswered"),
)

#: Measures of which a group reports the largest; all others add up.
_LARGEST = {one.measure for one in METRICS if one.kind == "largest"} - {one.measure for one in METRICS if one.is_sum}


def together(some: Mapping[str, int], others: Mapping[str, int]) -> dict[str, int]:
    """Merge the measures of two groups of calls."""
    found = dict(some)
    for name, value in others.items():
        found[name] = max(found.get(name, 0), value) if name in _LARGEST else found.get(name, 0) + value
    return found


def of_group(shards: int, measured: Mapping[str, int]) -> dict[str, float | None]:
    """Return the metrics of a group of calls, one per shard; None if its measures do not say."""
    found: dict[str, float | None] = {}
    for metric in METRICS:
        is_told = metric.is_sum or (metric.kind == "largest" and metric.measure in _LARGEST)
        value = measured.get(metric.measure) if is_told else None
        found[metric.name] = value / metric.unit if value is not None and metric.unit != 1 else value
    return found | {"shards": shards}
