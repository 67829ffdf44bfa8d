"""Parquet sink: plain files below any URL, and a manifest per micro-batch that lists the committed files.

    <url>/_data/part-<attempt>-<number>.parquet                            rows
          _holdfast/<sink>/<query id>/batches/<level>-<first>-<last>       manifests: FORMAT.md section 9

Spark, Hive and similar readers skip names that begin with ``_``: a reader that ignores manifests sees no files, rather
than undecided rows. One put makes a micro-batch visible. Manifests are merged by level:

    level 0   17 18 19 …         one per micro-batch with rows
    level 1   1 to 99, 100 to 204 one per 100 or more of level 0
    level 2   1 to 9999          one per 100 or more of level 1

A reader uses the widest ranges and skips manifests inside them, which are about to be deleted. Each level rewrites
an entry once.

Invariants
----------
* **once**: a micro-batch's list of files never changes; a commit with a different list is refused.
* **whole**: a merged manifest covers all micro-batches with rows in its range; none is added later.
* **bounded**: the number of manifests does not grow with the micro-batches, except for full manifests.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends import stored_file
from holdfast.backends.arrow.streams import read_accepted
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError, StateLostError, UnavailableError
from holdfast.snapshotter.fields import DIGEST, Stored, refuse
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_url
from holdfast.spark_integration.shard.task import io_executor
from holdfast.spark_integration.sinks.files.location import FOLDER, check_columns, claim, writers_at
from holdfast.spark_integration.sinks.files.sink import Attempts, DataFile, FileSink, FileTarget, PreparedAttempt
from holdfast.spark_integration.sinks.two_phase_sink import SinkQuery

#: Attempts to list and read: a listed manifest may be merged away before it is read.
_TRIES = 5


def read_parquet(
    url: str | os.PathLike[str], *, columns: Sequence[str] | None = None, options: Mapping[str, str] | None = None
) -> pa.Table:
    """Return the rows of all committed micro-batches of a Parquet sink.

    Parameters
    ----------
    url : str
        The sink's URL.
    columns : sequence of str, optional
        The columns to read; all by default.
    options : mapping of str to str, optional
        Named as in ``spark.holdfast.sink.<name>.*``: ``key``, ``secret``, ``client_kwargs.endpoint_url`` …

    Returns
    -------
    pyarrow.Table
        The rows, ordered by micro-batch, partition and position in the partition.

    Raises
    ------
    InvalidArgumentError
        `columns` is empty, or contains an unknown or duplicate name.
    NotFoundError
        No sink has been opened at the URL.
    CorruptionError
        A manifest or a file is damaged.
    """
    url = str(parse_url(url))
    with open_storage(url, options or {}) as storage:
        there, files = _listed(storage)
        wanted = there.names if columns is None else list(columns)
        unknown = [name for name in wanted if name not in there.names]
        if unknown or not wanted or len(set(wanted)) < len(wanted):
            raise InvalidArgumentError(
                "columns must name columns of the sink, each once",
                columns=", ".join(unknown or wanted),
                there=", ".join(there.names),
            )
        schema = pa.schema([there.field(name) for name in wanted])

        def read(file: DataFile) -> pa.Table:
            return _rows_of(storage, file, wanted).select(wanted).cast(schema)

        tables = list(io_executor().map(read, files))
    return pa.concat_tables([schema.empty_table(), *tables])


def parquet_files(url: str | os.PathLike[str], *, options: Mapping[str, str] | None = None) -> list[str]:
    """Return the URLs of a Parquet sink's committed files, for any Parquet reader.

    A local sink's files are returned as paths. ``spark.read.parquet(*files)``, ``duckdb.read_parquet(files)`` and
    ``pyarrow.dataset.dataset(files)`` accept the result.

    Raises `NotFoundError` if no sink has been opened at the URL; `CorruptionError` if a manifest is damaged.

    `url`, `options`: as for `read_parquet`.
    """
    url = str(parse_url(url))
    with open_storage(url, options or {}) as storage:
        _, files = _listed(storage)
    return [f"{url}/{DATA}/{file.name}" for file in files]


def _listed(storage: ObjectStorage) -> tuple[pa.Schema, list[DataFile]]:
    """Return the sink's columns and the committed files of all its queries."""
    writers = writers_at(storage)
    if writers.columns is None:
        raise NotFoundError("no sink has been opened at this URL", storage=storage.url)
    ((sink, queries),) = writers.queries.items()
    for _ in range(_TRIES):
        try:
            tables = [table for query_id in queries for table in _tables(storage, sink, query_id)]
        except NotFoundError:
            continue
        return writers.columns, [file for table in tables for file in _files(table)]
    raise UnavailableError("manifests are merged faster than they can be read: try again", storage=storage.url)


def _tables(storage: ObjectStorage, sink: str, query_id: str) -> list[pa.Table]:
    manifests = Manifests(storage, sink, query_id)
    return list(io_executor().map(manifests.read, in_force(manifests.listed())))


def _files(manifest: pa.Table, batch_id: int | None = None) -> list[DataFile]:
    """Return the files that a manifest lists, or those of one micro-batch."""
    if batch_id is not None:
        manifest = manifest.filter(pc.equal(manifest["batch"], batch_id))
    return [DataFile(details={}, **entry) for entry in manifest.drop_columns(["batch"]).to_pylist()]


def _rows_of(storage: ObjectStorage, file: DataFile, columns: Sequence[str]) -> pa.Table:
    key = f"{DATA}/{file.name}"
    try:
        table = file.read_rows(storage, key, columns)
    except NotFoundError as exc:
        raise CorruptionError("a committed file is gone", key=key, storage=storage.url) from exc
    if table.num_rows != file.rows:
        raise CorruptionError("a committed file has a different number of rows", key=key, storage=storage.url)
    return table


_log = logging.getLogger(__name__)

KIND = "sink-batches"
#: Merging combines at least this many manifests of a level into one of the next level.
MERGED = 100
#: A manifest of at least this size is full, and no longer merged.
FULL_BYTES = 16 << 20
#: The maximum size of a manifest.
_BYTES_MAX = (MERGED + 1) * FULL_BYTES
_PATTERN = re.compile(r"([0-9])-([0-9]{18})-([0-9]{18})")
_LEVEL_MAX = 9
_NUMBER_MAX = 1_000_000
FILES = pa.schema(
    [
        pa.field("batch", pa.int64(), nullable=False),
        pa.field("attempt", pa.string(), nullable=False),
        pa.field("number", pa.int32(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),
        pa.field("digest", pa.string(), nullable=False),
    ]
)
_ATTEMPT_PATTERN = "^[0-9]{18}-[0-9]{6}-[0-9a-f]{32}$"


@dataclass(frozen=True)
class _Header(Stored):
    sink: str
    query_id: str
    level: int
    first: int
    last: int


@dataclass(frozen=True)
class ManifestName:
    """The parsed name of a manifest; `size_bytes` is 0 unless it came from a listing."""

    level: int
    first: int  #: First micro-batch of its range
    last: int
    size_bytes: int = 0

    @property
    def name(self) -> str:
        """The last segment of the manifest's key."""
        return f"{self.level}-{self.first:018}-{self.last:018}"

    def holds(self, other: ManifestName) -> bool:
        """Return whether the other manifest's range lies within this range."""
        return self.first <= other.first and other.last <= self.last


def found(infos: Iterable[ObjectInfo]) -> list[ManifestName]:
    """Return the manifests in a listing, sorted by `place`."""
    manifests = []
    for info in infos:
        folder, _, name = info.key.rpartition("/")
        match = _PATTERN.fullmatch(name)
        if match and folder.endswith("/batches"):
            level, first, last = map(int, match.groups())
            if first > last or (level == 0 and first != last):
                raise CorruptionError("a manifest has an invalid name", key=info.key)
            manifests.append(ManifestName(level, first, last, info.size_bytes))
    return sorted(manifests, key=place)


def place(manifest: ManifestName) -> tuple[int, int, int]:
    """Return a sort key that orders manifests by range, each before the manifests inside it."""
    return manifest.first, -manifest.last, -manifest.level


def in_force(manifests: Iterable[ManifestName]) -> list[ManifestName]:
    """Return the manifests that lie inside no other, in order. Raises `CorruptionError` if two partly overlap.

    `manifests` are sorted by `place`. A late put of an abandoned merge may lie inside a manifest of its own level.
    """
    kept: list[ManifestName] = []
    for manifest in manifests:
        if kept and kept[-1].holds(manifest):
            continue
        if kept and manifest.first <= kept[-1].last:
            raise CorruptionError("two manifests overlap", one=kept[-1].name, other=manifest.name)
        kept.append(manifest)
    return kept


class Manifests(FileTarget):
    """The manifests of one query; `storage` is rooted at the sink's URL."""

    def __init__(self, storage: ObjectStorage, sink: str, query_id: str) -> None:
        self._storage, self._sink, self._query_id = storage, sink, query_id
        self._folder = f"{FOLDER}/{sink}/{query_id}/batches/"
        self._there: list[ManifestName] = []

    def newest(self) -> int:
        """Return the newest visible micro-batch; -1 if there is none."""
        return max((manifest.last for manifest in self.listed()), default=-1)

    def listed(self) -> list[ManifestName]:
        return found(self._storage.list(self._folder))

    def has(self, batch_id: int, prepared: Sequence[PreparedAttempt], listed: Sequence[ObjectInfo]) -> bool:
        self._there = found(listed)
        within = next((one for one in in_force(self._there) if one.first <= batch_id <= one.last), None)
        if within is None:
            return False
        shown = {file.name for file in _files(self.read(within), batch_id)}
        if shown != {name for each in prepared for name in each.names}:
            raise StateLostError(
                "the sink shows different files for this micro-batch, or ended it without files",
                batch=batch_id,
                sink=self._sink,
                manifest=within.name,
            )
        return True

    def show(self, batch_id: int, prepared: Sequence[PreparedAttempt], files: Sequence[DataFile]) -> None:
        entries = [{"batch": batch_id, **{name: getattr(file, name) for name in FILES.names[1:]}} for file in files]
        made = ManifestName(0, batch_id, batch_id)
        self._put(made, pa.Table.from_pylist(entries, FILES))
        there = [*self._there, made]
        if sum(one.level == 0 for one in there) >= MERGED:
            try:  # a failed merge must not fail the micro-batch
                self.merge(sorted(there, key=place))
            except (UnavailableError, NotFoundError) as exc:
                _log.warning("the manifests of sink %r were not merged: %s", self._sink, exc)

    def read(self, manifest: ManifestName) -> pa.Table:
        """Read a manifest's entries. Raises `CorruptionError` if it is damaged, `NotFoundError` if it was merged."""
        key = self._folder + manifest.name
        source = f"{self._storage.url}/{key}"
        data = self._storage.get(key, limit_bytes=_BYTES_MAX)
        stored = stored_file.decode(data, source=source, kind=KIND, plain_bytes_max=4 * _BYTES_MAX)
        if _Header.read(stored.header, source) != self._header(manifest):
            refuse(source, "covers different micro-batches than its name says")

        def accept(columns: pa.Schema) -> None:
            if not columns.equals(FILES):
                refuse(source, "does not have the columns of a manifest")

        batches = read_accepted(stored.section("files", source), accept, source=source, table="files")
        files = pa.Table.from_batches(batches, FILES)
        _check(files, manifest, source)
        return files

    def merge(self, manifests: Sequence[ManifestName]) -> None:
        """Merge each level that has enough manifests; delete the manifests inside others."""
        valid = in_force(manifests)
        for level in range(_LEVEL_MAX):
            run = _last_run(valid, level)
            if len(run) < MERGED:
                continue
            whole = ManifestName(level + 1, run[0].first, run[-1].last)
            self._put(whole, pa.concat_tables([self.read(one) for one in run]))
            valid = [one for one in valid if one not in run] + [whole]
            valid.sort(key=lambda one: one.first)
        self._storage.delete(self._folder + one.name for one in manifests if one not in valid)

    def _put(self, manifest: ManifestName, files: pa.Table) -> None:
        def write(out: pa.NativeFile) -> None:
            with pa.ipc.new_stream(out, FILES) as stream:
                stream.write_table(files.combine_chunks())

        data, _ = stored_file.encode(KIND, self._header(manifest).to_json(), {"files": write}, encoding="lz4")
        self._storage.put(self._folder + manifest.name, data)

    def _header(self, manifest: ManifestName) -> _Header:
        return _Header(self._sink, self._query_id, manifest.level, manifest.first, manifest.last)


def _last_run(valid: Sequence[ManifestName], level: int) -> list[ManifestName]:
    """Return the newest run of adjacent manifests of a level that are not full."""
    run: list[ManifestName] = []
    for manifest in reversed(valid):
        if manifest.level == level and manifest.size_bytes < FULL_BYTES:
            run.append(manifest)
        elif run:
            break
    return run[::-1]


def _check(files: pa.Table, manifest: ManifestName, source: str) -> None:
    """Raise `CorruptionError` for entries that no sink would write: a manifest determines which files are read."""
    if any(column.null_count for column in files.columns):
        refuse(source, "has a null")
    batch = files["batch"].to_numpy()
    number, rows, size = (files[name].to_numpy() for name in ("number", "rows", "size_bytes"))
    if not files.num_rows or batch.min() < manifest.first or batch.max() > manifest.last or np.any(np.diff(batch) < 0):
        refuse(source, "lists a micro-batch outside its range, or out of order")
    if min(number.min(), rows.min(), size.min()) < 0 or number.max() >= _NUMBER_MAX:
        refuse(source, "has an invalid number")
    shapes = (("attempt", _ATTEMPT_PATTERN), ("digest", f"^{DIGEST.pattern}$"))
    if not all(pc.all(pc.match_substring_regex(files[name], pattern)).as_py() for name, pattern in shapes):
        refuse(source, "has an invalid name")
    of_attempt = pc.cast(pc.utf8_slice_codeunits(files["attempt"], 0, 18), pa.int64()).to_numpy()
    if np.any(of_attempt != batch):
        refuse(source, "lists a file under another micro-batch")
    names = pc.binary_join_element_wise(files["attempt"], pc.cast(files["number"], pa.string()), "-")
    if pc.count_distinct(names).as_py() != files.num_rows:
        refuse(source, "lists a file twice")


DATA = "_data"


@dataclass(frozen=True)
class ParquetSink(FileSink):
    """The sink that `holdfast.sinks.parquet` returns."""

    name: str
    url: str
    compression: str = "zstd"
    file_mb: int = 128

    @property
    def folder(self) -> str:
        return f"{DATA}/"

    def open(self, query: SinkQuery, schema: pa.Schema) -> int | None:
        check_columns(schema)
        attempts = self.attempts(query)
        claim(attempts.storage, query, schema)
        return self.target(query, attempts).newest()

    def target(self, query: SinkQuery, attempts: Attempts) -> Manifests:
        return Manifests(attempts.storage, query.sink, query.query_id)
