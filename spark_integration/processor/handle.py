"""The handle that a processor receives in ``init``, to declare state variables and manage timers.

On the driver, `init` runs once to collect the processor's declarations, without access to state. In a worker, `init`
runs at the start of each call of a shard, with access to state. The same rules apply to both.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from pyspark import cloudpickle
from pyspark.errors import PySparkTypeError
from pyspark.sql.streaming.stateful_processor import (
    ListState,
    MapState,
    StatefulProcessor,
    StatefulProcessorHandle,
    ValueState,
)
from pyspark.sql.types import StructType

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.processor.state.slab import invalid_handle_state, state_error
from holdfast.spark_integration.processor.state.timers import ProcessorTimers
from holdfast.spark_integration.processor.state.variable_tables import Kind
from holdfast.spark_integration.processor.state.variables import StateVariable
from holdfast.spark_integration.shard.timeout import TimeMode
from holdfast.spark_integration.spark_types import parse_struct
from holdfast.spark_integration.ttl.expiry import LONGEST_TTL_MS

#: Spark's names of a processor's phases.
PRE_INIT, CREATED, INITIALIZED = "PRE_INIT", "CREATED", "INITIALIZED"
DATA_PROCESSED, TIMER_PROCESSED = "DATA_PROCESSED", "TIMER_PROCESSED"
#: The time modes' names in Spark's errors.
SHOWN_TIME_MODES = {"None": "NoTime", "ProcessingTime": "ProcessingTime", "EventTime": "EventTime"}
#: Parses a schema given as text; the second argument names the schema in errors.
ParseText = Callable[[str, str], StructType]


class States(Protocol):
    """The states that a handle opens."""

    def open(self, variable: StateVariable) -> Any:
        """Return the state of a declared variable."""

    def drop(self, name: str) -> None:
        """Delete all values of a variable, if it exists."""


class ProcessorHandle(StatefulProcessorHandle):
    """Spark's handle, for holdfast's state; collects the declared `variables`.

    `schemas` maps the text of a schema to the parsed schema: only the driver parses text, since workers have no JVM.
    """

    def __init__(
        self,
        time_mode: TimeMode,
        schemas: dict[str, StructType],
        states: States,
        timers: ProcessorTimers | None,
        phase: str,
        parse: ParseText = parse_struct,
    ) -> None:
        # Spark's __init__ is not called: it takes a client of Spark's state server.
        self.variables: dict[str, StateVariable] = {}
        self.phase = phase
        self._time_mode = time_mode
        self._schemas = schemas
        self._states = states
        self._timers = timers
        self._parse = parse

    def getValueState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> ValueState:
        return self._declare("value", stateName, schema, None, ttlDurationMs)

    def getListState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> ListState:
        return self._declare("list", stateName, schema, None, ttlDurationMs)

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        return self._declare("map", stateName, valueSchema, userKeySchema, ttlDurationMs)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        self._for_timers("register timer", "register_timer").register(_milliseconds(expiryTimestampMs))

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        self._for_timers("deleting timer", "delete_timer").delete(_milliseconds(expiryTimestampMs))

    def listTimers(self) -> Iterator[int]:
        return iter(self._for_timers("listing timers", "list_timers").list())

    def deleteIfExists(self, stateName: str) -> None:
        self._require_declaring("deleting state", "delete_if_exists")
        self._states.drop(stateName)

    def _declare(
        self, kind: Kind, name: str, schema: StructType | str, user_key: StructType | str | None, ttl_ms: int | None
    ) -> Any:
        doing = f"initializing {kind} state"
        self._require_declaring(doing, f"get_{kind}_state")
        _require_name(name, doing)
        if name in self.variables:
            raise state_error(
                doing,
                "STATEFUL_PROCESSOR_DUPLICATE_STATE_VARIABLE_DEFINED",
                f"State variable with name {name} has already been defined in the StatefulProcessor.",
            )
        what = f"{kind} state {name!r}"
        variable = StateVariable(
            name,
            kind,
            self._parsed(schema, what),
            None if user_key is None else self._parsed(user_key, f"the key of {what}"),
            self._checked_ttl(ttl_ms, name, doing),
        )
        self.variables[name] = variable
        return self._states.open(variable)

    def _parsed(self, schema: StructType | str, what: str) -> StructType:
        if not isinstance(schema, str):
            return parse_struct(schema, what)
        if schema not in self._schemas:
            if self.phase != PRE_INIT:
                raise InvalidArgumentError(
                    f"init declares {what} with a different schema in this task than at the operator's definition: it "
                    "must always declare the same schema",
                    schema=schema,
                )
            self._schemas[schema] = self._parse(schema, what)
        return self._schemas[schema]

    def _checked_ttl(self, ttl_ms: int | None, name: str, doing: str) -> int | None:
        if not ttl_ms:
            return None  # 0 means no TTL in every time mode, as in Spark
        ttl_ms = _whole(ttl_ms, f"ttlDurationMs of {name!r}")
        if self._time_mode != "ProcessingTime":
            raise state_error(
                doing,
                "STATEFUL_PROCESSOR_INCORRECT_TIME_MODE_TO_ASSIGN_TTL",
                f"Cannot use TTL for state={name} in timeMode={SHOWN_TIME_MODES[self._time_mode]}, use "
                "TimeMode.ProcessingTime() instead.",
            )
        if ttl_ms < 0:
            raise state_error(
                doing,
                "STATEFUL_PROCESSOR_TTL_DURATION_MUST_BE_POSITIVE",
                f"TTL duration must be greater than zero for State store operation={doing} on state={name}.",
            )
        if ttl_ms > LONGEST_TTL_MS:
            raise InvalidArgumentError(
                "ttlDurationMs must be at most 10,000 years: omit it for no expiry", state=name, given=ttl_ms
            )
        return ttl_ms

    def _for_timers(self, doing: str, operation: str) -> ProcessorTimers:
        if self.phase not in (INITIALIZED, DATA_PROCESSED):
            raise invalid_handle_state(doing, operation, self.phase)
        if self._timers is None:
            raise state_error(
                doing,
                "STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_TIME_MODE",
                f"Failed to perform stateful processor operation={operation} with invalid "
                f"timeMode={SHOWN_TIME_MODES[self._time_mode]}.",
            )
        return self._timers

    def _require_declaring(self, doing: str, operation: str) -> None:
        if self.phase not in (PRE_INIT, CREATED):
            raise invalid_handle_state(doing, operation, self.phase)


def _require_name(name: object, doing: str) -> None:
    if not isinstance(name, str) or not name or name != name.strip() or name == "default":
        raise state_error(
            doing,
            "STATE_STORE_CANNOT_USE_COLUMN_FAMILY_WITH_INVALID_NAME",
            f"Failed to perform column family operation=createColFamilyIfAbsent with invalid name={name}. Column "
            "family name cannot be empty or include leading/trailing spaces or use the reserved keyword=default",
        )
    if name.startswith("$"):
        raise state_error(
            doing,
            "STATE_STORE_CANNOT_CREATE_COLUMN_FAMILY_WITH_RESERVED_CHARS",
            f"Failed to create column family with reserved name={name}.",
        )


def _milliseconds(time_ms: int | None) -> int:
    """Return a timer's time; None means 0, as in Spark."""
    given = 0 if time_ms is None else _whole(time_ms, "a timer's time")
    if not -(1 << 63) <= given < (1 << 63) - 1:
        raise ValueError(f"a timer's time must fit into 64 bits: {given}")
    return given


def _whole(given: Any, what: str) -> int:
    try:
        return operator.index(given)
    except TypeError as exc:
        written = f"{given!r:.40} ({type(given).__name__})"
        raise PySparkTypeError(f"{what} is a whole number of milliseconds, such as 60_000, not {written}") from exc


class PickledProcessor:
    """A pickled processor for the workers; each call of a shard unpickles a new processor, as Spark does."""

    def __init__(self, processor: object) -> None:
        if not isinstance(processor, StatefulProcessor):
            raise InvalidArgumentError(
                "statefulProcessor must be an instance of pyspark.sql.streaming.StatefulProcessor",
                given=f"the class {processor.__name__}" if isinstance(processor, type) else type(processor).__name__,
            )
        try:
            self._pickled: bytes = cloudpickle.dumps(processor)  # type: ignore[no-untyped-call]
        except Exception as exc:  # an attribute's methods may raise anything
            raise InvalidArgumentError(
                f"the {type(processor).__name__} cannot be pickled for the workers: {exc}. Create connections, locks "
                "and the like in init"
            ) from exc

    def unpickled(self) -> StatefulProcessor:
        """Return a new processor. Raises `InvalidArgumentError` if its module cannot be imported."""
        try:
            processor: StatefulProcessor = cloudpickle.loads(self._pickled)
        except ModuleNotFoundError as exc:
            module, _, _ = str(exc.name).partition(".")
            raise InvalidArgumentError(
                f"the processor comes from the module {module}, which Spark's tasks cannot import: send it with "
                f'spark.addArtifacts("{module}.py", pyfile=True) or spark-submit --py-files, or install it on the '
                "executors"
            ) from exc
        return processor


@dataclass(frozen=True)
class Declaration:
    variables: tuple[StateVariable, ...]
    schemas: dict[str, StructType]  #: Parsed schemas, by the text given


def declaration_of(processor: PickledProcessor, time_mode: TimeMode, parse: ParseText = parse_struct) -> Declaration:
    """Run ``init`` and ``close``; return the declarations, with schemas given as text parsed by `parse`."""
    fresh = processor.unpickled()
    schemas: dict[str, StructType] = {}
    handle = ProcessorHandle(time_mode, schemas, _NoStates(), None, PRE_INIT, parse)
    fresh.init(handle)
    fresh.close()
    return Declaration(tuple(handle.variables.values()), schemas)


class _NoStates:
    """The states of a handle on the driver, which has no state."""

    def open(self, variable: StateVariable) -> _Unusable:
        return _Unusable(variable)

    def drop(self, name: str) -> None:
        """Do nothing, because the workers delete the values."""


class _Unusable:
    """A variable's state on the driver; every method raises."""

    def __init__(self, variable: StateVariable) -> None:
        self._variable = variable

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def fail(*_: object, **__: object) -> NoReturn:
            raise invalid_handle_state(f"using {self._variable.what} in init, which has no current key", name, PRE_INIT)

        return fail
