"""A file in which the processes of an executor share the state of their run's claim."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from holdfast.backends import local_files
from holdfast.errors import CorruptionError
from holdfast.snapshotter.ownership.claims import Tenure
from holdfast.snapshotter.ownership.stored_claims import Claim
from holdfast.spark_integration.executor.local_dirs import CLAIM_SUFFIX, RUNS, private_directory


class ClaimNote:
    """A note of a run's place in an operator's directory; its modification time says when an executor looked last.

    Parameters
    ----------
    operator_directory : pathlib.Path
        The executor's.
    run_id : str

    Notes
    -----
    Processes: any number; the lock of one is released when it ends. Errors: local storage that is full or failing is an
    UnavailableError.
    """

    def __init__(self, operator_directory: Path, run_id: str) -> None:
        self._path = operator_directory / RUNS / f"{run_id}{CLAIM_SUFFIX}"

    def read(self) -> tuple[Tenure, int] | None:
        """Return the place and when it was looked up; None if no process has yet, or the note is damaged."""
        with local_files.writing(self._path), suppress(FileNotFoundError):
            modified_ms, data = self._path.stat().st_mtime_ns // 1_000_000, self._path.read_bytes()
            with suppress(ValueError, TypeError, KeyError, CorruptionError):
                return _parsed(data), modified_ms
        return None

    @contextmanager
    def locked(self, *, wait: bool) -> Iterator[bool]:
        """Lock out other processes of this executor; yields False if one is at work, unless told to wait."""
        folder = private_directory(self._path.parent)
        with local_files.writing(self._path):
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            is_locked = True
            with local_files.writing(self._path):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    is_locked = False
            yield is_locked
        finally:
            os.close(descriptor)

    def write(self, tenure: Tenure) -> None:
        """Note a place as of now; the caller holds the lock."""
        whole = self._path.with_name(f"{self._path.name}.new")
        with local_files.writing(self._path):
            whole.write_text(json.dumps(asdict(tenure)))
            whole.replace(self._path)


@lru_cache(maxsize=16)  # each call of a shard reads it
def _parsed(data: bytes) -> Tenure:
    noted = json.loads(data)
    return Tenure(**noted | {"claim": Claim.of(noted["claim"], "a run's note")})
