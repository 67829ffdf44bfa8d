"""A file through which the processes of an executor share a claim that one of them made."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from holdfast.backends import local_files
from holdfast.errors import UnavailableError
from holdfast.snapshotter.ownership.claims import Tenure


class ClaimNote:
    """A file with the claim; its modification time is the claim's. Locked while the claim is made or renewed.

    Parameters
    ----------
    path : pathlib.Path
        In a folder that only this user can enter.

    Notes
    -----
    Processes: any number; a lock is released when its process ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def modified_ms(self) -> int | None:
        """Return when the claim was made or renewed; None if there is none."""
        try:
            found, data = self.path.stat(), self.path.read_bytes()
        except FileNotFoundError:
            return None
        return None if _parsed(data) is None else found.st_mtime_ns // 1_000_000

    @contextmanager
    def locked(self) -> Iterator[Tenure | None]:
        """Keep other processes of this executor from claiming or renewing; yields the claim so far.

        Raises
        ------
        UnavailableError
            Local storage is full or failing.
        """
        with self._opened() as file:
            with local_files.writing(self.path):
                fcntl.flock(file, fcntl.LOCK_EX)
                tenure = _parsed(self.path.read_bytes())
                if tenure is None:
                    os.ftruncate(file, 0)
            yield tenure

    @contextmanager
    def locked_if_free(self) -> Iterator[Tenure | None]:
        """Do the same without waiting; yields None where another process has the lock, or nothing is claimed.

        Raises
        ------
        UnavailableError
            Local storage is full or failing.
        """
        with self._opened() as file:
            tenure = None
            with local_files.writing(self.path), suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                tenure = _parsed(self.path.read_bytes())
            yield tenure

    @contextmanager
    def _opened(self) -> Iterator[int]:
        with local_files.writing(self.path):
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield file
        finally:
            os.close(file)

    def write(self, tenure: Tenure) -> None:
        """Record a claim or its renewal as of now; the caller holds the lock.

        Raises
        ------
        UnavailableError
            Local storage is full or failing.
        """
        with local_files.writing(self.path):
            self.path.write_text(json.dumps(asdict(tenure)))

    def tenure(self) -> Tenure:
        """Return the recorded claim.

        Raises
        ------
        UnavailableError
            Local storage is failing, or the note is gone.
        """
        with local_files.writing(self.path):
            found = _parsed(self.path.read_bytes())
        if found is None:  # another process is writing it
            with self.locked() as found:
                pass
        if found is None:
            raise UnavailableError("the note of this run's claim is gone; a retry writes it again", path=str(self.path))
        return found


def _parsed(data: bytes) -> Tenure | None:
    """Return the claim; None if the file is empty or incomplete, because its writer was killed, or damaged."""
    try:
        return Tenure(**json.loads(data))
    except (ValueError, TypeError):
        return None
