"""The files of a snapshot, read in place: parts, or ranges of them, on demand.

A part is verified by its digest, so it is read as a whole. Who verifies each block by itself, as RocksDB does, reads
ranges: of a part that holds its bytes as they are, they stand at its begin.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path

from holdfast.backends import local_files
from holdfast.backends.block_io import write_at
from holdfast.backends.frozen_files import FrozenFiles, Place
from holdfast.errors import CorruptionError, NotFoundError
from holdfast.snapshotter.snapshots.manifest import Manifest, Part, SnapshotFile
from holdfast.snapshotter.snapshots.transfer import fetch_part
from holdfast.snapshotter.storage.wrappers import PrefixedStorage


class StoredFiles(FrozenFiles):
    """See the module.

    Parameters
    ----------
    manifest : Manifest
    shard : PrefixedStorage
    folder : pathlib.Path
        Empty, private, and of nobody else.
    executor : concurrent.futures.Executor
        Reads parts side by side; must not run the caller.

    Raises
    ------
    UnavailableError
        Local storage is full or failing.
    """

    def __init__(self, manifest: Manifest, shard: PrefixedStorage, folder: Path, executor: Executor) -> None:
        self.folder = folder
        self.sizes = {file.name: file.size_bytes for file in manifest.files}
        self._files = {file.name: file for file in manifest.files}
        self._part_bytes, self._shard, self._executor = manifest.part_bytes, shard, executor
        self._lock = threading.Lock()
        self._here: set[str] = set()
        for file in manifest.files:
            path = folder / file.name
            with (
                local_files.writing(path),
                open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out,
            ):
                out.truncate(file.size_bytes)
            with local_files.writing(path):
                os.utime(path, ns=(file.modified_ns, file.modified_ns))

    def require(self, name: str, start: int = 0, end: int | None = None) -> None:
        file = self._files[name]
        end = file.size_bytes if end is None else min(end, file.size_bytes)
        with self._lock:
            missing = [piece for piece in self._pieces(file, start, end) if piece[0].key not in self._here]
            with self._writing(file) as out:
                for (part, at, _), data in zip(missing, self._executor.map(self._fetched, missing), strict=True):
                    write_at(out, data, at)
                    self._here.add(part.key)

    def bring(self, places: Sequence[Place]) -> None:
        # What is stored compressed cannot be had in ranges.
        whole: list[Place] = []
        ranges: list[tuple[SnapshotFile, Part, int, Place]] = []
        with self._lock:
            for place in places:
                file = self._files[place.name]
                for part, at, size in self._pieces(file, place.start, min(place.end, file.size_bytes)):
                    piece = Place(place.name, max(place.start, at), min(place.end, at + size))
                    if part.key not in self._here and part.size_bytes <= size:
                        whole.append(piece)
                    elif part.key not in self._here:
                        ranges.append((file, part, at, piece))
            for (file, _, _, piece), data in zip(ranges, self._executor.map(self._range, ranges), strict=True):
                with self._writing(file) as out:
                    write_at(out, data, piece.start)
        for piece in whole:
            self.require(*piece)

    def _fetched(self, piece: tuple[Part, int, int]) -> memoryview:
        part, _, size = piece
        return memoryview(fetch_part(self._shard, part, size))

    def _range(self, wanted: tuple[SnapshotFile, Part, int, Place]) -> memoryview:
        _, part, at, piece = wanted
        try:
            return self._shard.get_range(part.key, piece.start - at, piece.end - at)
        except NotFoundError as exc:
            raise CorruptionError(f"{self._shard.url}/{part.key} is missing, and a snapshot needs it") from exc

    def _pieces(self, file: SnapshotFile, start: int, end: int) -> Iterable[tuple[Part, int, int]]:
        """Return the parts that hold some bytes of a file, with the offset and the size of each."""
        return [
            (part, at, size)
            for index, (part, size) in enumerate(file.sizes_of_parts(self._part_bytes))
            for at in [index * self._part_bytes]
            if at < end and start < at + size
        ]

    @contextmanager
    def _writing(self, file: SnapshotFile) -> Iterator[int]:
        """Open a file and keep its modification time, by which its reader identifies it."""
        path = self.folder / file.name
        with local_files.writing(path), path.open("r+b", buffering=0) as out:
            try:
                yield out.fileno()
            finally:
                os.utime(out.fileno(), ns=(file.modified_ns, file.modified_ns))
