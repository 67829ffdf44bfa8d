"""Driver side of the Delta sink: reads the table's state and commits one transaction per micro-batch.

Incompatible tables are detected before any decision: `check_features` rejects features that this writer lacks, and
`rehearse` tries a commit on an empty local copy of the table, which raises the library's own errors.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import xxhash
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.transaction import AddAction

from holdfast import clock
from holdfast.errors import (
    ConflictError,
    InvalidArgumentError,
    NotFoundError,
    SchemaMismatchError,
    StateLostError,
    UnavailableError,
)
from holdfast.snapshotter.storage.object_storage import ObjectInfo
from holdfast.spark_integration.sinks.delta.partitions import is_long_decimal
from holdfast.spark_integration.sinks.delta.tables import kept_table
from holdfast.spark_integration.sinks.files.location import columns_of, compare
from holdfast.spark_integration.sinks.files.sink import Attempts, DataFile, FileTarget, PreparedAttempt
from holdfast.spark_integration.sinks.two_phase_sink import SinkQuery

#: Features that may be listed but unused: settings and columns show whether they are used.
_KNOWN = {
    *("appendOnly", "changeDataFeed", "checkConstraints", "columnMapping", "generatedColumns", "identityColumns"),
    *("invariants", "timestampNtz"),
}
_OFF = (None, "", "false", "none")
_SETTINGS = {
    "delta.columnMapping.mode": "column mapping",
    "delta.enableRowTracking": "row tracking",
    "delta.enableInCommitTimestamps": "in-commit timestamps",
    "delta.enableIcebergCompatV1": "Iceberg compatibility",
    "delta.enableIcebergCompatV2": "Iceberg compatibility",
    "delta.setTransactionRetentionDuration": "an expiry of transaction ids (setTransactionRetentionDuration)",
}
_UPSERT_SETTINGS = {
    "delta.appendOnly": "append-only rows (appendOnly)",
    "delta.enableChangeDataFeed": "a change data feed",
    "delta.enableDeletionVectors": "deletion vectors",
}
_FIELDS = {
    "delta.generationExpression": "a generated column",
    "delta.identity.start": "an identity column",
    "delta.invariants": "an invariant",
}


def check_features(table: DeltaTable, *, upsert: bool) -> None:
    """Raise `InvalidArgumentError` if the table uses a feature that this writer lacks."""
    protocol = table.protocol()
    allowed = _KNOWN if upsert else _KNOWN | {"deletionVectors"}
    unknown = sorted(set(protocol.writer_features or ()) - allowed)
    if protocol.min_writer_version > 7 or unknown:
        _refuse(table, ", ".join(unknown) or f"writers of version {protocol.min_writer_version}")
    settings = table.metadata().configuration
    for name, what in {**_SETTINGS, **(_UPSERT_SETTINGS if upsert else {})}.items():
        if settings.get(name) not in _OFF:
            _refuse(table, what)
    constraints = sorted(name for name in settings if name.startswith("delta.constraints."))
    if constraints:
        _refuse(table, f"a CHECK constraint ({constraints[0].removeprefix('delta.constraints.')})")
    for field in _fields(table):
        for name, what in _FIELDS.items():
            if name in field["metadata"]:
                _refuse(table, f"{what} ({field['name']})")


def _refuse(table: DeltaTable, what: str) -> None:
    raise InvalidArgumentError(
        f"the Delta table has {what}, which the sink does not support: turn it off, or write to another table",
        table=table.table_uri,
    )


def check_schema(table: DeltaTable, columns: Mapping[str, str], partition_by: Iterable[str]) -> None:
    """Raise `SchemaMismatchError` for unfit columns, `InvalidArgumentError` for different partition columns."""
    found = table.metadata().partition_columns
    needed = columns.keys() | _columns_without_nulls(table) | set(found)
    there = {name: kind for name, kind in columns_of(_arrow_schema(table)).items() if name in needed}
    compare(columns, there, "add it to the table", table=table.table_uri)
    if found != list(partition_by):
        raise InvalidArgumentError(
            "the Delta table is partitioned by other columns: pass those as partition_by",
            table=table.table_uri,
            partitioned_by=", ".join(found) or "nothing",
            given=", ".join(partition_by) or "nothing",
        )
    for field in _fields(table):
        if _forbids_nulls_inside(field["type"]):
            raise SchemaMismatchError(
                "a nested field of the table is NOT NULL, which the sink does not check",
                column=field["name"],
                table=table.table_uri,
            )


def _arrow_schema(table: DeltaTable) -> pa.Schema:
    return pa.schema(table.schema().to_arrow())


def _fields(table: DeltaTable) -> list[Any]:
    return list(json.loads(table.schema().to_json())["fields"])


def _columns_without_nulls(table: DeltaTable) -> set[str]:
    return {field["name"] for field in _fields(table) if not field["nullable"]}


def delta_schema(schema: pa.Schema) -> Schema:
    """Return the schema of a new table, nullable at every depth."""
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


def rehearse(table: DeltaTable, commit: Callable[[DeltaTable], None]) -> None:
    """Call `commit` with an empty temporary table that has the same protocol, settings and columns."""
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        log = Path(folder, "_delta_log")
        log.mkdir()
        (log / f"{0:020}.json").write_text("\n".join(map(json.dumps, _beginning(table))))
        commit(DeltaTable(folder))


def _beginning(table: DeltaTable) -> list[dict[str, object]]:
    protocol, metadata = table.protocol(), table.metadata()
    versions: dict[str, object] = {
        "minReaderVersion": protocol.min_reader_version,
        "minWriterVersion": protocol.min_writer_version,
    }
    features = {"readerFeatures": protocol.reader_features, "writerFeatures": protocol.writer_features}
    return [
        {"protocol": versions | {name: listed for name, listed in features.items() if listed is not None}},
        {
            "metaData": {
                "id": metadata.id,
                "format": {"provider": "parquet", "options": {}},
                "schemaString": table.schema().to_json(),
                "partitionColumns": metadata.partition_columns,
                "configuration": metadata.configuration,
                "createdTime": metadata.created_time,
            }
        },
    ]


_NO_FOLDER = re.compile("[\x00-\x1f\x7f:]")
#: Attempts to commit, each on the latest version: other writers of a busy table may commit first.
_TRIES = 10
_Commit: TypeAlias = Callable[[DeltaTable, CommitProperties], None]


class TableCommits(FileTarget):
    """A sink's Delta table, for one query."""

    def __init__(
        self, url: str, query: SinkQuery, keys: Sequence[str], partition_by: Sequence[str], attempts: Attempts
    ) -> None:
        self._url, self._query, self._keys, self._partition_by = url, query, keys, partition_by
        self._attempts, self._application = attempts, f"holdfast/{query.sink}/{query.query_id}"
        self._kept = kept_table(url, query.sink, query.options)

    def open(self, schema: pa.Schema, *, create: bool) -> None:
        """Check that rows of this schema fit the table; create a missing table if `create` is set."""
        self._check_keys(schema)
        try:
            table = self._kept.open()
        except NotFoundError:
            table = self._created(schema, create=create)
        self._require_fitting(table, columns_of(schema))

    def newest(self) -> int:
        """Return the query's newest micro-batch in the table; -1 if there is none."""
        return self._newest(self._kept.current())

    def check(self, files: Sequence[DataFile]) -> None:
        self._kept.require_same()
        self._require_place(self._kept.current(), files)

    def has(self, batch_id: int, prepared: Sequence[PreparedAttempt], listed: Sequence[ObjectInfo] = ()) -> bool:
        self._kept.require_same()
        try:
            table = self._kept.current()
        except NotFoundError as exc:
            raise StateLostError("the Delta table is gone", table=self._url, batch=batch_id) from exc
        newest = self._newest(table)
        if batch_id > newest:
            return False
        is_newest = batch_id == newest
        named = f"{self._application}/attempts"
        found = table.transaction_version(named) if is_newest else self._attempts_of_old(table, batch_id)
        if found != _digest(prepared):
            raise StateLostError(
                "the Delta table shows other rows for this micro-batch, or none",
                table=self._url,
                batch=batch_id,
                newest=newest,
            )
        return True

    def show(self, batch_id: int, prepared: Sequence[PreparedAttempt], files: Sequence[DataFile]) -> None:
        """Append the files, or merge their rows by key; retry if another writer commits first."""
        commit = self._merging(_newest_rows(self._attempts.rows(files), self._keys)) if self._keys else None
        commit = commit or self._appending([_add_action(file) for file in files])
        attempts = _digest(prepared)
        metadata = {"sink": self._query.sink, "query": self._query.query_id, "batch": batch_id, "attempts": attempts}
        lost: ConflictError | None = None
        for _ in range(_TRIES):
            table = self._kept.current()
            if self._newest(table) >= batch_id:
                self.has(batch_id, prepared)
                return
            try:
                self._require_place(table, files)
            except (InvalidArgumentError, SchemaMismatchError) as exc:
                raise type(exc)(
                    "the Delta table was changed after a micro-batch was decided; its rows appear once the table "
                    f"accepts them: {exc.message}",
                    **exc.facts,
                ) from exc
            marks = [Transaction(self._application, batch_id), Transaction(f"{self._application}/attempts", attempts)]
            properties = CommitProperties(custom_metadata={"holdfast": metadata}, app_transactions=marks)
            before = table.version()
            try:
                with self._kept.translated("commit"):
                    commit(table, properties)
            except ConflictError as exc:
                lost = exc
                continue
            self._kept.sync(self._kept.current(), before)
            return
        raise UnavailableError(
            "other writers committed to the Delta table first at every attempt: reduce their number",
            table=self._url,
            tries=_TRIES,
            detail=lost and lost.facts["detail"],
        )

    def _appending(self, adds: Sequence[AddAction]) -> _Commit:
        def commit(table: DeltaTable, properties: CommitProperties) -> None:
            table.create_write_transaction(
                list(adds), "append", table.schema(), list(self._partition_by), commit_properties=properties
            )

        return commit

    def _merging(self, rows: pa.Table) -> _Commit:
        matches = " AND ".join(_is_same(name, has_nulls=rows[name].null_count > 0) for name in self._keys)
        # Otherwise `deltalake` skips files whose bounds exclude all keys: its own bounds are wrong for long decimals.
        reads_all = any(map(is_long_decimal, rows.select(list(self._keys)).schema.types))

        def commit(table: DeltaTable, properties: CommitProperties) -> None:
            merge = table.merge(rows, matches, "s", "t", streamed_exec=reads_all, commit_properties=properties)
            merge.when_matched_update_all().when_not_matched_insert_all().execute()

        return commit

    def _require_place(self, table: DeltaTable, files: Iterable[DataFile]) -> None:
        # All attempts at a micro-batch write the same columns.
        columns = next((file.details["columns"] for file in files if "columns" in file.details), None)
        if columns is not None:
            self._require_fitting(table, columns)
        nulls = {name for file in files for name in file.details.get("nulls", ())}
        if refused := sorted(_columns_without_nulls(table) & nulls):
            raise InvalidArgumentError(
                "rows have a null in a NOT NULL column of the Delta table", column=refused[0], table=self._url
            )

    def _require_fitting(self, table: DeltaTable, columns: Mapping[str, str]) -> None:
        """Check the table and rehearse a commit, unless its requirements are unchanged since the last check."""
        protocol, metadata = table.protocol(), table.metadata()
        demands = metadata.id, table.schema().to_json(), metadata.partition_columns, metadata.configuration
        features = protocol.min_writer_version, sorted(protocol.writer_features or ())
        checked = *demands, features, columns, self._keys, self._partition_by
        if checked == self._kept.checked:
            return
        check_features(table, upsert=bool(self._keys))
        check_schema(table, columns, self._partition_by)
        there = _arrow_schema(table)
        if self._keys:
            commit = self._merging(pa.schema([there.field(name) for name in columns]).empty_table())
        else:
            commit = self._appending([AddAction("part-0.parquet", 0, dict.fromkeys(self._partition_by), 0, True, "{}")])
        with self._kept.translated("rehearse"):
            rehearse(table, lambda copy: commit(copy, CommitProperties()))
        self._kept.checked = checked

    def _newest(self, table: DeltaTable) -> int:
        with self._kept.translated("read"):
            version = table.transaction_version(self._application)
        return -1 if version is None else version

    def _attempts_of_old(self, table: DeltaTable, batch_id: int) -> int | None:
        """Return the digest of an older micro-batch's attempts; None if the log no longer contains it."""
        wanted = (self._query.sink, self._query.query_id, batch_id)
        with self._kept.translated("read"):
            for own in (commit.get("holdfast") for commit in table.history()):
                if isinstance(own, dict) and (own.get("sink"), own.get("query"), own.get("batch")) == wanted:
                    return own.get("attempts")
        return None

    def _created(self, schema: pa.Schema, *, create: bool) -> DeltaTable:
        if not create:
            raise InvalidArgumentError("there is no Delta table: create it, or pass create=True", table=self._url)
        try:
            with self._kept.translated("create"):
                options, partitions = self._kept.storage_options, list(self._partition_by)
                DeltaTable.create(self._url, delta_schema(schema), partition_by=partitions, storage_options=options)
        except (ConflictError, UnavailableError, InvalidArgumentError):
            # Another writer may have created the table concurrently, or the reply was lost.
            with suppress(NotFoundError):
                return self._kept.open()
            raise
        return self._kept.open()

    def _check_keys(self, schema: pa.Schema) -> None:
        for name in schema.names if self._keys else ():
            # `deltalake`'s merge would reject the name only after the decision, which is final.
            if "`" in name or name.lower().startswith("__delta_rs_"):
                raise SchemaMismatchError("an upsert cannot have a column with this name: rename it", column=name)
            # `deltalake` names folders after partitions, and parses text before a colon as a protocol.
            if name in self._partition_by and _NO_FOLDER.search(name):
                raise SchemaMismatchError("an upsert cannot have a partition of this name: rename it", column=name)
        for name in self._keys:
            if name not in schema.names:
                raise InvalidArgumentError("the rows lack a key column", column=name)
            t = schema.field(name).type
            if pa.types.is_nested(t) or pa.types.is_floating(t):
                raise InvalidArgumentError("a key column must not be nested or floating-point", column=name, type=t)


def _add_action(file: DataFile) -> AddAction:
    partition, stats = file.details.get("partition", {}), file.details["stats"]
    return AddAction(file.name, file.size_bytes, partition, clock.now_ms(), data_change=True, stats=stats)


def _digest(prepared: Sequence[PreparedAttempt]) -> int:
    """Return a 63-bit digest of a micro-batch's attempts."""
    named = "\n".join(sorted(f"{each.attempt} {each.digest}" for each in prepared))
    return int(xxhash.xxh3_64_intdigest(named.encode())) >> 1


def _newest_rows(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    # Use generated names, which cannot clash with a column's.
    named = [f"key {number}" for number in range(len(keys))]
    numbered = rows.select(list(keys)).rename_columns(named).append_column("row", pa.array(np.arange(rows.num_rows)))
    last: Any = numbered.group_by(named, use_threads=False).aggregate([("row", "max")])["row_max"]
    return rows if len(last) == rows.num_rows else rows.take(last)


def _is_same(name: str, *, has_nulls: bool) -> str:
    quoted = '"' + name.replace('"', '""') + '"'
    # Parenthesised: `deltalake`'s parser takes all following text as the operand of IS NOT DISTINCT FROM.
    return f"(t.{quoted} IS NOT DISTINCT FROM s.{quoted})" if has_nulls else f"(t.{quoted} = s.{quoted})"
