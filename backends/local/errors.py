"""Maps operating-system errors to holdfast's, for all code that touches the local disk."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import NotFoundError, UnavailableError

#: The settings that name the directory of local state.
NAMED_IN = "spark.holdfast.local.dir (for a look-up, in SPARK_LOCAL_DIRS or TMPDIR)"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Map operating-system errors while `path` is read; a missing file raises `NotFoundError`."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise NotFoundError(f"{path} does not exist") from exc
    except OSError as exc:
        raise _mapped(exc, path) from exc


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Map operating-system errors while `path` is written; all become `UnavailableError`."""
    try:
        yield
    except OSError as exc:
        raise _mapped(exc, path) from exc


def _mapped(exc: OSError, path: Path) -> UnavailableError:
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return out_of_space(path)
    # Arrow's errors have a message but no errno.
    if exc.errno == errno.ENOMEM or os.strerror(errno.ENOMEM) in str(exc):
        return no_address_space(path)
    if isinstance(exc, FileNotFoundError):
        return vanished(path)
    return unusable(path, exc.strerror or str(exc))


def out_of_space(path: Path, **facts: object) -> UnavailableError:
    """Return the error for a full local disk."""
    return UnavailableError(
        f"no space left for local state at {path}: free space, or set a larger directory in {NAMED_IN}", **facts
    )


def no_address_space(path: Path) -> UnavailableError:
    """Return the error for a file that cannot be mapped."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return UnavailableError(
        f"local state at {path} cannot be mapped into memory: unset spark.executor.pyspark.memory, which limits the "
        "address space of Python workers, or give the machine more memory",
        limit_bytes=None if limit == resource.RLIM_INFINITY else limit,
    )


def unusable(path: Path, cause: str) -> UnavailableError:
    """Return the error for other failures of local storage."""
    return UnavailableError(
        f"local state at {path} cannot be used ({cause}): check that the directory exists and is writable, or set a "
        f"different directory in {NAMED_IN}"
    )


def vanished(path: Path) -> UnavailableError:
    """Return the error for a file or folder that disappeared while it was written."""
    return UnavailableError(
        f"{path} vanished while it was written: keep other programs from cleaning that directory, or set a "
        f"different directory in {NAMED_IN}"
    )
