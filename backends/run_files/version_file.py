"""The small files of a shard's directory, which list the runs of a version and the runs that a merge replaces."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.backends import local_files
from holdfast.backends.local_files import FileNote, StagedFolder
from holdfast.errors import CorruptionError

VERSION, MERGE = "version", "merge"
_RUN_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")
#: Above any size, count or time; the system rejects larger modification times.
_NUMBER_LIMIT = 1 << 62


@dataclass(frozen=True)
class RunFile:
    """A version's record of one run."""

    id: str
    file_bytes: int  #: Size of the file
    size_bytes: int  #: Size of the columns
    rows: int
    digest: str
    modified_ns: int  #: See `holdfast.backends.local_files`.

    @classmethod
    def decode(cls, record: Mapping[str, Any]) -> RunFile:
        """Decode a record from a version or merge file; the run's id must be a valid file name."""
        file = cls(**record)
        numbers = (file.file_bytes, file.size_bytes, file.rows, file.modified_ns)
        if not _RUN_ID.fullmatch(file.id) or any(type(n) is not int or not 0 <= n < _NUMBER_LIMIT for n in numbers):
            raise ValueError(f"not a run: {ascii(record)[:200]}")
        return file

    @property
    def name(self) -> str:
        """The file's name in every folder that holds it."""
        return f"{self.id}.arrow"

    @property
    def note(self) -> FileNote:
        """What the file must match; a mismatch means that it has changed."""
        return FileNote(self.file_bytes, self.digest, self.modified_ns)


@dataclass(frozen=True)
class VersionFile:
    """The content of a version file."""

    pointer: str
    stacks: Mapping[str, list[RunFile]]  #: Runs by table, oldest first
    properties: Mapping[str, Any]
    generation: str | None = None  #: The floor below the runs, for a backend that has one

    @property
    def files(self) -> list[RunFile]:
        return [file for files in self.stacks.values() for file in files]

    @classmethod
    def read(cls, folder: Path, pointer: str) -> VersionFile:
        """Read the version file of a folder. Raises `NotFoundError`, `CorruptionError`."""
        path = folder / VERSION
        record = local_files.read_header(path, VERSION)
        with _fields_of(path):
            stacks = {table: [RunFile.decode(file) for file in files] for table, files in record["stacks"].items()}
            version = cls(record["pointer"], stacks, record["properties"], record.get("generation"))
            if not isinstance(version.properties, dict):
                raise TypeError("properties are not an object")
            if version.generation is not None and not _RUN_ID.fullmatch(version.generation):
                raise ValueError("not the name of a generation")
        if version.pointer != pointer:
            raise CorruptionError(f"{path} belongs to a different version", pointer=version.pointer, wanted=pointer)
        return version

    def write(self, staged: StagedFolder) -> None:
        """Write the version file; remove all files that it does not list."""
        staged.keep_only({file.name for file in self.files})
        stacks = {table: [asdict(file) for file in files] for table, files in self.stacks.items()}
        header = {"pointer": self.pointer, "stacks": stacks, "properties": dict(self.properties)}
        below = {} if self.generation is None else {"generation": self.generation}
        staged.write(VERSION, VERSION, header | below)


@dataclass(frozen=True)
class MergeFile:
    """A merge file: consecutive runs, and the one run that equals them all."""

    folder: Path
    inputs: list[str]
    output: RunFile

    @classmethod
    def read(cls, folder: Path) -> MergeFile:
        """Read the merge file of a folder. Raises `NotFoundError`, `CorruptionError`."""
        path = folder / MERGE
        record = local_files.read_header(path, MERGE)
        with _fields_of(path):
            merge = cls(folder, [str(run_id) for run_id in record["inputs"]], RunFile.decode(record["output"]))
            if len(merge.inputs) < 2:
                raise ValueError("a merge of fewer than two runs")
            return merge

    @staticmethod
    def write(staged: StagedFolder, inputs: list[str], output: RunFile) -> None:
        """Write the merge file; remove all files but the merged run."""
        staged.keep_only({output.name})
        staged.write(MERGE, MERGE, {"inputs": inputs, "output": asdict(output)})

    def place_in(self, stack: list[RunFile]) -> int | None:
        """Return the position of the inputs in `stack`, or None."""
        ids = [f.id for f in stack]
        if self.inputs[0] not in ids:
            return None
        start = ids.index(self.inputs[0])
        return start if ids[start : start + len(self.inputs)] == self.inputs else None


@contextmanager
def _fields_of(path: Path) -> Iterator[None]:
    """Treat a file with a different release's fields as damaged, so that its version is restored."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as exc:
        raise CorruptionError(f"{path} is not a file that this release of holdfast reads: {exc!r}") from exc
