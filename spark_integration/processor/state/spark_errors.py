"""Errors of Spark's state server, as a processor sees them: `PySparkRuntimeError`, with the error class in the text."""

from __future__ import annotations

from pyspark.errors import PySparkRuntimeError

INVALID_HANDLE_STATE = "STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_HANDLE_STATE"
INVALID_TIME_MODE = "STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_TIME_MODE"


def state_error(doing: str, condition: str, message: str) -> PySparkRuntimeError:
    """Return the error of a state call; Spark gives it no error class of its own, only text.

    `doing` is what was asked for, in Spark's words: "updating value state".
    """
    return PySparkRuntimeError(f"Error {doing}: [{condition}] {message}")


def invalid_handle_state(doing: str, operation: str, phase: str) -> PySparkRuntimeError:
    """Return the error of a call at a time when the processor may not make it."""
    return state_error(
        doing,
        INVALID_HANDLE_STATE,
        f"Failed to perform stateful processor operation={operation} with invalid handle state={phase}.",
    )


def invalid_time_mode(doing: str, operation: str, time_mode: str) -> PySparkRuntimeError:
    """Return the error of a call about timers or TTL that does not go with the time mode."""
    return state_error(
        doing,
        INVALID_TIME_MODE,
        f"Failed to perform stateful processor operation={operation} with invalid timeMode={time_mode}.",
    )


def missing_variable(doing: str, name: str) -> PySparkRuntimeError:
    """Return the error of a use of a variable that the processor has deleted after it declared it."""
    return state_error(
        doing,
        "STATE_STORE_UNSUPPORTED_OPERATION_ON_MISSING_COLUMN_FAMILY",
        f"init has declared the variable {name} and then deleted it: call deleteIfExists before the declaration, which "
        "then finds it empty, or leave the declaration out.",
    )
