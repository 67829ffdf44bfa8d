"""The driver's side of a Delta sink: what the table shows, and one transaction for each micro-batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.transaction import AddAction

from holdfast import clock
from holdfast.errors import (
    ConflictError,
    CorruptionError,
    InvalidArgumentError,
    NotFoundError,
    SchemaMismatchError,
    StateLostError,
    UnavailableError,
)
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.sinks.delta.features import (
    arrow_schema,
    check_features,
    check_schema,
    columns_without_nulls,
    delta_schema,
    demands,
)
from holdfast.spark_integration.sinks.delta.partitions import columns_of
from holdfast.spark_integration.sinks.delta.statistics import is_long_decimal
from holdfast.spark_integration.sinks.delta.tables import kept_table
from holdfast.spark_integration.sinks.files.attempts import Attempts, DataFile
from holdfast.spark_integration.sinks.two_phase_sink import SinkQuery

_NO_FOLDER = re.compile("[\x00-\x1f\x7f:]")
#: Each time the table is read anew; other writers of a busy table win some.
_TRIES = 10


class TableCommits:
    """The table of one sink.

    Parameters
    ----------
    url : str
    query : SinkQuery
    keys, partition_by : sequence of str
    """

    def __init__(self, url: str, query: SinkQuery, keys: Sequence[str], partition_by: Sequence[str]) -> None:
        self._url, self._keys, self._partition_by = url, keys, partition_by
        self._kept = kept_table(url, query.sink, query.options)

    def check(self, schema: pa.Schema, *, create: bool) -> None:
        """Check that the table takes such rows; make it if it is not there.

        Raises
        ------
        InvalidArgumentError
            It is not there, or asks of its writers what this one does not do.
        SchemaMismatchError
            It has other columns.
        """
        self._check_keys(schema)
        try:
            table = self._kept.open()
        except NotFoundError:
            table = self._created(schema, create=create)
        check_features(table, upsert=bool(self._keys))
        check_schema(table, schema, self._partition_by)
        self._kept.checked = demands(table)

    def check_again(self, files: Iterable[DataFile]) -> None:
        """Check that the table is as it was at the start, and takes the nulls in these files.

        Raises
        ------
        UnavailableError
            It was changed meanwhile; the next start checks it.
        StateLostError
            It is gone, or another one.
        InvalidArgumentError
            It takes no null in one of them.
        """
        self._kept.require_same()
        table = self._kept.current()
        self._require_unchanged(table, files)
        self._require_place_for_nulls(table, files)

    def newest(self, query: SinkQuery) -> int:
        """Return the newest micro-batch of a query that the table has; -1 if it has none."""
        return self._newest(self._kept.current(), query)

    def has(self, query: SinkQuery, batch_id: int, files: Sequence[DataFile]) -> bool:
        """Tell whether the table has these files' rows.

        Raises
        ------
        StateLostError
            It has other rows for this micro-batch, no longer knows, or is gone or another one.
        """
        self._kept.require_same()
        table = self._kept.current()
        newest = self._newest(table, query)
        if batch_id > newest:
            return False
        attempts = _digest(files)
        if batch_id == newest:
            found = table.transaction_version(f"{_application(query)}/attempts")
        else:
            found = self._attempts_of_old(table, query, batch_id)
        if found != attempts:
            raise StateLostError(
                "the Delta table has other rows for this micro-batch, or has ended it without any",
                table=self._url,
                batch=batch_id,
                newest=newest,
            )
        return True

    def append(self, query: SinkQuery, batch_id: int, files: Sequence[DataFile]) -> None:
        """Commit files as they are."""
        now_ms = clock.now_ms()
        adds = [
            AddAction(
                file.name,
                file.size_bytes,
                file.details.get("partition", {}),
                now_ms,
                data_change=True,
                stats=file.details["stats"],
            )
            for file in files
        ]

        def commit(table: DeltaTable, properties: CommitProperties) -> None:
            table.create_write_transaction(
                list(adds), "append", table.schema(), list(self._partition_by), commit_properties=properties
            )

        self._commit(query, batch_id, files, commit)

    def merge(
        self, query: SinkQuery, batch_id: int, files: Sequence[DataFile], storage: ObjectStorage, attempts: Attempts
    ) -> None:
        """Put rows in the place of those with the same keys."""
        rows = _newest_rows(_staged(files, storage, attempts), self._keys)
        matches = " AND ".join(_is_same(name, has_nulls=rows[name].null_count > 0) for name in self._keys)
        # Else `deltalake` passes over files whose bounds have none of the keys: its own are wrong for such decimals.
        reads_all = any(map(is_long_decimal, rows.select(list(self._keys)).schema.types))

        def commit(table: DeltaTable, properties: CommitProperties) -> None:
            (
                table.merge(
                    rows,
                    matches,
                    source_alias="s",
                    target_alias="t",
                    streamed_exec=reads_all,
                    commit_properties=properties,
                )
                .when_matched_update_all()
                .when_not_matched_insert_all()
                .execute()
            )

        self._commit(query, batch_id, files, commit)

    def _commit(
        self,
        query: SinkQuery,
        batch_id: int,
        files: Sequence[DataFile],
        commit: Callable[[DeltaTable, CommitProperties], None],
    ) -> None:
        """Commit on what the table is now, as often as another writer is faster."""
        application, attempts = _application(query), _digest(files)
        said = {"sink": query.sink, "query": query.query_id, "batch": batch_id, "attempts": attempts}
        for _ in range(_TRIES):
            table = self._kept.current()
            if self._newest(table, query) >= batch_id:
                self.has(query, batch_id, files)
                return
            self._require_unchanged(table, files)
            # One that another process confirmed may have been changed since: what it refuses is not known here.
            self._require_place_for_nulls(table, files)
            properties = CommitProperties(
                custom_metadata={"holdfast": said},
                app_transactions=[
                    Transaction(application, batch_id),
                    Transaction(f"{application}/attempts", attempts),
                ],
            )
            before = table.version()
            try:
                with self._kept.translated("commit"):
                    commit(table, properties)
            except ConflictError:
                continue
            self._kept.sync(self._kept.current(), before)
            return
        raise UnavailableError(
            "other writers of the Delta table were faster, again and again: let fewer write at a time",
            table=self._url,
            tries=_TRIES,
        )

    def _require_unchanged(self, table: DeltaTable, files: Iterable[DataFile]) -> None:
        before, now = self._kept.checked, demands(table)
        if before is None:
            # Another process has opened the table, as with a data source: what it was then, the files tell.
            check_features(table, upsert=bool(self._keys))
            before = now | {"partitions": list(self._partition_by)}
            written = [file.details["columns"] for file in files if "columns" in file.details]
            if any(columns != columns_of(arrow_schema(table)) for columns in written):
                before |= {"columns": written}
        if before != now:
            raise UnavailableError(
                "others have changed the Delta table's columns, settings or features while the query was running: "
                "start it again, and the table is checked again; what was decided is committed then",
                table=self._url,
                changed=", ".join(name for name, value in now.items() if before[name] != value),
            )

    def _require_place_for_nulls(self, table: DeltaTable, files: Iterable[DataFile]) -> None:
        nulls = {name for file in files for name in file.details.get("nulls", ())}
        if refused := sorted(columns_without_nulls(table) & nulls):
            raise InvalidArgumentError(
                "rows have a null where the Delta table takes none", column=refused[0], table=self._url
            )

    def _newest(self, table: DeltaTable, query: SinkQuery) -> int:
        with self._kept.translated("read"):
            version = table.transaction_version(_application(query))
        return -1 if version is None else version

    def _attempts_of_old(self, table: DeltaTable, query: SinkQuery, batch_id: int) -> int | None:
        """Return the digest of what an older micro-batch committed, as far as the log goes back."""
        with self._kept.translated("read"):
            for said in (commit.get("holdfast") for commit in table.history()):
                if isinstance(said, dict) and (said.get("sink"), said.get("query"), said.get("batch")) == (
                    query.sink,
                    query.query_id,
                    batch_id,
                ):
                    return said.get("attempts")
        return None

    def _created(self, schema: pa.Schema, *, create: bool) -> DeltaTable:
        if not create:
            raise InvalidArgumentError("there is no Delta table: create it, or pass create=True", table=self._url)
        try:
            with self._kept.translated("create"):
                DeltaTable.create(
                    self._url,
                    delta_schema(schema),
                    partition_by=list(self._partition_by),
                    storage_options=self._kept.storage_options,
                )
        except (ConflictError, UnavailableError, InvalidArgumentError):
            # Another made it at the same time, or the reply was lost.
            try:
                return self._kept.open()
            except NotFoundError:
                pass
            raise
        return self._kept.open()

    def _check_keys(self, schema: pa.Schema) -> None:
        for name in schema.names if self._keys else ():
            # What `deltalake` cannot merge would be found after the decision, which stands for good.
            if "`" in name or name.lower().startswith("__delta_rs_"):
                raise SchemaMismatchError("an upsert cannot have a column with this name: rename it", column=name)
            # It names folders after partitions, and takes what is before a colon for a protocol.
            if name in self._partition_by and _NO_FOLDER.search(name):
                raise SchemaMismatchError("an upsert cannot have a partition of this name: rename it", column=name)
        for name in self._keys:
            if name not in schema.names:
                raise InvalidArgumentError("the rows lack a key column", column=name)
            t = schema.field(name).type
            if pa.types.is_nested(t) or pa.types.is_floating(t):
                raise InvalidArgumentError(
                    "a key column must have plain values that compare exactly", column=name, type=t
                )


def _application(query: SinkQuery) -> str:
    return f"holdfast/{query.sink}/{query.query_id}"


def _digest(files: Sequence[DataFile]) -> int:
    """Return 63 bits that tell which attempts a micro-batch is made of."""
    named = "\n".join(sorted(f"{file.name} {file.digest}" for file in files))
    return int(xxhash.xxh3_64_intdigest(named.encode())) >> 1


def _staged(files: Sequence[DataFile], storage: ObjectStorage, attempts: Attempts) -> pa.Table:
    tables = []
    for file in files:
        data = storage.get(attempts.key_of(file.name), limit_bytes=file.size_bytes)
        if xxhash.xxh3_128(data).hexdigest() != file.digest:
            raise CorruptionError("a staged file was altered or damaged", file=file.name, storage=storage.url)
        tables.append(pq.read_table(pa.BufferReader(data), partitioning=None))
    return pa.concat_tables(tables)


def _newest_rows(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Return the last row of each key."""
    # By names of our own: a column may have any.
    named = [f"key {number}" for number in range(len(keys))]
    numbered = rows.select(list(keys)).rename_columns(named).append_column("row", pa.array(np.arange(rows.num_rows)))
    last: Any = numbered.group_by(named, use_threads=False).aggregate([("row", "max")])["row_max"]
    return rows if len(last) == rows.num_rows else rows.take(last)


def _is_same(name: str, *, has_nulls: bool) -> str:
    quoted = '"' + name.replace('"', '""') + '"'
    return f"t.{quoted} IS NOT DISTINCT FROM s.{quoted}" if has_nulls else f"t.{quoted} = s.{quoted}"
