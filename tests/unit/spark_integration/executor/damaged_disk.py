"""A disk that fails at one path, and nowhere else."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest


def fail_at(damaged: Path, call: str, monkeypatch: pytest.MonkeyPatch, number: int = errno.EIO) -> None:
    """Let a call of the operating system, by its name in `os`, fail at one path."""
    works = getattr(os, call)

    def fail_there(path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, (str, Path)) and Path(path) == damaged:
            raise OSError(number, os.strerror(number), str(path))
        return works(path, *args, **kwargs)

    monkeypatch.setattr(os, call, fail_there)
