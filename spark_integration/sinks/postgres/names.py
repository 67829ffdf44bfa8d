"""The names of the sink's objects in a server, by which any process finds them.

::

    prepared transaction   holdfast:<sink>:<query>:<batch>:<partition>:<attempt>       at most 200 bytes
    staging table          hf_<digest of sink and query>_<partition>_<attempt>         at most 63 bytes
    a worker's connection  hf_<digest of sink and query> <sink>                        application_name, cut at 63 bytes
    the driver's           holdfast <digest of sink and query> <sink>                  the same

A sink's name of more than 60 characters, or a query's id of more than 40, is cut in a transaction's name, and a digest
of the whole is put behind it. `transactions_of` and `tables_of` are what all names of a query begin with.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkAttempt

_SINK_CHARACTERS = 60
_QUERY_CHARACTERS = 40
_DIGEST = 16
_ATTEMPT_CHARACTERS = 32
#: What PostgreSQL keeps of a name.
NAME_BYTES_MAX = 63


class Part(NamedTuple):
    """An attempt's prepared transaction, or its staging table."""

    name: str
    schema: str | None = None

    @classmethod
    def of(cls, handle: Handle) -> Part:
        """Return the part that a handle names."""
        schema = handle["schema"]
        return cls(str(handle["name"]), None if schema is None else str(schema))

    def handle(self) -> Handle:
        """Return the part's handle."""
        return self._asdict()

    @property
    def is_staged(self) -> bool:
        """Whether it is a table."""
        return self.schema is not None

    @property
    def attempt(self) -> str:
        """The attempt's id: both kinds of names end with it."""
        return self.name[-_ATTEMPT_CHARACTERS:]

    @property
    def partition(self) -> int:
        """The partition of a table's rows."""
        return int(self.name.split("_")[2])


def transactions_of(sink: str, query_id: str) -> str:
    """Return the prefix of a query's prepared transactions."""
    return f"holdfast:{_short(sink, _SINK_CHARACTERS)}:{_short(query_id, _QUERY_CHARACTERS)}:"


def transaction(attempt: SinkAttempt) -> str:
    """Return the name of an attempt's prepared transaction."""
    prefix = transactions_of(attempt.query.sink, attempt.query.query_id)
    return f"{prefix}{attempt.batch_id}:{attempt.partition}:{attempt.attempt_id}"


def tables_of(sink: str, query_id: str) -> str:
    """Return the prefix of a query's staging tables."""
    return f"hf_{_digest(sink, query_id)}_"


def table(attempt: SinkAttempt) -> str:
    """Return the name of an attempt's staging table."""
    return f"{tables_of(attempt.query.sink, attempt.query.query_id)}{attempt.partition}_{attempt.attempt_id}"


def application(sink: str, query_id: str) -> str:
    """Return the application name of a query's workers."""
    return f"hf_{_digest(sink, query_id)} {sink}"[:NAME_BYTES_MAX]


def driver_application(sink: str, query_id: str) -> str:
    """Return the application name of a query's driver, by which the next one finds a dead one's sessions."""
    return f"holdfast {_digest(sink, query_id)} {sink}"[:NAME_BYTES_MAX]


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_DIGEST]


def _short(name: str, characters: int) -> str:
    if len(name) <= characters:
        return name
    return f"{name[: characters - _DIGEST - 1]}~{_digest(name)}"
