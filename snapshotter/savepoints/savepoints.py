"""Makes, lists, reads, verifies and deletes the savepoints of a directory, and the pieces that hold their rows.

::

    <target>/
        before-upgrade/savepoint    a savepoint
        before-upgrade/operators/…  pieces
        nightly-7/operators/…       unfinished: it has no manifest (yet)
        nightly-7/probe-92ab47…     left by a probe that was not allowed to delete it

A piece is a stored file whose only section, at its beginning, is an Arrow IPC stream with one record batch and LZ4
buffers: ``pyarrow.ipc.open_stream``, Polars and DuckDB can read it directly. It has the columns of a run (FORMAT.md
section 2): all columns of the table, even if a row was written with fewer.

Invariants
----------
* **first wins**: a manifest is put only if there is none.
* **own pieces**: a maker deletes only pieces with its own id that no manifest names: those of repeated tasks, or all if
  another maker was first. Other pieces may belong to the next savepoint, if this one was deleted and its name reused.
* **whole**: a manifest is stored after all objects that it names. Its maker then checks them again, since another
  process may be deleting the folder; if all exist, the savepoint is complete, even if leftovers cannot be deleted.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import quote

import pyarrow.ipc as ipc
import xxhash

from holdfast import clock
from holdfast.backends import stored_file
from holdfast.backends.options import did_you_mean
from holdfast.backends.run import Run, TableSchema
from holdfast.errors import (
    ConflictError,
    CorruptionError,
    HoldfastError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from holdfast.snapshotter.fence import looks
from holdfast.snapshotter.fields import Stored, refuse, refuse_stray
from holdfast.snapshotter.savepoints.manifest import (
    KEY,
    NAME,
    PIECE_BYTES_MAX,
    Piece,
    Savepoint,
    SourceLog,
    read_manifest,
)
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

_log = logging.getLogger(__name__)
KIND = "piece"
#: Average uncompressed size of a piece's rows, of which a task holds two copies.
PIECE_BYTES = 64 << 20
#: How many digits of a piece's id identify the savepoint's maker.
MAKER_DIGITS = 8
_ROWS_MAX = (1 << 31) - 1
_NAME_BYTES_MAX = 100


@dataclass(frozen=True)
class _Header(Stored):
    operator: str
    table: str
    shard: int


def folder_of(operator: str, table: str) -> str:
    """Return the folder of a table's pieces below the savepoint, escaped because any text may name a table."""
    name = quote(table, safe="")
    if len(name) > _NAME_BYTES_MAX:
        name = f"{name[:_NAME_BYTES_MAX]}-{xxhash.xxh3_64_hexdigest(table.encode())}"
    return f"operators/{operator}/{name}"


def write_pieces(
    savepoint: ObjectStorage,
    operator: str,
    shard: int,
    run: Run,
    piece_bytes: int = PIECE_BYTES,
    maker: str = "",
    each: Callable[[Callable[[Any], Piece], Iterable[Any]], Iterable[Piece]] = map,
) -> Iterator[Piece]:
    """Store the live rows of a table and shard in pieces of about `piece_bytes`; yield each piece when it is stored.

    `maker` is the prefix of their ids; see `MAKER_DIGITS`.
    """
    table = run.schema.name
    header = _Header(operator, table, shard).to_json()

    def written(numbered: tuple[int, Run]) -> Piece:
        number, rows = numbered
        key = f"{folder_of(operator, table)}/{shard:04d}-{number}-{maker}{clock.new_id()[len(maker) :]}.arrow"
        plain_bytes = ipc.get_record_batch_size(rows.batch)
        sections = {"rows": partial(rows.write, compression="lz4")}
        data, digest = stored_file.encode(KIND, header, sections, plain_bytes=plain_bytes)
        if data.size > PIECE_BYTES_MAX:
            raise InvalidArgumentError("rows of one key are too large for a savepoint", key=key, size_bytes=data.size)
        savepoint.put(key, data)
        first_hash, last_hash = int(rows.hashes[0]), int(rows.hashes[-1])
        return Piece(key, table, shard, len(rows), data.size, plain_bytes, digest, first_hash, last_hash)

    yield from each(written, enumerate(run.chunks(_ROWS_MAX, piece_bytes)))


def fetch_piece(savepoint: ObjectStorage, piece: Piece) -> tuple[memoryview, stored_file.StoredFile]:
    """Fetch a piece's object. Raises `CorruptionError` if it is missing, damaged or not the manifest's."""
    source = f"{savepoint.url}/{piece.key}"
    try:
        data = savepoint.get(piece.key, piece.size_bytes)
    except NotFoundError as exc:
        raise CorruptionError(f"{source} is missing: the savepoint is incomplete") from exc
    stored = stored_file.decode(data, source=source, kind=KIND, plain_bytes_max=len(data))
    if (stored.digest, stored.size_bytes) != (piece.digest, piece.size_bytes):
        raise CorruptionError(f"{source} is not the object that the savepoint names", digest=stored.digest)
    return data, stored


def read_piece(savepoint: ObjectStorage, operator: str, piece: Piece, schema: TableSchema) -> Run:
    """Read the rows of a piece; `schema` is its table's schema in the manifest. Raises `CorruptionError`."""
    stored, source = fetch_piece(savepoint, piece)[1], f"{savepoint.url}/{piece.key}"
    header = _Header.read(stored.header, source)
    if (header.operator, header.table, header.shard) != (operator, piece.table, piece.shard):
        refuse_stray(source, operator=header.operator, table=header.table, shard=header.shard)
    run = Run.read(stored.section("rows", source), schema, source=source, plain_bytes=piece.plain_bytes)
    if len(run) != piece.rows or (int(run.hashes[0]), int(run.hashes[-1])) != (piece.first_hash, piece.last_hash):
        refuse(source, "holds different rows than the savepoint declares", rows=len(run), wanted=piece.rows)
    if run.deleted.any():
        refuse(source, "holds deleted rows")
    return run


# Later than any upload: all uploads to a deleted savepoint should fail.
_EVER_MS = 1 << 52
# The keys of holdfast's objects in a savepoint's folder; other objects are neither counted nor deleted.
_OURS = re.compile(
    rf"{KEY}|probe-[0-9a-f]{{16}}|sources/[^/]+/[^/]+-[0-9a-f]{{16}}"
    r"|operators/[^/]+/[^/]+/[0-9]{4,}-[0-9]+-[0-9a-f]{16}\.arrow"
)


def savepoint_folder(target: ObjectStorage, name: str) -> PrefixedStorage:
    """Return the folder of a savepoint's objects. Raises `InvalidArgumentError` if the name is invalid."""
    if not NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"{name[:120]!r} cannot name a savepoint: use letters from a to z, digits, '_', '.' and '-', beginning "
            "with a letter or digit, at most 100 characters"
        )
    return PrefixedStorage(target, name)


def find_savepoint(target: ObjectStorage, name: str) -> Savepoint | None:
    """Return a savepoint; None if it is absent or unfinished. Raises `CorruptionError` if its manifest is damaged."""
    folder = savepoint_folder(target, name)
    try:
        data = folder.get(KEY)
    except NotFoundError:
        return None
    return read_manifest(data, name, f"{folder.url}/{KEY}")


def require_free(target: ObjectStorage, name: str) -> None:
    """Raise `ConflictError` if a savepoint of this name exists."""
    if find_savepoint(target, name) is not None:
        raise ConflictError(
            "a savepoint of this name exists: use a different name, or delete it first", name=name, storage=target.url
        )


def read_savepoint(target: ObjectStorage, name: str) -> Savepoint:
    """Return a savepoint. Raises `NotFoundError`, `CorruptionError`."""
    found = find_savepoint(target, name)
    if found is None:
        near = did_you_mean(name, _finished(target)) or "; holdfast savepoint list shows all savepoints"
        raise NotFoundError(
            f"no savepoint of this name exists, or it was never finished{near}", name=name, storage=target.url
        )
    return found


def _finished(target: ObjectStorage) -> set[str]:
    return {info.key.removesuffix(f"/{KEY}") for info in target.list("") if info.key.endswith(f"/{KEY}")}


@dataclass(frozen=True)
class Listed:
    """A folder of a directory of savepoints.

    Attributes
    ----------
    name : str
    objects : int
        Objects in the folder.
    size_bytes : int
        `Savepoint.size_bytes` or, if unfinished or damaged, the size of all objects in the folder.
    savepoint : Savepoint or None
        None if unfinished or damaged.
    damage : str
        The damage to its manifest; empty if there is none.
    """

    name: str
    objects: int
    size_bytes: int
    savepoint: Savepoint | None = None
    damage: str = ""


def list_savepoints(target: ObjectStorage, executor: Executor) -> list[Listed]:
    """Return a directory's savepoints, finished or not, by name. Cost: a listing, and a request per savepoint."""
    sizes: dict[str, dict[str, int]] = {}
    for info in target.list(""):
        name, _, rest = info.key.partition("/")
        if NAME.fullmatch(name) and _OURS.fullmatch(rest):
            sizes.setdefault(name, {})[rest] = info.size_bytes

    def listed(name: str) -> Listed:
        found = Listed(name, len(sizes[name]), sum(sizes[name].values()))
        if KEY not in sizes[name]:
            return found
        try:
            whole = find_savepoint(target, name)
        except CorruptionError as exc:
            return replace(found, damage=str(exc))
        return replace(found, savepoint=whole, size_bytes=whole.size_bytes) if whole else found

    return list(executor.map(listed, sorted(sizes)))


def verify_savepoint(target: ObjectStorage, savepoint: Savepoint, executor: Executor) -> list[str]:
    """Read all objects of a savepoint; return the problems found. Each thread of `executor` holds one piece."""
    folder = savepoint_folder(target, savepoint.name)
    reads: list[Callable[[], object]] = [
        partial(read_piece, folder, operator.name, piece, operator.tables[piece.table])
        for operator in savepoint.operators
        for piece in operator.pieces
    ]
    reads += [partial(read_log, folder, log) for log in savepoint.query.logs]
    return [problem for problem in executor.map(_problem, reads) if problem]


def unnamed_keys(listed: Iterable[ObjectInfo], savepoint: Savepoint) -> list[str]:
    """Return the keys of objects in a finished savepoint's folder that its manifest does not name: leftovers."""
    keys = [info.key for info in listed if _OURS.fullmatch(info.key) and info.key != KEY]
    return sorted(set(keys) - savepoint.keys.keys())


def _problem(read: Callable[[], object]) -> str:
    try:
        read()
    except CorruptionError as exc:
        return str(exc)
    return ""


def read_log(folder: PrefixedStorage, log: SourceLog) -> memoryview:
    """Read the copy of a source's log. Raises `CorruptionError` if it is missing or damaged."""
    try:
        data = folder.get(log.key, max(1, log.size_bytes))
    except NotFoundError as exc:
        raise CorruptionError(f"{folder.url}/{log.key} is missing: the savepoint is incomplete") from exc
    if len(data) != log.size_bytes or xxhash.xxh3_128_hexdigest(data) != log.digest:
        raise CorruptionError(f"{folder.url}/{log.key} was altered or damaged: its checksum does not match")
    return data


def find_objects(target: ObjectStorage, name: str) -> list[str]:
    """Return the keys of all objects to delete. Raises `InvalidArgumentError` if there is only a foreign file."""
    folder = savepoint_folder(target, name)
    keys = _ours(folder)
    if keys == [KEY] and bytes(folder.get(KEY))[-len(stored_file.MAGIC) :] != stored_file.MAGIC:
        raise InvalidArgumentError("this file is not a savepoint: delete it yourself", file=f"{folder.url}/{KEY}")
    return keys


def delete_savepoint(target: ObjectStorage, name: str) -> int:
    """Delete a savepoint, finished or not, manifest first; abort its uploads; return how many objects it had."""
    keys, folder = find_objects(target, name), savepoint_folder(target, name)
    _delete(folder, keys)
    for _ in looks(target.url):
        if not keys or KEY not in (since := _ours(folder)):
            break
        _delete(folder, since)
        keys = sorted({*keys, *since})
    uploads = _abort_uploads(folder)
    if not keys and not uploads:
        near = did_you_mean(name, _finished(target))
        raise NotFoundError(f"no savepoint of this name exists{near}", name=name, storage=target.url)
    return len(keys)


def _ours(folder: PrefixedStorage) -> list[str]:
    return [info.key for info in folder.list("") if _OURS.fullmatch(info.key)]


def _delete(folder: PrefixedStorage, keys: list[str]) -> None:
    if KEY in keys:
        folder.delete([KEY])
    folder.delete(key for key in keys if key != KEY)


def _abort_uploads(folder: PrefixedStorage) -> int:
    """Abort unfinished uploads of pieces and logs, if permitted; return their number."""
    try:
        return sum(folder.abort_unfinished_uploads(f"{part}/", _EVER_MS) for part in ("operators", "sources"))
    except InvalidArgumentError as exc:
        _log.warning("unfinished uploads of a savepoint may remain: %s", exc)
        return 0


@dataclass(frozen=True)
class SavepointWriter:
    """Writes a savepoint's objects to `folder`; the ids of its pieces begin with `id`."""

    folder: PrefixedStorage
    id: str = field(default_factory=lambda: clock.new_id()[:MAKER_DIGITS])

    def finish(self, savepoint: Savepoint) -> None:
        """Store the manifest, and remove pieces of repeated tasks. Raises `ConflictError`, `UnavailableError`."""
        name, data = self.folder.prefix, savepoint.encode()
        read_manifest(data, savepoint.name, f"{self.folder.url}/{KEY}")  # raises if readers would refuse it
        listed = self.folder.list("")
        self._require(savepoint.keys, listed)
        try:
            self.folder.put_if_absent(KEY, data)
            listed = self.folder.list("")
        except ConflictError as exc:
            self._delete_own(listed)
            raise ConflictError(
                "another process has just made a savepoint of this name: use a different name", name=name
            ) from exc
        except UnavailableError as exc:
            raise UnavailableError(
                "the savepoint may or may not be complete: run holdfast savepoint verify before making it again",
                name=name,
                because=exc,
            ) from exc
        self._require({**savepoint.keys, KEY: data.size}, listed)
        self._delete_own(listed, savepoint.keys)

    def _require(self, sizes: Mapping[str, int], listed: Iterable[ObjectInfo]) -> None:
        """Raise `ConflictError` unless every object exists with its size."""
        found = {info.key: info.size_bytes for info in listed}
        missing = next((key for key, size_bytes in sizes.items() if found.get(key) != size_bytes), None)
        if missing is not None:
            raise ConflictError(
                "another process has deleted this savepoint, or made one of the same name: use a different name",
                name=self.folder.prefix,
                missing=missing,
            )

    def _delete_own(self, listed: Iterable[ObjectInfo], named: Collection[str] = ()) -> None:
        own = [info.key for info in listed if info.key.rpartition("-")[2].startswith(self.id)]
        keys = sorted(key for key in own if key not in named)
        try:
            self.folder.delete(keys)
        except HoldfastError as exc:
            _log.warning(
                "the savepoint %s is complete, but %d objects that are not part of it may remain, such as %s: %s",
                self.folder.url,
                len(keys),
                keys[0],
                exc,
            )


def begin_savepoint(target: ObjectStorage, name: str) -> SavepointWriter:
    """Begin a savepoint. Raises `ConflictError` if the name is taken."""
    require_free(target, name)
    return SavepointWriter(savepoint_folder(target, name))
