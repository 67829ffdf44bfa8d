"""What one call of a shard has measured, as it travels: to the state server, and beside the output to Spark.

The positions of the fields are those in a row: new ones are added at the end.
"""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass, fields, replace


@dataclass(frozen=True)
class CallMeasures:
    """The measurements of one call of a shard; None if unknown."""

    shard: int
    rows: int  #: Rows that came in
    keys: int  #: Keys that the user's function was called for, by their rows or by a timer
    #: Rows of state that were looked up, found absent and written; or found and deleted
    keys_new: int
    keys_removed: int
    #: Rows of state that were written
    state_rows_put: int
    state_rows_deleted: int
    timers_due: int  #: Timers that have fired
    #: The whole call, and its part in reading state and in committing; in microseconds
    call_us: int
    look_up_us: int
    commit_us: int
    commit_bytes: int  #: Of the commit, stored or carried by the query's pointer
    stored_bytes: int  #: Of the commit, if it became an object in durable storage
    #: Rows of the newest version and bytes of the shard in the executor's local storage
    state_rows: int | None = None
    state_bytes: int | None = None
    #: How far the last snapshot lies behind
    snapshot_lag_versions: int | None = None
    snapshot_lag_ms: int | None = None
    #: What the state server has uploaded for the shard's snapshots since the micro-batch before, and how often it
    #: failed
    snapshot_bytes: int | None = None
    snapshot_failures: int | None = None
    unanswered: int = 0  #: 1 if the state server did not answer
    rows_late: int | None = 0  #: Rows dropped as late, besides `rows`

    def with_news(self, age_ms: int | None, stored_bytes: int, failures: int) -> CallMeasures:
        """Return the same, with what the state server says of the shard's snapshots."""
        return replace(self, snapshot_lag_ms=age_ms, snapshot_bytes=stored_bytes, snapshot_failures=failures)

    def row(self) -> list[int | None]:
        """Return the values in the order of the fields."""
        return list(astuple(self))

    def named(self) -> dict[str, int | None]:
        """Return the values by name."""
        return asdict(self)


#: Names of `CallMeasures`, in the order of their values in a row.
MEASURES = tuple(found.name for found in fields(CallMeasures))
#: Of a micro-batch the largest; all others are added up.
LARGEST = frozenset({"snapshot_lag_versions", "snapshot_lag_ms"})
