"""Spark's `GroupState`, cheap to open per key, which reports the call's changes afterwards.

It is a subclass, so ``isinstance`` holds, and rules and error messages are Spark's own.
"""

from __future__ import annotations

import copy
import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Literal

import numpy as np
from pyspark.errors import PySparkTypeError
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.types import ArrayType, BinaryType, MapType, Row, StructType

from holdfast.errors import HoldfastError
from holdfast.spark_integration.shard.timeout import timeout_of

#: Attributes of Spark's class that are private to it, and used in this module alone.
PRIVATE = ("_value", "_defined", "_updated", "_removed", "_has_timed_out")

# Columns whose values may be lists, dicts, bytearrays, numpy arrays or objects.
_CHANGEABLE = (ArrayType, BinaryType, MapType, StructType)

# What Spark passes on unchanged. Exact types: numpy's float64 subclasses float, pandas' Timestamp datetime.
_PLAIN: frozenset[type] = frozenset(
    {bool, bytes, dt.date, dt.datetime, dt.timedelta, Decimal, float, int, str, type(None)}
)


class KeyStates:
    """Opens the states of one shard's keys in one micro-batch. Raises `HoldfastError`."""

    def __init__(
        self, state_schema: StructType, timeout_conf: str, processing_time_ms: int, watermark_ms: int | None
    ) -> None:
        without_key = GroupState(
            optionalValue=None,  # type: ignore[arg-type]
            batchProcessingTimeMs=processing_time_ms,
            eventTimeWatermarkMs=GroupState.NO_TIMESTAMP if watermark_ms is None else watermark_ms,
            timeoutConf=timeout_conf,
            hasTimedOut=False,
            watermarkPresent=watermark_ms is not None,
            defined=False,
            updated=False,
            removed=False,
            timeoutTimestamp=GroupState.NO_TIMESTAMP,
            keyAsUnsafe=b"",
            valueSchema=state_schema,
        )
        self._attributes = vars(without_key)
        lacking = [name for name in PRIVATE if name not in self._attributes]
        if lacking:
            raise HoldfastError(
                "GroupState of this PySpark lacks attributes that this release of holdfast uses: install a release "
                "that supports it",
                lacking=" ".join(lacking),
            )
        self._kept = copier(state_schema)

    def open(self, value: tuple[Any, ...] | None, *, has_timed_out: bool = False) -> KeyState:
        """Return the state of one key; `value` is None if it has none."""
        return KeyState(self._attributes, value, has_timed_out, self._kept)


class KeyState(GroupState):
    """The state of one key during one call; made by `KeyStates.open`."""

    def __init__(
        self,
        attributes: dict[str, Any],
        value: tuple[Any, ...] | None,
        has_timed_out: bool,
        kept: Callable[[Any], Any] | None,
    ) -> None:
        # Not Spark's __init__: thirteen arguments for each key would cost too much.
        self.__dict__.update(attributes)
        self._value = value  # type: ignore[assignment]
        self._defined = value is not None
        self._has_timed_out = has_timed_out
        self._kept = kept

    def update(self, newValue: tuple[Any, ...]) -> None:
        if newValue is None:
            raise PySparkTypeError(errorClass="CANNOT_BE_NONE", messageParameters={"arg_name": "newValue"})
        try:
            values = iter(newValue)
        except TypeError:
            raise TypeError(
                "state.update takes a tuple of values, one for each column of stateStructType, "
                f"not {type(newValue).__name__}"
            ) from None
        self._value = Row(*[v if type(v) in _PLAIN else _python_value(v) for v in values])
        self._defined = self._updated = True
        self._removed = False

    @property
    def changed_value(self) -> Literal["put", "delete"] | None:
        """The call's change to the value."""
        if self._updated:
            return "put"
        return "delete" if self._removed else None

    @property
    def value(self) -> tuple[Any, ...]:
        """The value to store, copied: what the function does to a list in it later has no effect."""
        values = tuple(self._value)
        return values if self._kept is None else tuple(map(self._kept, values))

    @property
    def timer_ms(self) -> int | None:
        """The timeout set by the call, in ms since 1970; None if it set none."""
        return timeout_of(self)


def _python_value(value: Any) -> Any:
    """Convert a numpy or pandas value as Spark's `update` does."""
    if isinstance(value, np.generic):
        return value.tolist()
    if hasattr(value, "to_pytimedelta"):
        return value.to_pytimedelta()
    return value.to_pydatetime() if hasattr(value, "to_pydatetime") else value


def copier(schema: StructType) -> Callable[[Any], Any] | None:
    """Return a function that copies values which could change later; None if no column has such values."""
    return _copied if any(isinstance(f.dataType, _CHANGEABLE) for f in schema) else None


def _copied(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list):
        return list(value) if _PLAIN.issuperset(map(type, value)) else [_copied(v) for v in value]
    if isinstance(value, dict):
        is_flat = _PLAIN.issuperset(map(type, value.values()))
        return dict(value) if is_flat else {k: _copied(v) for k, v in value.items()}
    if isinstance(value, tuple):
        copied = [_copied(v) for v in value]
        return Row(*value.__fields__)(*copied) if hasattr(value, "__fields__") else tuple(copied)
    if isinstance(value, memoryview) and value.itemsize > 1:  # numbers, of an array
        return value.tolist()
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    return copy.deepcopy(value)
