"""Files to durable storage and back, as parts transferred in parallel.

A part is an object of its own (`holdfast.snapshotter.snapshots.manifest`), so this needs no more of a storage than
whole objects. Memory is bounded: each thread of the executor holds one part.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from pathlib import Path
from typing import TypeVar

import lz4.frame
import pyarrow as pa

from holdfast.backends import local_files, stored_file
from holdfast.backends.block_io import read_at, write_at
from holdfast.backends.local.errors import out_of_space
from holdfast.errors import CorruptionError, NotFoundError, UnavailableError
from holdfast.snapshotter.snapshots.manifest import PART_KIND, Part, SnapshotFile, number_of_parts, read_part
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

_SAMPLE_BYTES = 64 << 10
# RocksDB's tables, already compressed, would shrink by 5 %, at half of an upload's CPU time.
_WORTH_FRAMING = 0.8
_Result = TypeVar("_Result")


def upload_files(
    paths: Iterable[Path],
    part_bytes: int,
    shard: PrefixedStorage,
    executor: Executor,
    new_id: Callable[[], str],
) -> list[SnapshotFile]:
    """Store local files, and return where their bytes are.

    Raises `UnavailableError`, `NotFoundError` or `InvalidArgumentError` if the storage failed, or a file is gone.
    Stored parts stay; no manifest names them.

    Parameters
    ----------
    part_bytes : int
        Bytes of a file in each part but the last.
    shard : PrefixedStorage
        Receives the parts.
    """
    stats = {}
    # Reused: allocating memory costs more than all other work on a part.
    buffers: list[bytearray] = []
    futures: dict[Path, list[Future[Part]]] = {}
    for path in paths:
        with local_files.reading(path):
            stats[path] = os.stat(path)
        file_id = new_id()

        def send(index: int, path: Path = path, file_id: str = file_id) -> Part:
            key = f"files/{file_id}-{index}"
            buffer = _one_of(buffers, part_bytes + stored_file.END_BYTES_MAX)
            offset = index * part_bytes
            size_bytes = min(part_bytes, stats[path].st_size - offset)
            data, digest = _encode_part(path, offset, size_bytes, shard.prefix, buffer)
            shard.put(key, data)
            buffers.append(buffer)
            return Part(key, len(data), digest)

        parts = range(number_of_parts(stats[path].st_size, part_bytes))
        futures[path] = [executor.submit(send, index) for index in parts]
    _finish([future for parts in futures.values() for future in parts])
    return [
        SnapshotFile(path.name, stats[path].st_size, stats[path].st_mtime_ns, tuple(f.result() for f in parts))
        for path, parts in futures.items()
    ]


def _one_of(buffers: list[bytearray], size_bytes: int) -> bytearray:
    try:
        return buffers.pop()
    except IndexError:  # all are in use
        return bytearray(size_bytes)


def _encode_part(path: Path, offset: int, plain_bytes: int, shard: str, buffer: bytearray) -> tuple[memoryview, str]:
    """Read a part of a file into a buffer, and make a stored file of it there."""
    data = memoryview(buffer)[:plain_bytes]
    with local_files.reading(path), path.open("rb", buffering=0) as file:
        found_bytes = read_at(file.fileno(), data, offset)
    if found_bytes < plain_bytes:
        raise UnavailableError(
            f"{path} was cut while it was stored: keep other programs from writing to that directory",
            end_bytes=offset + found_bytes,
        )
    size_bytes, encoding = plain_bytes, "plain"
    sample = data[:_SAMPLE_BYTES]
    if len(lz4.frame.compress(sample)) < _WORTH_FRAMING * len(sample):
        framed = lz4.frame.compress(data)
        if len(framed) < size_bytes:
            size_bytes, encoding = len(framed), "lz4"
            data[:size_bytes] = framed
    header = {"shard": shard, "name": path.name, "offset": offset}
    return stored_file.encode_in_place(buffer, size_bytes, PART_KIND, header, "data", encoding, plain_bytes)


def download_files(
    files: Iterable[SnapshotFile], part_bytes: int, shard: PrefixedStorage, folder: Path, executor: Executor
) -> None:
    """Download files; sizes and checksums are verified.

    Raises `CorruptionError` if a part is missing, or is not what was stored; the message names it; `UnavailableError`
    if local storage is full or failing, or the storage did not answer.

    Parameters
    ----------
    part_bytes : int
        Bytes of a file in each of its parts but the last one.
    folder : pathlib.Path
        Empty, and of no use to anybody before this returns.
    """
    files = list(files)
    _require_room(files, shard, folder)
    futures: list[Future[None]] = []
    for file in files:
        path = folder / file.name
        with local_files.writing(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as opened:
                opened.truncate(file.size_bytes)
        for index, (part, size_bytes) in enumerate(file.sizes_of_parts(part_bytes)):

            def receive(
                path: Path = path, part: Part = part, at: int = index * part_bytes, size: int = size_bytes
            ) -> None:
                data = fetch_part(shard, part, size)
                with local_files.writing(path), path.open("r+b") as out:
                    write_at(out.fileno(), data, at)

            futures.append(executor.submit(receive))
    _finish(futures)
    for file in files:
        with local_files.writing(folder / file.name):
            os.utime(folder / file.name, ns=(file.modified_ns, file.modified_ns))


def fetch_part(shard: PrefixedStorage, part: Part, size_bytes: int) -> pa.Buffer:
    """Return the bytes of a file that a part holds.

    Raises `CorruptionError` if the part is missing, or is not what was stored.

    Parameters
    ----------
    size_bytes : int
        How many they must be.
    """
    source = f"{shard.url}/{part.key}"
    try:
        data = shard.get(part.key, part.size_bytes)
    except NotFoundError as exc:
        raise CorruptionError(f"{source} is missing, and a snapshot needs it") from exc
    if len(data) != part.size_bytes:
        raise CorruptionError(f"{source} was cut or altered", size_bytes=len(data), expected=part.size_bytes)
    stored = read_part(data, shard.prefix, source, plain_bytes=size_bytes)
    if stored.digest != part.digest:
        raise CorruptionError(f"{source} is not the object that the snapshot names: it was replaced")
    return stored.section("data", source)


def _require_room(files: Iterable[SnapshotFile], shard: PrefixedStorage, folder: Path) -> None:
    """Raise if files of this size are impossible, or local storage has no room for them."""
    wanted_bytes = sum(file.size_bytes for file in files)
    with local_files.writing(folder):
        free_bytes = shutil.disk_usage(folder).free
    if wanted_bytes <= free_bytes:
        return
    stored = {info.key: info.size_bytes for info in shard.list("files/")}
    for part in (part for file in files for part in file.missing(stored.get)):
        raise CorruptionError(
            f"{shard.url}/{part.key} is missing, or has a different size than the snapshot says",
            size_bytes=stored.get(part.key),
            expected=part.size_bytes,
        )
    raise out_of_space(folder, wanted_bytes=wanted_bytes, free_bytes=free_bytes)


def _finish(futures: list[Future[_Result]]) -> None:
    """Wait for all; where one fails, cancel those that have not begun, wait for the rest and raise what went wrong."""
    wait(futures, return_when=FIRST_EXCEPTION)
    for future in futures:
        future.cancel()
    wait(futures)
    for future in futures:
        if not future.cancelled():
            future.result()
