"""The manifest of a savepoint: what a query was at one micro-batch, and the objects that hold it.

::

    <target>/<name>/
        savepoint                                           the manifest, kind "savepoint"
        operators/<operator>/<table>/0003-0-<id>.arrow      rows of shard 3, kind "piece"
        sources/0/9.compact-<id>                            what Spark keeps of a source, as it was

Invariants
----------
* **last**: the manifest is stored after all objects that it names: without it there is no savepoint.
* **self-contained**: keys are below the savepoint's folder; nothing names a state directory, a commit or a
  pointer. So it can be copied and moved, and outlives its query.
* **independent**: pieces are runs of the state tables (FORMAT.md section 2), whatever backend the state was in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from holdfast.backends import stored_file
from holdfast.backends.options import did_you_mean
from holdfast.errors import NotFoundError
from holdfast.snapshotter.fields import DIGEST, NUMBER_LIMIT, Fields
from holdfast.snapshotter.savepoints.saved_operator import NAME, SavedOperator, read_key
from holdfast.snapshotter.sink_log import SINK, plan_of
from holdfast.snapshotter.storage.keys import key_problem

KIND = "savepoint"
_QUERY_ID = re.compile(r"[A-Za-z0-9-]{0,64}")
#: Names of sources, or their numbers.
SOURCE = re.compile(r"[A-Za-z0-9_]{1,255}")
_LINE = re.compile(r"[^\n\r]+")
_OFFSETS_VERSION = re.compile(r"v[0-9]{1,3}")


@dataclass(frozen=True)
class SourceLog:
    """A file that Spark keeps of a source.

    Attributes
    ----------
    key : str
        Below the savepoint.
    name : str
        Of the file, below the source's folder.
    size_bytes : int
    digest : str
        XXH3-128 of its bytes.
    """

    key: str
    name: str
    size_bytes: int
    digest: str

    FIELDS = ("key", "name", "size_bytes", "digest")
    _NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,299}")

    @classmethod
    def read(cls, fields: Fields) -> SourceLog:
        """Return the file that the fields describe; raises `CorruptionError`."""
        if key_problem(fields.text("name")):
            fields.refuse("names a file of a source outside its folder")
        return cls(
            read_key(fields, "key"),
            fields.text("name", cls._NAME),
            fields.number("size_bytes"),
            fields.text("digest", DIGEST),
        )


@dataclass(frozen=True)
class SavedSource:
    """Where a source was.

    Attributes
    ----------
    name : str
        Its number in the query's plan, or the name that the query gave it.
    offset : str
        JSON, as Spark logged it; ``-`` where the source had none yet.
    logs : tuple of SourceLog
    """

    name: str
    offset: str
    logs: tuple[SourceLog, ...]

    FIELDS = ("name", "offset", "logs")

    @classmethod
    def read(cls, fields: Fields) -> SavedSource:
        """Return the source that the fields describe; raises `CorruptionError`."""
        logs = tuple(SourceLog.read(log) for log in fields.each("logs", *SourceLog.FIELDS))
        return cls(fields.text("name", SOURCE), fields.text("offset", _LINE), logs)


@dataclass(frozen=True)
class PlannedBatch:
    """The micro-batch after the saved one, as Spark had planned it: what Spark would have run next, and nothing else.

    Attributes
    ----------
    offsets_version, batch : str
        As in `SavedQuery`.
    sources : tuple of SavedSource
        Where they are at its end, and what Spark keeps of them besides what the savepoint has anyway.
    """

    offsets_version: str
    batch: str
    sources: tuple[SavedSource, ...]

    FIELDS = ("offsets_version", "batch", "sources")

    @property
    def plan(self) -> str:
        """What distinguishes it from another micro-batch of its number: see `plan_of`."""
        return plan_of(self.batch, ((source.name, source.offset) for source in self.sources))

    @classmethod
    def read(cls, fields: Fields) -> PlannedBatch:
        """Return the micro-batch that the fields describe; raises `CorruptionError`."""
        sources = tuple(SavedSource.read(source) for source in fields.each("sources", *SavedSource.FIELDS))
        return cls(fields.text("offsets_version", _OFFSETS_VERSION), _batch(fields), sources)


@dataclass(frozen=True)
class SavedSink:
    """What a sink of the query had decided to show.

    Attributes
    ----------
    sink : str
    number : int
        Of the newest decision in the sink's log; 0 if there was none.
    batch_id : int
        The micro-batch of the query for which it stands; -1 if there was none.
    """

    sink: str
    number: int
    batch_id: int

    FIELDS = ("sink", "number", "batch_id")

    @classmethod
    def read(cls, fields: Fields) -> SavedSink:
        """Return the sink that the fields describe; raises `CorruptionError`."""
        return cls(fields.text("sink", SINK), fields.number("number"), fields.number("batch_id", -1))


@dataclass(frozen=True)
class SavedQuery:
    """The query at its micro-batch.

    Attributes
    ----------
    query_id : str
        Spark's; empty if the state is that of a query which has not begun.
    batch_id : int
        The last micro-batch whose writes the state holds.
    offsets_version : str
        Of Spark's offset log: ``v1``, or ``v2`` where sources have names.
    batch : str
        JSON: watermark, time and settings that Spark pinned for the micro-batch.
    next_watermark_ms : int
        Of the micro-batch that would have come next.
    sources : tuple of SavedSource
        In the order of the query's plan.
    planned : PlannedBatch or None
        None if the query had planned nothing after the micro-batch.
    sinks : tuple of SavedSink
        Those of holdfast's that the query writes to.
    """

    query_id: str
    batch_id: int
    offsets_version: str
    batch: str
    next_watermark_ms: int
    sources: tuple[SavedSource, ...]
    planned: PlannedBatch | None = None
    sinks: tuple[SavedSink, ...] = ()

    FIELDS = (
        "query_id", "batch_id", "offsets_version", "batch", "next_watermark_ms", "sources", "planned", "sinks",
    )  # fmt: skip

    @property
    def logs(self) -> tuple[SourceLog, ...]:
        """All files that Spark keeps of the sources."""
        sources = (*self.sources, *(self.planned.sources if self.planned else ()))
        return tuple(log for source in sources for log in source.logs)

    @property
    def uncommitted(self) -> tuple[SavedSink, ...]:
        """The sinks that show, or will show, a micro-batch that the savepoint does not hold."""
        return tuple(sink for sink in self.sinks if sink.batch_id > self.batch_id)

    @classmethod
    def read(cls, fields: Fields) -> SavedQuery:
        """Return the query that the fields describe; raises `CorruptionError`."""
        planned = fields.inner_or_none("planned", *PlannedBatch.FIELDS)
        return cls(
            fields.text("query_id", _QUERY_ID),
            fields.number("batch_id"),
            fields.text("offsets_version", _OFFSETS_VERSION),
            _batch(fields),
            fields.number("next_watermark_ms", 0, NUMBER_LIMIT),
            tuple(SavedSource.read(source) for source in fields.each("sources", *SavedSource.FIELDS)),
            None if planned is None else PlannedBatch.read(planned),
            tuple(SavedSink.read(sink) for sink in fields.each("sinks", *SavedSink.FIELDS)),
        )


@dataclass(frozen=True, repr=False)
class Savepoint:
    """See the module.

    Attributes
    ----------
    name, comment : str
    created_ms : int
        By the clock of who made it, in ms since 1970.
    versions : mapping of str to str
        Of ``holdfast`` and ``spark``.
    query : SavedQuery
    operators : tuple of SavedOperator
    left_out : tuple of str
        Other operators of the query with state: Spark's own, or holdfast's that somebody chose to leave out.
    """

    name: str
    comment: str
    created_ms: int
    versions: Mapping[str, str]
    query: SavedQuery
    operators: tuple[SavedOperator, ...]
    left_out: tuple[str, ...] = ()

    FIELDS = ("name", "comment", "created_ms", "versions", "query", "operators", "left_out")

    def __repr__(self) -> str:
        rows = {operator.name: dict(operator.rows) for operator in self.operators}
        return (
            f"<Savepoint {self.name!r} after micro-batch {self.query.batch_id}, {self.size_bytes} bytes, rows={rows}>"
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of all objects that it names."""
        logs = sum(log.size_bytes for log in self.query.logs)
        return logs + sum(operator.size_bytes for operator in self.operators)

    @property
    def keys(self) -> dict[str, int]:
        """The objects that it names, and their sizes."""
        logs = {log.key: log.size_bytes for log in self.query.logs}
        return logs | {piece.key: piece.size_bytes for operator in self.operators for piece in operator.pieces}

    def find_operator(self, name: str | None) -> SavedOperator:
        """Return an operator by its name; None will do if only one has tables.

        Raises
        ------
        NotFoundError
            There is none of this name, or there are several.
        """
        names = [operator.name for operator in self.operators]
        with_tables = [operator for operator in self.operators if operator.tables] or self.operators
        if name is None and len(with_tables) == 1:
            return with_tables[0]
        if name not in names:
            what = "no such operator" if name else "the savepoint has several operators"
            raise NotFoundError(
                f"{what}: choose one with the option operator{did_you_mean(name or '', names)}",
                operator=name,
                operators=", ".join(names),
            )
        return self.operators[names.index(name)]

    def encode(self) -> pa.Buffer:
        """Return the stored file.

        Raises
        ------
        InvalidArgumentError
            It names so much that no reader would take it.
        """
        header = {name: getattr(self, name) for name in self.FIELDS} | {
            "versions": dict(self.versions),
            "query": asdict(self.query),
            "operators": [operator.to_json() for operator in self.operators],
            "left_out": list(self.left_out),
        }
        return stored_file.encode(KIND, header)[0]


def read_manifest(data: Any, name: str, source: str) -> Savepoint:
    """Return the savepoint that a stored file describes.

    Parameters
    ----------
    name : str
        Of the folder that it was found in, which may have been renamed since: the savepoint then has that name.
    source : str
        What to call it in an error.

    Raises
    ------
    CorruptionError
        It is damaged, no manifest, or says what cannot be.
    """
    stored = stored_file.decode(data, source=source, kind=KIND, plain_bytes_max=0)
    fields = Fields(stored.header, source, *Savepoint.FIELDS)
    fields.text("name", NAME)
    savepoint = Savepoint(
        name,
        fields.text("comment"),
        fields.number("created_ms"),
        fields.mapping_of_texts("versions"),
        SavedQuery.read(fields.inner("query", *SavedQuery.FIELDS)),
        tuple(SavedOperator.read(operator) for operator in fields.each("operators", *SavedOperator.FIELDS)),
        tuple(fields.all_texts("left_out")),
    )
    keys = [log.key for log in savepoint.query.logs]
    keys += [piece.key for operator in savepoint.operators for piece in operator.pieces]
    names = [operator.name for operator in savepoint.operators]
    if len(set(keys)) != len(keys) or len(set(names)) != len(names):
        fields.refuse("names an object or an operator twice")
    return savepoint


def _batch(fields: Fields) -> str:
    """Return a micro-batch as Spark logged it: one line of JSON that says which settings were pinned."""
    text = fields.text("batch", _LINE)
    try:
        conf = json.loads(text)["conf"]
    except (ValueError, TypeError, KeyError, RecursionError):
        conf = None
    if not isinstance(conf, dict) or not all(isinstance(value, str) for value in conf.values()):
        fields.refuse("has a micro-batch that pins no settings")
    return text
