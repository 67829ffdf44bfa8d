"""The names of what the sink makes in a server, by which any process finds it again.

::

    prepared transaction   holdfast:<sink>:<query>:<batch>:<partition>:<attempt>       at most 200 bytes
    staging table          hf_<digest of sink and query>_<partition>_<attempt>         at most 63 bytes
    a worker's connection  hf_<digest of sink and query> <sink>                        application_name, cut at 63 bytes

A sink's name of more than 60 characters, or a query's id of more than 40, is cut in a transaction's name, and a digest
of the whole is put behind it. `transactions_of` and `tables_of` are what all names of a query begin with.
"""

from __future__ import annotations

import hashlib

from holdfast.spark_integration.sinks.two_phase_sink import SinkAttempt

_SINK_CHARACTERS = 60
_QUERY_CHARACTERS = 40
_DIGEST = 16
#: What PostgreSQL keeps of a name.
NAME_BYTES_MAX = 63


def transactions_of(sink: str, query_id: str) -> str:
    """Return what the names of all prepared transactions of a query begin with."""
    return f"holdfast:{_short(sink, _SINK_CHARACTERS)}:{_short(query_id, _QUERY_CHARACTERS)}:"


def transaction(attempt: SinkAttempt) -> str:
    """Return the name of an attempt's prepared transaction."""
    prefix = transactions_of(attempt.query.sink, attempt.query.query_id)
    return f"{prefix}{attempt.batch_id}:{attempt.partition}:{attempt.attempt_id}"


def attempt_of(gid: str) -> str:
    """Return the id of the attempt that prepared a transaction of this name."""
    return gid.rpartition(":")[2]


def tables_of(sink: str, query_id: str) -> str:
    """Return what the names of all staging tables of a query begin with."""
    return f"hf_{_digest(sink, query_id)}_"


def table(attempt: SinkAttempt) -> str:
    """Return the name of an attempt's staging table."""
    return f"{tables_of(attempt.query.sink, attempt.query.query_id)}{attempt.partition}_{attempt.attempt_id}"


def partition_of(table: str) -> int:
    """Return the partition whose attempt wrote a staging table of this name."""
    return int(table.split("_")[2])


def application(sink: str, query_id: str) -> str:
    """Return what workers of a query call themselves: it tells their connections from all others."""
    return f"hf_{_digest(sink, query_id)} {sink}"[:NAME_BYTES_MAX]


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_DIGEST]


def _short(name: str, characters: int) -> str:
    if len(name) <= characters:
        return name
    return f"{name[: characters - _DIGEST - 1]}~{_digest(name)}"


def attempt_of_table(table: str) -> str:
    """Return the id of the attempt that wrote a staging table of this name."""
    return table.rpartition("_")[2]
