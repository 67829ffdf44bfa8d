"""Every error that holdfast raises, grouped by what a handler does.

::

    HoldfastError                 retryable = False
    ├── InvalidArgumentError      also ValueError → fix the call or the configuration
    ├── NotFoundError             version, snapshot, table absent → choose another
    ├── ConflictError             someone else owns this version → drop the work
    │   └── FencedError           a newer attempt has begun → stop
    ├── ClosedError               used after close, commit or abort → reopen
    ├── UnavailableError          storage, server or network; retryable = True
    ├── CorruptionError           checksum, size or format → stop; restore another version
    ├── SchemaMismatchError       state and code disagree → evolve, or say which column
    └── StateLostError            state or results that a pointer or a decision names are gone

A message is lower case, says what is wrong and what to do, and ends with the facts: ``raise
NotFoundError("no such version; choose a retained one", version=7, shard=3)`` reads
``no such version; choose a retained one, version=7 shard=3``. Third-party exceptions are mapped in one
place per boundary, with ``raise … from exc``. Every instance pickles, because Spark carries errors from its
Python workers to the driver.
"""

from __future__ import annotations

from typing import ClassVar

Fact = str | int | float | bool | None


class HoldfastError(Exception):
    """Base of all holdfast errors.

    Parameters
    ----------
    message : str
        What is wrong and what to do about it, lower case, without a full stop.
    **facts : object
        The facts behind the message, in display order. Values other than strings, numbers, booleans and None are
        converted to strings, so that the error always pickles.
    """

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, /, **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.facts: dict[str, Fact] = {name: _plain(value) for name, value in facts.items()}

    def __str__(self) -> str:
        if not self.facts:
            return self.message
        return f"{self.message}, {' '.join(f'{name}={_shown(value)}' for name, value in self.facts.items())}"


class InvalidArgumentError(HoldfastError, ValueError):
    """A call or the configuration is wrong: fix it."""


class NotFoundError(HoldfastError):
    """A version, snapshot or table is absent: choose another."""


class ConflictError(HoldfastError):
    """Someone else owns this version: drop the work."""


class FencedError(ConflictError):
    """A newer attempt has begun: stop."""


class ClosedError(HoldfastError):
    """Used after close, commit or abort: reopen."""


class UnavailableError(HoldfastError):
    """Storage, server or network did not respond properly: the same call may succeed later."""

    retryable: ClassVar[bool] = True


class CorruptionError(HoldfastError):
    """A checksum, size or format is wrong: stop, and restore another version."""


class SchemaMismatchError(HoldfastError):
    """State and code disagree about a column: evolve the state, or correct the named column."""


class StateLostError(HoldfastError):
    """State or results that a pointer or a decision refers to are gone: restore them, or start over."""


def class_of(name: str, default: type[HoldfastError]) -> type[HoldfastError]:
    """Return the error class with this name, else `default`."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, HoldfastError) else default


def _plain(value: object) -> Fact:
    # Exact types: a subclass (an enum, numpy's float64) may not unpickle in the receiving process.
    return value if type(value) in (str, int, float, bool, type(None)) else str(value)  # type: ignore[return-value]


def _shown(value: Fact) -> str:
    # Quoted if the value's end would be ambiguous.
    if isinstance(value, str) and (not value or any(c.isspace() or c == "=" for c in value)):
        return repr(value)
    return str(value)
