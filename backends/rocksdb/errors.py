"""Maps rocksdict's exceptions to holdfast's errors, in one place.

rocksdict raises plain `Exception` with RocksDB's status as its message, such as ``Corruption: block checksum
mismatch … in /x/000009.sst offset 0 size 2339`` or ``IO error: No space left on device: While appending to file: …``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import clear_frames

from holdfast.backends.local.errors import out_of_space, unusable
from holdfast.errors import ClosedError, CorruptionError, HoldfastError, UnavailableError

# Damage is "Corruption", or a missing file that the manifest names; a file that cannot be created is not damage.
_DAMAGE = re.compile(
    r"^Corruption|does not exist|"
    r"^IO error: No such file or directory: while \w+ a file for (random read|sequentially reading|size)",
    re.IGNORECASE,
)
_FULL = re.compile(r"No space left|Disk quota exceeded|File too large|space limit reached", re.IGNORECASE)
_HELD = re.compile(r"lock hold by current process|While lock file", re.IGNORECASE)
_FILE = re.compile(r"/(\d+\.(?:sst|log|blob)|MANIFEST-\d+|CURRENT|OPTIONS-\d+|IDENTITY)\b")
# RocksDB adds this guess to every error on opening; the damage may be in a different file.
_GUESS = re.compile(r" *The file \S+ may be corrupted\.")


@contextmanager
def rocksdb_errors(path: Path) -> Iterator[None]:
    """Map rocksdict's errors within the context, for the database at `path`.

    Raises `CorruptionError` with the damaged `file`, `UnavailableError` if local storage fails or the database is
    locked, `ClosedError` after a close.
    """
    try:
        yield
    except Exception as exc:
        if type(exc) is not Exception:
            if type(exc).__name__ == "DbClosedError":
                raise ClosedError(f"the database at {path} was closed: open a new view") from exc
            raise
        # Iterators and snapshots in the traceback's frames would keep the database locked.
        clear_frames(exc.__traceback__)
        raise _mapped(str(exc), path) from exc


def is_full(text: str) -> bool:
    """Return whether an exception's message means that the disk is full."""
    return _FULL.search(text) is not None


def _mapped(text: str, path: Path) -> HoldfastError:
    if _HELD.search(text):
        return UnavailableError(f"another process holds the database at {path}: stop it, or wait for it to end")
    if is_full(text):
        return out_of_space(path, cause=f"RocksDB: {text}")
    if _DAMAGE.search(text):
        found = _FILE.search(_GUESS.sub("", text))
        return damaged(path / found[1] if found else path, text)
    return unusable(path, f"RocksDB: {text}")


def damaged(file: Path, cause: str) -> CorruptionError:
    """Return the error for a damaged database; `file` is the damaged file or, if unknown, the folder."""
    return CorruptionError(
        "a RocksDB database is damaged and was set aside; the next attempt restores its versions from the state "
        "directory, if there is one",
        file=file,
        cause=cause,
    )
