"""The record that ties an operator's directory to one query.

``<state directory>/<operator>/operator`` is written once, by whichever shard commits first, and every worker reads
it before it uses the directory: without a record there is no state. So two queries, or two operators of one name,
cannot write into each other's state, and state is never read with another number of shards. What tables it holds now
is in the record and in what later runs have added: `holdfast.snapshotter.ownership.stored_tables`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

from holdfast.backends import stored_file
from holdfast.backends.run import TableSchema
from holdfast.backends.stored_schema import encode_schemas
from holdfast.errors import (
    ConflictError,
    InvalidArgumentError,
    NotFoundError,
    SchemaMismatchError,
    UnavailableError,
)
from holdfast.snapshotter.fields import Fields
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

KIND = "operator"
_KEY = "operator"
Columns = list[list[str]]
#: Shards are numbered with up to 9 digits.
_SHARDS_LIMIT = 10**9


@dataclass(frozen=True)
class OperatorRecord:
    """Who owns an operator's directory and what lies in it.

    Attributes
    ----------
    operator : str
    query_id : str
        Spark's id of the query, the same after every restart from its checkpoint location.
    definition_id : str
        Distinguishes two operators of one query that have the same name.
    run_id : str
        The run of the query in which the record was written.
    shards : int
    tables : mapping of str to mapping
        By table: ``key`` and ``value`` columns as ``[name, Arrow type]``, for people.
    schemas : mapping of str to list of str
        By table: key and value schema for programs; see `holdfast.backends.stored_schema`.
    retained_versions : int
        How many versions back the query could return when the record was written; its claims have newer numbers.
    configuration : mapping of str to str
        What the operator's API lets nobody change at a restart.
    """

    operator: str
    query_id: str
    definition_id: str
    run_id: str
    shards: int
    tables: Mapping[str, Mapping[str, Columns]]
    schemas: Mapping[str, list[str]]
    retained_versions: int
    configuration: Mapping[str, str]

    FIELDS = (
        *("operator", "query_id", "definition_id", "run_id", "shards", "tables", "schemas", "retained_versions"),
        "configuration",
    )

    @classmethod
    def of(
        cls,
        operator: str,
        query_id: str,
        definition_id: str,
        run_id: str,
        shards: int,
        tables: Mapping[str, TableSchema],
        retained_versions: int,
        configuration: Mapping[str, str] | None = None,
    ) -> OperatorRecord:
        """Return the record of an operator whose state lies in `tables`."""
        return cls(
            operator,
            query_id,
            definition_id,
            run_id,
            shards,
            described(tables),
            encode_schemas(tables),
            retained_versions,
            dict(configuration or {}),
        )


def described(tables: Mapping[str, TableSchema]) -> dict[str, dict[str, Columns]]:
    """Return by table its ``key`` and ``value`` columns as ``[name, Arrow type]``."""
    return {
        name: {
            "key": [[f.name, str(f.type)] for f in schema.key],
            "value": [[f.name, str(f.type)] for f in schema.value],
        }
        for name, schema in tables.items()
    }


def shard_prefix(operator: str, shard: int) -> str:
    """Return where a shard's objects lie below the state directory."""
    return f"{operator}/shard-{shard:04d}"


def declare_operator(storage: ObjectStorage, record: OperatorRecord) -> OperatorRecord:
    """Write the record if there is none, check that the stored one allows `record` to go on, and return it.

    Raises
    ------
    ConflictError, SchemaMismatchError
        See `check_operator`.
    """
    stored = find_operator(storage, record.operator)
    if stored is None:
        data = stored_file.encode(KIND, asdict(record))[0]
        try:
            with suppress(ConflictError):  # another record came first, and decides
                PrefixedStorage(storage, record.operator).put_if_absent(_KEY, data)
        except (InvalidArgumentError, UnavailableError) as exc:
            exc.add_note("no state was written: check that spark.holdfast.state.dir is writable")
            raise
        stored = find_operator(storage, record.operator) or record
    check_operator(stored, record, storage.url)
    return stored


def check_stored(storage: ObjectStorage, record: OperatorRecord) -> None:
    """Check that the stored record, if there is one, allows `record` to go on; raises as `check_operator`."""
    stored = find_operator(storage, record.operator)
    if stored is not None:
        check_operator(stored, record, storage.url)


def check_operator(stored: OperatorRecord, record: OperatorRecord, url: str) -> None:
    """Check that a stored record allows `record` to go on.

    Raises
    ------
    ConflictError
        The directory belongs to another query, or to another operator of this query.
    SchemaMismatchError
        The state was written with another number of shards.
    """
    where = {"operator": record.operator, "storage": url}
    if stored.query_id != record.query_id:
        raise ConflictError(
            "this directory holds the state of another query: give the operator another name, or set "
            "spark.holdfast.state.dir to another directory (delete the old one if that query is gone for good)",
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
            asked=record.shards,
        )


def same_name(operator: str, **where: str) -> ConflictError:
    """Return the error for two operators of one query that have one name."""
    return ConflictError(
        "two operators of this query have the same name: pass each its own name=. Without one, an operator is called "
        "as its function or its processor's class is",
        operator=operator,
        **where,
    )


def read_operator(storage: ObjectStorage, operator: str) -> OperatorRecord:
    """Return an operator's record.

    Raises
    ------
    NotFoundError
        The storage holds no operator of this name.
    """
    record = find_operator(storage, operator)
    if record is None:
        raise NotFoundError(
            "the state directory holds no operator of this name: check the name, and that "
            "spark.holdfast.state.dir is the one the query uses",
            operator=operator,
            storage=storage.url,
        )
    return record


def find_operator(storage: ObjectStorage, operator: str) -> OperatorRecord | None:
    """Return an operator's record, or None where there is none."""
    directory = PrefixedStorage(storage, operator)
    try:
        data = directory.get(_KEY)
    except NotFoundError:
        return None
    return _read(data, operator, f"{directory.url}/{_KEY}")


def _read(data: memoryview, operator: str, source: str) -> OperatorRecord:
    """Return the record that a stored file holds; a `CorruptionError` names what is wrong with it."""
    stored = stored_file.decode(data, source=source, kind=KIND, plain_bytes_max=0)
    fields = Fields(stored.header, source, *OperatorRecord.FIELDS)
    tables, schemas = fields.mapping("tables"), fields.mapping("schemas")
    if tables.keys() != schemas.keys():
        fields.refuse("describes other tables than it has schemas of")
    record = OperatorRecord(
        fields.text("operator"),
        fields.text("query_id"),
        fields.text("definition_id"),
        fields.text("run_id"),
        fields.number("shards", 1, _SHARDS_LIMIT),
        {name: _read_columns(Fields(sides, source, "key", "value")) for name, sides in tables.items()},
        fields.texts_by_name("schemas", 2),
        fields.number("retained_versions", 1),
        fields.mapping_of_texts("configuration"),
    )
    if record.operator != operator:
        fields.refuse("belongs elsewhere: it was moved or copied", operator=record.operator)
    return record


def _read_columns(sides: Fields) -> dict[str, Columns]:
    return {side: sides.lists_of_texts(side, 2) for side in ("key", "value")}
