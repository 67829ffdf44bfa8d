"""The record that ties an operator's directory to one query.

The shard that commits first puts ``<state directory>/<operator>/operator`` if it is absent, and every worker reads it
before it uses the directory: without a record there is no state. So two queries, or two operators with the same name,
cannot write to each other's state, and state is never read with a different number of shards.
`holdfast.snapshotter.ownership.stored_tables` adds tables that are declared later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from holdfast.backends.schema import TableSchema
from holdfast.errors import (
    ConflictError,
    InvalidArgumentError,
    NotFoundError,
    SchemaMismatchError,
    UnavailableError,
)
from holdfast.snapshotter.fields import PositiveInt, Stored, coding_of_tables
from holdfast.snapshotter.storage.object_storage import ObjectStorage

_KEY = "operator"
#: The error for two operators with the same name, at definition or at run time.
SAME_NAME = (
    "two operators of this query have the same name: pass each its own name=. Without name=, an operator has the name "
    "of its function or its processor's class"
)


@dataclass(frozen=True)
class OperatorRecord(Stored, kind="operator"):
    """The owner and the tables of an operator's directory."""

    operator: str
    query_id: str  #: Spark's id of the query, the same after every restart from its checkpoint location
    definition_id: str  #: Distinguishes two operators of one query that have the same name
    run_id: str  #: The run of the query in which the record was written
    shards: Annotated[int, range(1, 10**9)]  #: Numbered with up to 9 digits
    tables: Annotated[Mapping[str, TableSchema], coding_of_tables("schemas")]
    #: How many versions the query could go back when the record was written; its claims have newer values
    retained_versions: PositiveInt
    #: Settings that a restart cannot change, according to the operator's API
    configuration: Mapping[str, str] = field(default_factory=dict)


def shard_prefix(operator: str, shard: int) -> str:
    """Return the key prefix of a shard's objects in the state directory."""
    return f"{operator}/shard-{shard:04d}"


def declare_operator(storage: ObjectStorage, record: OperatorRecord) -> OperatorRecord:
    """Store `record` if there is none, or else check that the stored record allows it; return the stored record."""
    stored = find_operator(storage, record.operator)
    if stored is None:
        _require_no_location(storage)
        try:
            storage.put_if_absent(f"{record.operator}/{_KEY}", record.encode())
            return record
        except ConflictError:  # another record was first, and counts
            stored = read_operator(storage, record.operator)
        except (InvalidArgumentError, UnavailableError) as exc:
            exc.add_note("no state was written: check that spark.holdfast.state.dir is writable")
            raise
    check_operator(stored, record, storage.url)
    return stored


def _require_no_location(storage: ObjectStorage) -> None:
    """Refuse a checkpoint location as state directory: an operator named ``state`` would share Spark's folder."""
    try:
        storage.get("metadata")
    except NotFoundError:
        return
    raise InvalidArgumentError(
        "the state directory is a query's checkpointLocation: set spark.holdfast.state.dir to a separate directory",
        storage=storage.url,
    )


def check_operator(stored: OperatorRecord, record: OperatorRecord, url: str) -> None:
    """Check that a stored record allows `record` to continue. Raises `ConflictError`, `SchemaMismatchError`."""
    where = {"operator": record.operator, "storage": url}
    if stored.query_id != record.query_id:
        raise ConflictError(
            "this directory holds the state of another query: give the operator a different name, or set "
            "spark.holdfast.state.dir to a different directory (delete the old one if that query is gone for good)",
            **where,
            owner=stored.query_id,
            query=record.query_id,
        )
    if stored.run_id == record.run_id and stored.definition_id != record.definition_id:
        raise same_name(**where)
    if stored.shards != record.shards:
        raise SchemaMismatchError(
            "the state was written with a different number of shards: set spark.holdfast.shards to the stored "
            "number, or rescale the query (holdfast rescale)",
            **where,
            stored=stored.shards,
            defined=record.shards,
        )


def same_name(operator: str, **where: str) -> ConflictError:
    """Return the error for two operators of a query with the same name."""
    return ConflictError(SAME_NAME, operator=operator, **where)


def read_operator(storage: ObjectStorage, operator: str) -> OperatorRecord:
    """Return an operator's record. Raises `NotFoundError` if the storage holds no operator of this name."""
    record = find_operator(storage, operator)
    if record is None:
        raise NotFoundError(
            "the state directory holds no operator of this name: check the name (`holdfast inspect` lists the names), "
            "and that spark.holdfast.state.dir is the query's",
            operator=operator,
            storage=storage.url,
        )
    return record


def find_operator(storage: ObjectStorage, operator: str) -> OperatorRecord | None:
    """Return an operator's record, or None."""
    key = f"{operator}/{_KEY}"
    try:
        data = storage.get(key)
    except NotFoundError:
        return None
    return OperatorRecord.decode(data, f"{storage.url}/{key}", operator=operator)
