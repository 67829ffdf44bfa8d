"""The features that a Delta table may require of writers, and those that this one lacks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import pyarrow as pa
from deltalake import DeltaTable, Schema

from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.spark_integration.sinks.files.places import columns_of, compare

#: Of these, what is in use is found below.
_KNOWN = {
    "appendOnly",
    "changeDataFeed",
    "checkConstraints",
    "columnMapping",
    "generatedColumns",
    "identityColumns",
    "invariants",
    "timestampNtz",
}
_OFF = (None, "", "false", "none")
_SETTINGS = {
    "delta.columnMapping.mode": "column mapping",
    "delta.enableRowTracking": "row tracking",
    "delta.enableInCommitTimestamps": "in-commit timestamps",
    "delta.enableIcebergCompatV1": "Iceberg compatibility",
    "delta.enableIcebergCompatV2": "Iceberg compatibility",
    "delta.setTransactionRetentionDuration": "forgetting which micro-batches it has (setTransactionRetentionDuration)",
}
_UPSERT_SETTINGS = {
    "delta.appendOnly": "rows that never change (appendOnly)",
    "delta.enableChangeDataFeed": "a change data feed",
    "delta.enableDeletionVectors": "deletion vectors",
}
_FIELDS = {
    "delta.generationExpression": "a generated column",
    "delta.identity.start": "an identity column",
    "delta.invariants": "an invariant",
}


def check_features(table: DeltaTable, *, upsert: bool) -> None:
    """Check that the table requires no feature that this writer lacks.

    Raises `InvalidArgumentError` if it does; the message says what.
    """
    protocol = table.protocol()
    allowed = _KNOWN if upsert else _KNOWN | {"deletionVectors"}
    unknown = sorted(set(protocol.writer_features or ()) - allowed)
    if protocol.min_writer_version > 7 or unknown:
        refuse(table, ", ".join(unknown) or f"writers of version {protocol.min_writer_version}")
    settings = table.metadata().configuration
    for name, what in {**_SETTINGS, **(_UPSERT_SETTINGS if upsert else {})}.items():
        if settings.get(name) not in _OFF:
            refuse(table, what)
    constraints = sorted(name for name in settings if name.startswith("delta.constraints."))
    if constraints:
        refuse(table, f"a CHECK constraint ({constraints[0].removeprefix('delta.constraints.')})")
    for field in json.loads(table.schema().to_json())["fields"]:
        for name, what in _FIELDS.items():
            if name in field["metadata"]:
                refuse(table, f"{what} ({field['name']})")


def demands(table: DeltaTable) -> dict[str, object]:
    """Return everything that `check_features` and `check_schema` look at, to notice changes."""
    protocol, metadata = table.protocol(), table.metadata()
    return {
        "table": metadata.id,
        "columns": table.schema().to_json(),
        "partitions": metadata.partition_columns,
        "settings": metadata.configuration,
        "features": (protocol.min_writer_version, sorted(protocol.writer_features or ())),
    }


def refuse(table: DeltaTable, what: str) -> None:
    """Raise InvalidArgumentError."""
    raise InvalidArgumentError(
        f"the Delta table has {what}, which the sink does not write: turn it off, or write to another table",
        table=table.table_uri,
    )


def check_schema(table: DeltaTable, columns: Mapping[str, str], partition_by: Iterable[str]) -> None:
    """Check that rows with these columns fit the table, which may have more that take nulls.

    Raises `SchemaMismatchError` if they do not; `InvalidArgumentError` if the table is partitioned by other columns.
    """
    found = table.metadata().partition_columns
    needed = columns.keys() | columns_without_nulls(table) | set(found)
    there = {name: kind for name, kind in columns_of(arrow_schema(table)).items() if name in needed}
    compare(columns, there, "add it to the table", table=table.table_uri)
    if found != list(partition_by):
        raise InvalidArgumentError(
            "the Delta table is partitioned by other columns: pass the same ones as partition_by",
            table=table.table_uri,
            partitioned_by=", ".join(found) or "nothing",
            given=", ".join(partition_by) or "nothing",
        )
    for field in json.loads(table.schema().to_json())["fields"]:
        if _forbids_nulls_inside(field["type"]):
            raise SchemaMismatchError(
                "a nested field of the table takes no null, which the sink does not check",
                column=field["name"],
                table=table.table_uri,
            )


def arrow_schema(table: DeltaTable) -> pa.Schema:
    """Return the table's Arrow schema."""
    return pa.schema(table.schema().to_arrow())


def columns_without_nulls(table: DeltaTable) -> set[str]:
    """Return the NOT NULL columns."""
    return {field["name"] for field in json.loads(table.schema().to_json())["fields"] if not field["nullable"]}


def delta_schema(schema: pa.Schema) -> Schema:
    """Return the schema of a new table for rows, nullable at every depth."""
    return Schema.from_arrow(pa.schema([pa.field(field.name, _nullable(field.type)) for field in schema]))


def _nullable(t: pa.DataType) -> pa.DataType:
    if pa.types.is_list(t):
        return pa.list_(_nullable(t.value_type))
    if pa.types.is_map(t):
        return pa.map_(_nullable(t.key_type), _nullable(t.item_type))
    if pa.types.is_struct(t):
        return pa.struct([pa.field(t.field(i).name, _nullable(t.field(i).type)) for i in range(t.num_fields)])
    return t


def _forbids_nulls_inside(t: object) -> bool:
    if not isinstance(t, Mapping):
        return False
    if t["type"] == "struct":
        return any(not field["nullable"] or _forbids_nulls_inside(field["type"]) for field in t["fields"])
    if t["type"] == "array":
        return not t["containsNull"] or _forbids_nulls_inside(t["elementType"])
    return not t["valueContainsNull"] or _forbids_nulls_inside(t["keyType"]) or _forbids_nulls_inside(t["valueType"])
