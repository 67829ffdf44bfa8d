"""What a task does for a savepoint: it reads shards at their pointers and stores their rows as pieces.

State goes from the state directory to the savepoint through the executors, never through the driver. Tasks may be
repeated, and may run twice at a time: each writes objects of its own names, and only those count that the manifest
names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from holdfast.backends.base import Pointer
from holdfast.backends.column_names import Names
from holdfast.backends.run import under_names
from holdfast.backends.stored_schema import decode_schemas
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.ownership.operator_record import shard_prefix
from holdfast.snapshotter.savepoints.pieces import write_pieces
from holdfast.snapshotter.savepoints.savepoints import savepoint_folder
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.version_rows import read_tables
from holdfast.spark_integration.executor.takeover import own_directory
from holdfast.spark_integration.savepoints.tasks import ShardTask, each_ahead
from holdfast.spark_integration.shard.pointer_row import PointerRow
from holdfast.spark_integration.shard.task_storage import io_executor

#: What a task is given of each shard, and what it returns: a piece, or an error.
SHARD = "operator string, directory string, shard int, version long, commit string, carried binary"
SAVED = "operator string, shard int, piece string, error string"
_SAVED = pa.schema([("operator", pa.string()), ("shard", pa.int32()), ("piece", pa.string()), ("error", pa.string())])


def shard_row(operator: str, row: PointerRow) -> tuple[Any, ...]:
    """Return what a task is given of a shard with state, as `SHARD` has it."""
    assert row.pointer is not None
    return (operator, row.directory, row.shard, row.pointer.version, row.pointer.commit_id, row.carried)


@dataclass(frozen=True)
class StoredNames:
    """How the rows of an operator are stored in one of its directories; travels to the tasks.

    Attributes
    ----------
    held : mapping of str to list of str
        The encoded schemas of all tables, with the names that columns are stored under.
    names : mapping of str to mapping of str to str
        By table the columns that are saved, and under which names they are stored.
    """

    held: Mapping[str, list[str]]
    names: Mapping[str, Names]


@dataclass(frozen=True)
class ShardSaver(ShardTask):
    """Saves shards, which are rows of `SHARD`, to a directory of savepoints; see `ShardTask`.

    Attributes
    ----------
    name : str
        Of the savepoint.
    tables : mapping of str to mapping
        By operator the encoded schemas of all its tables, as they are saved.
    stored : mapping of str to StoredNames
        By directory how its rows are stored.
    """

    RETURNED: ClassVar[pa.Schema] = _SAVED

    name: str
    tables: Mapping[str, Mapping[str, list[str]]]
    stored: Mapping[str, StoredNames]

    def work(self, row: Mapping[str, Any], opened: Callable[[str], ObjectStorage]) -> Iterator[dict[str, Any]]:
        """Yield the pieces of a shard, in order."""
        for piece in self._pieces(row, opened):
            yield {"operator": row["operator"], "shard": row["shard"], "piece": json.dumps(piece), "error": None}

    def _pieces(self, row: Mapping[str, Any], opened: Callable[[str], ObjectStorage]) -> Iterator[dict[str, Any]]:
        assert self.settings.state_dir is not None
        storage, savepoint = opened(self.settings.state_dir), savepoint_folder(opened(self.target), self.name)
        stored = self.stored[row["directory"]]
        tables, held = decode_schemas(self.tables[row["operator"]]), decode_schemas(stored.held)
        pointer = Pointer(row["version"], row["commit"])
        carried = {} if row["carried"] is None else {pointer: bytes(row["carried"])}
        prefix = shard_prefix(row["directory"], row["shard"])
        with own_directory(self.settings.local_dir) as home:
            log = ObjectCommitLog(storage, prefix, held, io_executor(), home, carried=carried)
            rows = read_tables(log, pointer, held)
        for table, schema in tables.items():
            if table in rows:
                run = under_names(rows.pop(table), schema, stored.names[table])
                for piece in write_pieces(savepoint, row["operator"], row["shard"], run, each=each_ahead):
                    yield piece.to_json()
