"""Reads files of Spark's ``RocksDBStateStoreProvider``: databases by version, and later changes.

::

    state/0/3/                          operator 0, partition 3
        6.zip                           version 6: MANIFEST, CURRENT, logs, and ``metadata``
        SSTs/000008-a10c….sst           a table of the database, named in ``metadata``
        7.changelog, 8.changelog        changes of micro-batches, if Spark writes changelogs
        8_4f1b….changelog               the same if stores have ids; lists the preceding versions

    metadata        v1
                    {"sstFiles": [{"localFileName": "000008.sst", "dfsSstFileName": "000008-a10c….sst", …}],
                     "columnFamilyMapping": {"holdfast_pointer": 2, …}, …}

Version 8 is the newest database up to 8 with all later changes applied. Column families are virtual: each key starts
with its family's number, 2 bytes, little endian. Pointers are small, so a database is copied to and opened in a
temporary folder.

Source: Spark 4.3's ``RocksDBFileManager`` and ``RocksDBStateEncoder``, and locations that it wrote.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import re
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocksdict import AccessType, Options, Rdict

from holdfast.backends import local_files
from holdfast.backends.local.errors import out_of_space
from holdfast.backends.rocksdb.errors import is_full
from holdfast.errors import CorruptionError, NotFoundError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.executor.takeover import working_directory
from holdfast.spark_integration.spark_state.row_streams import (
    ROW_BYTES,
    SIZED_CHECKSUM,
    Named,
    Rows,
    require_few,
    stream_of,
    too_much,
    verified,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

_METADATA, _METADATA_BEGIN = "metadata", b"v1\n"
#: Names of a database's files, and of its tables in Spark's storage; files with other names are ignored.
_IN_ZIP = re.compile(r"MANIFEST-[0-9]{1,20}|CURRENT|[0-9]{1,20}\.log")
_TABLE, _STORED_TABLE = re.compile(r"[0-9]{1,20}\.sst"), re.compile(r"[0-9A-Za-z-]{1,100}\.sst")
_FAMILY_NUMBER_BYTES = 2
#: Errors of a damaged ZIP archive, or of JSON in it with an unexpected form.
_NO_ARCHIVE = (
    *(ValueError, TypeError, KeyError, AttributeError, RecursionError),
    *(NotImplementedError, EOFError, RuntimeError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile),
)


def read_rows(
    partition: ObjectStorage,
    at: Named,
    codec: str,
    family: str | None,
    limit_bytes: int,
    *,
    has_checksums: bool = False,
) -> Rows:
    """Return the rows of a version, with its checksums verified; `limit_bytes` bounds each file and all rows."""
    found = {info.key for info in partition.list("")}
    base, changes = _begin(partition, at, codec, found, limit_bytes, has_families=family is not None)
    rows, families = _database(partition, base, limit_bytes) if base is not None else ({}, {})
    for change in changes:
        stream = stream_of(partition, f"{change}.changelog", codec, limit_bytes, has_checksums=has_checksums)
        stream.apply_changelog_to(rows)
        require_few(rows, limit_bytes, partition.url)
    prefix = b""
    if family is not None:
        if family not in families:
            return {}
        prefix = families[family].to_bytes(_FAMILY_NUMBER_BYTES, "little")
    wanted = {key: value for key, value in rows.items() if key.startswith(prefix)}
    if has_checksums:  # which cover whole keys
        wanted = verified(wanted, SIZED_CHECKSUM, partition.url)
    return {key[len(prefix) :]: value for key, value in wanted.items()}


def _begin(
    partition: ObjectStorage, at: Named, codec: str, found: set[str], limit_bytes: int, *, has_families: bool
) -> tuple[Named | None, list[Named]]:
    """Return the base database, or None if empty, and later changes; only a database names column families."""
    if f"{at}.zip" in found or at.version == 0:
        return (at if at.version else None), []
    before: Iterable[Named]
    if at.unique_id is None:
        before = (Named(number) for number in range(at.version - 1, -1, -1))
    else:
        before = reversed(stream_of(partition, f"{at}.changelog", codec, limit_bytes).lineage())
    changes = [at]
    for older in before:
        if f"{older}.zip" in found:
            return older, changes[::-1]
        if older.version == 0 or f"{older}.changelog" not in found:
            break
        changes.append(older)
    if changes[-1].version != 1 or has_families:
        raise NotFoundError(
            "Spark has purged this version of its state, or has not made it", file=f"{partition.url}/{at}.zip"
        )
    return None, changes[::-1]


def _database(partition: ObjectStorage, at: Named, limit_bytes: int) -> tuple[Rows, dict[str, int]]:
    source = f"{partition.url}/{at}.zip"
    with working_directory() as folder:
        archive = bytes(partition.get(f"{at}.zip", limit_bytes))
        tables, families = _unpack(archive, folder, source, limit_bytes)
        left_bytes = limit_bytes
        for local, stored in tables.items():
            try:
                data = partition.get(f"SSTs/{stored}", left_bytes)
            except NotFoundError as exc:
                raise NotFoundError("Spark has purged this version of its state", file=source, table=stored) from exc
            left_bytes -= len(data)
            _write(folder / local, data)
        return _rows_of(str(folder), source, limit_bytes), families


def _rows_of(folder: str, source: str, limit_bytes: int) -> Rows:
    options = Options(raw_mode=True)
    try:
        database = Rdict(folder, options, {"default": options}, AccessType.read_only())
        try:
            following = database.iter()
            following.seek_to_first()
            rows: Rows = {}
            left_bytes = limit_bytes
            while following.valid():
                key, value = following.key(), following.value()
                rows[key] = value
                left_bytes -= max(len(key) + len(value), ROW_BYTES)
                if left_bytes < 0:
                    raise too_much(source, limit_bytes=limit_bytes)
                following.next()
            following.status()
            del following
            return rows
        finally:
            database.close()
    except Exception as exc:
        if type(exc) is not Exception:
            raise
        if is_full(str(exc)):
            raise out_of_space(Path(folder), cause=f"RocksDB: {exc}") from exc
        raise CorruptionError(f"{source} holds no readable database: {exc}") from exc


def _unpack(data: bytes, folder: Path, source: str, limit_bytes: int) -> tuple[dict[str, str], dict[str, int]]:
    """Write a database's files from a ZIP archive; return the database's tables and column families."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(info.file_size for info in archive.infolist()) > limit_bytes:
                raise ValueError("it holds more than Spark stores there")
            for info in archive.infolist():
                if _IN_ZIP.fullmatch(info.filename):
                    _write(folder / info.filename, archive.read(info))
            text = archive.read(_METADATA)
        if not text.startswith(_METADATA_BEGIN):
            raise ValueError("its metadata has a format other than v1")
        metadata = json.loads(text.removeprefix(_METADATA_BEGIN))
        tables = {
            _checked(_TABLE, file["localFileName"]): _checked(_STORED_TABLE, file["dfsSstFileName"])
            for file in metadata["sstFiles"]
        }
        if len(set(tables.values())) < len(metadata["sstFiles"]):
            raise ValueError("it names a table twice")
        return tables, {str(name): _number(number) for name, number in metadata.get("columnFamilyMapping", {}).items()}
    except _NO_ARCHIVE as exc:
        raise CorruptionError(f"{source} is not a database that Spark wrote: {exc!r}") from exc


def _write(path: Path, data: Buffer) -> None:
    private = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with local_files.writing(path), open(os.open(path, private, 0o600), "wb") as file:
        file.write(data)


def _checked(name: re.Pattern[str], text: Any) -> str:
    if not isinstance(text, str) or not name.fullmatch(text):
        raise ValueError(f"invalid file name {ascii(text)[:80]}")
    return text


def _number(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 1 << (8 * _FAMILY_NUMBER_BYTES - 1):
        raise ValueError("not the number of a column family")
    return number
