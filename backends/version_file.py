"""What the small files of a shard's directory say: which runs make up a version, and which runs a merge replaces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.backends import local_files
from holdfast.backends.local_files import FileNote, StagedFolder
from holdfast.errors import CorruptionError

VERSION, MERGE = "version", "merge"


@dataclass(frozen=True)
class RunFile:
    """A version's note of one run.

    Attributes
    ----------
    id : str
    file_bytes : int
        Of the file.
    size_bytes : int
        Of the columns.
    rows : int
    digest : str
    modified_ns : int
        See `holdfast.backends.local_files`.
    """

    id: str
    file_bytes: int
    size_bytes: int
    rows: int
    digest: str
    modified_ns: int

    @property
    def name(self) -> str:
        """The file's name in every folder that holds it."""
        return f"{self.id}.arrow"

    @property
    def note(self) -> FileNote:
        """What tells whether the file is still what was written."""
        return FileNote(self.file_bytes, self.digest, self.modified_ns)


@dataclass(frozen=True)
class Version:
    """The content of a version file: runs by table, oldest first, and the version's properties."""

    stacks: Mapping[str, list[RunFile]]
    properties: Mapping[str, Any]

    @property
    def files(self) -> list[RunFile]:
        """All runs."""
        return [file for files in self.stacks.values() for file in files]

    @classmethod
    def read(cls, folder: Path) -> Version:
        """Read the version file of a folder.

        Raises
        ------
        NotFoundError, CorruptionError
        """
        path = folder / VERSION
        record = local_files.read_header(path, VERSION)
        with _fields_of(path):
            stacks = {table: [RunFile(**file) for file in files] for table, files in record["stacks"].items()}
            return cls(stacks, record["properties"])

    def write(self, staged: StagedFolder) -> None:
        """Write the version file; of all other files, only those that it names stay."""
        staged.keep_only({file.name for file in self.files})
        stacks = {table: [asdict(file) for file in files] for table, files in self.stacks.items()}
        staged.write(VERSION, VERSION, {"stacks": stacks, "properties": dict(self.properties)})


@dataclass(frozen=True)
class Merge:
    """The content of a merge file, and where it stands: these consecutive runs equal that one run."""

    folder: Path
    inputs: list[str]
    output: RunFile

    @classmethod
    def read(cls, folder: Path) -> Merge:
        """Read the merge file of a folder.

        Raises
        ------
        NotFoundError, CorruptionError
        """
        path = folder / MERGE
        record = local_files.read_header(path, MERGE)
        with _fields_of(path):
            return cls(folder, [str(run_id) for run_id in record["inputs"]], RunFile(**record["output"]))

    @staticmethod
    def write(staged: StagedFolder, inputs: list[str], output: RunFile) -> None:
        """Write the merge file; of all other files, only the merged run stays."""
        staged.keep_only({output.name})
        staged.write(MERGE, MERGE, {"inputs": inputs, "output": asdict(output)})

    def place_in(self, stack: list[RunFile]) -> int | None:
        """Return where in `stack` the inputs stand, or None."""
        ids = [f.id for f in stack]
        if self.inputs[0] not in ids:
            return None
        start = ids.index(self.inputs[0])
        return start if ids[start : start + len(self.inputs)] == self.inputs else None


@contextmanager
def _fields_of(path: Path) -> Iterator[None]:
    """Local state outlives an upgrade: what another release wrote differently is not readable, and restored."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError) as exc:
        raise CorruptionError(f"{path} does not say what this release of holdfast looks for: {exc!r}") from exc
