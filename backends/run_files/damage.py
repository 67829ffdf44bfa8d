"""Damaged files of a shard on run files: finding them, and setting aside every folder that holds one.

A run file that is damaged is damaged wherever it is linked, so every version and merge that holds it is set aside. What
is set aside is no longer here, and the next attempt restores it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from holdfast.backends import local_files
from holdfast.backends.run_files.version_file import MERGE, VERSION, MergeFile, RunFile, VersionFile
from holdfast.errors import CorruptionError, NotFoundError

_log = logging.getLogger(__name__)


class DamagedRuns:
    """Checks the folders of one shard.

    `versions` and `merges` hold the folders that are checked; one with a damaged file goes to `set_aside`.
    """

    def __init__(self, versions: Path, merges: Path, set_aside: Path, new_id: Callable[[], str]) -> None:
        self._versions, self._merges, self._set_aside = versions, merges, set_aside
        self._new_id = new_id

    def check(self, path: Path, file: RunFile) -> None:
        """Read a whole run file. Raises `NotFoundError`, `CorruptionError`."""
        try:
            local_files.map_stored_file(path, "run", file.note, verify=True)
        except CorruptionError:
            self.set_aside_holders(file)
            raise

    def set_aside_holders(self, file: RunFile) -> None:
        """Move the versions and merges that hold a run out of the way: one file, with a link in each."""
        folders = [p / name for p in (self._versions, self._merges) for name in local_files.list_folder(p)]
        self.set_aside(folder for folder in folders if (folder / file.name).exists())

    def set_aside(self, folders: Iterable[Path]) -> list[Path]:
        """Move folders out of the way; return those that were still there."""
        moved = []
        for folder in folders:
            if local_files.move_folder(folder, self._set_aside / f"{self._new_id()}-{folder.name}"):
                _log.warning("set aside %s, which holds a damaged file", folder)
                moved.append(folder)
        return moved

    def verify(self) -> list[Path]:
        """Read every file of the shard, set aside what holds a damaged one, and return the damaged files."""
        damaged: list[Path] = []
        checked: set[str] = set()
        for parent, read in ((self._versions, _files_of_version), (self._merges, _files_of_merge)):
            for name in local_files.list_folder(parent):
                damaged += self._verify_folder(parent / name, read, checked)
        return damaged

    def _verify_folder(self, folder: Path, read: Callable[[Path], list[RunFile]], checked: set[str]) -> list[Path]:
        try:
            files = read(folder)
        except (NotFoundError, CorruptionError):
            # Gone where it held a damaged run that was found in another folder.
            note = folder / (VERSION if folder.parent == self._versions else MERGE)
            return [note] if self.set_aside([folder]) else []
        damaged = []
        for file in files:
            path = folder / file.name
            if not path.exists():
                damaged += [path] if self.set_aside([folder]) else []
            elif file.id not in checked:
                checked.add(file.id)
                try:
                    self.check(path, file)
                except CorruptionError:
                    damaged.append(path)
        return damaged


def _files_of_version(folder: Path) -> list[RunFile]:
    return VersionFile.read(folder, folder.name).files


def _files_of_merge(folder: Path) -> list[RunFile]:
    return [MergeFile.read(folder).output]
