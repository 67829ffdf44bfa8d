"""Local notes of the snapshots that a shard has in durable storage.

``<shard directory>/snapshots/<version>-<commit id>`` tells every process of the executor that this version has a
snapshot, for later commits to build on, and which local files it stored, so that the next snapshot does not send them
again. A lost note costs work, nothing else.

The latest notes are kept, whatever their versions: after a query was set back, the lower versions count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.backends import local_files, stored_file
from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.fields import Fields
from holdfast.snapshotter.lineage import ChainEntry, Lineage
from holdfast.snapshotter.snapshots.manifest import PART_BYTES_MAX, CleanedUp, Manifest, SnapshotFile

_KIND = "snapshot-note"
#: Chains that a running attempt may still shorten end at one of the newest.
_KEPT = 4

#: Identifies a local file: inode, size in bytes and time of modification in ns. Another file of the same name and size
#: differs; a link to it, or the file after its folder was renamed, does not.
Identity = tuple[int, int, int]


def identity_of(path: Path) -> Identity:
    """Return the identity of a local file.

    Raises
    ------
    NotFoundError
        It is not there.
    """
    with local_files.reading(path):
        found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True)
class SnapshotNote:
    """What this executor knows of a snapshot without asking the storage.

    Attributes
    ----------
    entry : ChainEntry
        What names the snapshot.
    files : mapping of Identity to SnapshotFile
        The local files that it has stored.
    part_bytes : int
        Bytes of a file in each of its parts but the last one.
    cleaned : CleanedUp
    written_ms : int
        See `holdfast.snapshotter.snapshots.manifest.Manifest`.
    """

    entry: ChainEntry
    files: Mapping[Identity, SnapshotFile]
    part_bytes: int
    cleaned: CleanedUp
    written_ms: int

    @classmethod
    def read(cls, header: object, source: str) -> SnapshotNote:
        """Return the note that a header holds; raises `CorruptionError`."""
        fields = Fields(header, source, "entry", "files", "part_bytes", "written_ms", "cleaned")
        part_bytes = fields.number("part_bytes", 1, PART_BYTES_MAX + 1)
        return cls(
            ChainEntry.read(fields.inner("entry", *ChainEntry.FIELDS)),
            dict(_read_file(file, part_bytes) for file in fields.each("files", "identity", "file")),
            part_bytes,
            CleanedUp.read(fields.inner("cleaned", *CleanedUp.FIELDS)),
            fields.number("written_ms"),
        )


class SnapshotNotes:
    """The notes of one shard.

    Parameters
    ----------
    folder : pathlib.Path
        Made when the first note is left.
    new_id : callable
        Returns a new unique name each time.
    """

    def __init__(self, folder: Path, new_id: Callable[[], str]) -> None:
        self._folder = folder
        self._new_id = new_id

    def leave(self, entry: ChainEntry, manifest: Manifest, files: Iterable[tuple[Identity, SnapshotFile]]) -> None:
        """Note a snapshot and which local files it stored. Only the latest notes are kept.

        Raises
        ------
        UnavailableError
            Local storage is full or failing.
        """
        stored = [{"identity": identity, "file": asdict(file)} for identity, file in files]
        header = {"entry": entry.to_json(), "files": stored, "part_bytes": manifest.part_bytes}
        header |= {"written_ms": manifest.written_ms, "cleaned": asdict(manifest.cleaned)}
        note, _ = stored_file.encode(_KIND, header)
        with local_files.lock_folder(self._folder.parent), local_files.writing(self._folder):
            local_files.make_private_folder(self._folder)
            older = self._left()
            temporary = self._folder / f".{self._new_id()}"
            try:
                with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(note)
                # The newest, even where the clock was set back.
                left_ns = max(temporary.stat().st_mtime_ns, *(left_ns + 1 for left_ns, _ in older), 0)
                os.utime(temporary, ns=(left_ns, left_ns))
                temporary.rename(self._folder / str(entry.pointer))
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            for _, pointer in sorted(self._left())[:-_KEPT]:
                (self._folder / str(pointer)).unlink(missing_ok=True)

    def _left(self) -> list[tuple[int, Pointer]]:
        """Return when each note was left, in ns, and its version."""
        found = []
        for name in local_files.list_folder(self._folder):
            with suppress(InvalidArgumentError, FileNotFoundError):
                found.append((os.stat(self._folder / name).st_mtime_ns, Pointer.parse(name)))
        return found

    def apply_to(self, lineage: Lineage) -> Lineage:
        """Return a lineage with the newest noted snapshot of its versions."""
        there = {*local_files.list_folder(self._folder)}
        noted = [self._read(pointer) for pointer in lineage.versions if str(pointer) in there]
        entries = {note.entry.pointer: note.entry for note in noted if note is not None}
        return lineage.standing_on(entries) if entries else lineage

    def note_of(self, entry: ChainEntry) -> SnapshotNote | None:
        """Return the note of a snapshot; None if it is gone or belongs to another."""
        note = self._read(entry.pointer)
        return note if note is not None and note.entry == entry else None

    def _read(self, pointer: Pointer) -> SnapshotNote | None:
        """Return the note of a version; None if none is readable."""
        path = self._folder / str(pointer)
        try:
            note = SnapshotNote.read(local_files.read_header(path, _KIND), str(path))
        except (NotFoundError, CorruptionError):
            return None
        return note if note.entry.kind == "snapshot" and note.entry.pointer == pointer else None


def _read_file(fields: Fields, part_bytes: int) -> tuple[Identity, SnapshotFile]:
    inode, size_bytes, modified_ns = fields.integers("identity", 3)
    file = SnapshotFile.read(fields.inner("file", *SnapshotFile.FIELDS), part_bytes)
    return (inode, size_bytes, modified_ns), file
