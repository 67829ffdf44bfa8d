"""How a user declares state: columns, and how long a row lives."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from pyspark.sql.types import StructType

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.shard.operator import STATE_TABLE
from holdfast.spark_integration.shard.timeout import TimeMode
from holdfast.spark_integration.spark_types import arrow_schema, parse_struct
from holdfast.spark_integration.tables.key_rows import EXPIRES, LONGEST_TTL_MS
from holdfast.spark_integration.tables.key_timers import TIMERS, TIMERS_BY_DUE
from holdfast.spark_integration.vectorised.arrow_with_state import StateColumns

_CLOCKS: Mapping[str, TimeMode] = {"processing time": "ProcessingTime", "event time": "EventTime"}
_TABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True)
class StateTable:
    """One state table of an operator: a row for each key.

    Attributes
    ----------
    stateStructType : StructType or str
        Its columns.
    ttlDurationMs : int, optional
        A row expires so many milliseconds after it was last written. It is invisible from then on, and removed the next
        time the shard is called. None for never.
    ttl : str, optional
        The same as a duration, such as ``"7 days"``.
    by : {"processing time", "event time"}
        The clock: Spark's processing time; or the watermark's, in which a row counts as written at the time of the
        newest of its key's rows in the micro-batch.

    Examples
    --------
    >>> seen = holdfast.StateTable("id string", ttlDurationMs=3_600_000)
    >>> seen = holdfast.StateTable("id string", ttl="7 days", by="event time")
    """

    stateStructType: StructType | str
    ttlDurationMs: int | None = None
    ttl: str | None = None
    by: Literal["processing time", "event time"] = "processing time"


Declared = StructType | str | StateTable


def declared_states(
    states: Declared | Mapping[str, Declared], time_mode: TimeMode, duration_us: Callable[[str], int]
) -> dict[str, StateColumns]:
    """Return the state tables that an operator declares, by name; one without a name is `STATE_TABLE`.

    Raises `InvalidArgumentError` if a schema, a name or a time to live is wrong.
    """
    if not isinstance(states, Mapping):
        return {STATE_TABLE: _columns(states, "stateStructType", time_mode, duration_us)}
    if not states:
        raise InvalidArgumentError("stateStructType names no table: give at least one")
    for name in states:
        require_table_name(name)
    return {
        name: _columns(state, f"stateStructType[{name!r}]", time_mode, duration_us) for name, state in states.items()
    }


def require_table_name(name: object) -> None:
    """Check what a user calls a state table.

    Raises `InvalidArgumentError` if no table can be called so.
    """
    if not _TABLE_NAME.fullmatch(str(name)) or name in (TIMERS, TIMERS_BY_DUE):
        raise InvalidArgumentError(
            f"{name!r} cannot name a state table: use letters, digits and '_', not beginning with a digit, "
            f"at most 64 long, and neither {TIMERS!r} nor {TIMERS_BY_DUE!r}"
        )


def _columns(declared: Declared, what: str, time_mode: TimeMode, duration_us: Callable[[str], int]) -> StateColumns:
    table = declared if isinstance(declared, StateTable) else StateTable(declared)
    types = arrow_schema(parse_struct(table.stateStructType, what), what)
    ttl_ms = table.ttlDurationMs
    if table.ttl is not None:
        if ttl_ms is not None:
            raise InvalidArgumentError(f"{what}: give ttl or ttlDurationMs, not both")
        ttl_ms = -(-duration_us(table.ttl) // 1000)
    if table.by not in _CLOCKS:
        raise InvalidArgumentError(f"{what}: by must be 'processing time' or 'event time'", given=repr(table.by))
    if ttl_ms is None:
        return StateColumns(types, None)
    if table.by == "event time" and time_mode != "EventTime":
        raise InvalidArgumentError(f"{what}: a ttl by event time needs timeMode='EventTime'", given=time_mode)
    if type(ttl_ms) is not int or not 0 < ttl_ms <= LONGEST_TTL_MS:
        raise InvalidArgumentError(
            f"{what}: ttlDurationMs must be a whole number of milliseconds, at least 1 and at most 10,000 years",
            given=ttl_ms,
        )
    if EXPIRES in types.names:
        raise InvalidArgumentError(f"{what}: a table with ttlDurationMs has a column {EXPIRES!r} of holdfast's own")
    return StateColumns(types, ttl_ms, _CLOCKS[table.by])
