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
from dataclasses import dataclass, replace
from typing import Annotated, Any

import pyarrow as pa

from holdfast.backends import stored_file
from holdfast.backends.options import did_you_mean
from holdfast.errors import NotFoundError
from holdfast.snapshotter.fields import NUMBER_LIMIT, Digest, Fields, Stored
from holdfast.snapshotter.savepoints.saved_operator import NAME, SavedOperator, require_key
from holdfast.snapshotter.sink_log import SINK, plan_of
from holdfast.snapshotter.storage.object_storage import key_problem

KIND = "savepoint"
#: Names of sources, or their numbers.
SOURCE = re.compile(r"[A-Za-z0-9_]{1,255}")
_Line = Annotated[str, re.compile(r"[^\n\r]+")]
_OffsetsVersion = Annotated[str, re.compile("v[0-9]{1,3}")]


@dataclass(frozen=True)
class SourceLog(Stored):
    """A file that Spark keeps of a source."""

    key: str  #: Below the savepoint
    #: Of the file, below the source's folder
    name: Annotated[str, re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,299}")]
    size_bytes: int
    digest: Digest  #: XXH3-128 of its bytes

    def require(self, header: Fields) -> None:
        """Refuse what lies elsewhere."""
        if key_problem(self.name):
            header.refuse("names a file of a source outside its folder")
        require_key(self.key, header)


@dataclass(frozen=True)
class SavedSource(Stored):
    """Where a source was."""

    name: Annotated[str, SOURCE]  #: Its number in the query's plan, or the name that the query gave it
    offset: _Line  #: JSON, as Spark logged it; ``-`` where the source had none yet
    logs: tuple[SourceLog, ...]


@dataclass(frozen=True)
class PlannedBatch(Stored):
    """The micro-batch after the saved one, as Spark had planned it: what Spark would have run next, and nothing else.

    `offsets_version`, `batch`: as in `SavedQuery`; `sources`: where they are at its end, and what Spark keeps of them
    besides what the savepoint has anyway.
    """

    offsets_version: _OffsetsVersion
    batch: _Line
    sources: tuple[SavedSource, ...]

    @property
    def plan(self) -> str:
        """What distinguishes it from another micro-batch of its number: see `plan_of`."""
        return plan_of(self.batch, ((source.name, source.offset) for source in self.sources))

    def require(self, header: Fields) -> None:
        """Refuse a micro-batch that is none."""
        _require_batch(self.batch, header)


@dataclass(frozen=True)
class SavedSink(Stored):
    """What a sink of the query had decided to show."""

    sink: Annotated[str, SINK]
    number: int  #: Of the newest decision in the sink's log; 0 if there was none
    #: The micro-batch of the query for which it stands; -1 if there was none
    batch_id: Annotated[int, range(-1, NUMBER_LIMIT)]


@dataclass(frozen=True)
class SavedQuery(Stored):
    """The query at its micro-batch."""

    #: Spark's; empty if the state is that of a query which has not begun
    query_id: Annotated[str, re.compile("[A-Za-z0-9-]{0,64}")]
    batch_id: int  #: The last micro-batch whose writes the state holds
    offsets_version: _OffsetsVersion  #: Of Spark's offset log: ``v1``, or ``v2`` where sources have names
    batch: _Line  #: JSON: watermark, time and settings that Spark pinned for the micro-batch
    next_watermark_ms: int  #: Of the micro-batch that would have come next
    sources: tuple[SavedSource, ...]  #: In the order of the query's plan
    planned: PlannedBatch | None = None  #: None if the query had planned nothing after the micro-batch
    sinks: tuple[SavedSink, ...] = ()  #: Those of holdfast's that the query writes to

    @property
    def logs(self) -> tuple[SourceLog, ...]:
        """All files that Spark keeps of the sources."""
        sources = (*self.sources, *(self.planned.sources if self.planned else ()))
        return tuple(log for source in sources for log in source.logs)

    @property
    def uncommitted(self) -> tuple[SavedSink, ...]:
        """The sinks that show, or will show, a micro-batch that the savepoint does not hold."""
        return tuple(sink for sink in self.sinks if sink.batch_id > self.batch_id)

    def require(self, header: Fields) -> None:
        """Refuse a micro-batch that is none."""
        _require_batch(self.batch, header)


@dataclass(frozen=True, repr=False)
class Savepoint(Stored):
    """A savepoint.

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

    name: Annotated[str, NAME]
    comment: str
    created_ms: int
    versions: Mapping[str, str]
    query: SavedQuery
    operators: tuple[SavedOperator, ...]
    left_out: tuple[str, ...] = ()

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
        """Return the stored file. Raises `InvalidArgumentError` if it names so much that no reader would take it."""
        return stored_file.encode(KIND, self.to_json())[0]

    def require(self, header: Fields) -> None:
        """Refuse what is named twice."""
        logs, pieces = (
            (log.key for log in self.query.logs),
            (piece.key for one in self.operators for piece in one.pieces),
        )
        for names in ([*logs, *pieces], [operator.name for operator in self.operators]):
            if len(set(names)) != len(names):
                header.refuse("names an object or an operator twice")


def read_manifest(data: Any, name: str, source: str) -> Savepoint:
    """Return the savepoint that a stored file describes. Raises `CorruptionError`.

    `name`: of the folder that it was found in, which may have been renamed since: the savepoint then has that name;
    `source`: what to call it in an error.
    """
    return replace(Savepoint.decode(data, KIND, source), name=name)


def _require_batch(text: str, header: Fields) -> None:
    """Refuse what is no micro-batch as Spark logs it: one line of JSON that says which settings were pinned."""
    try:
        conf = json.loads(text)["conf"]
    except (ValueError, TypeError, KeyError, RecursionError):
        conf = None
    if not isinstance(conf, dict) or not all(isinstance(value, str) for value in conf.values()):
        header.refuse("has a micro-batch that pins no settings")
