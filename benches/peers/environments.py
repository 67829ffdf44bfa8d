"""An environment of its own for each peer, made on demand from PyPI and kept in the cache.

::

    requirements/<peer>.in          what is wanted; make lock writes
    requirements/<peer>.txt         every version with its hashes
    <cache>/bench-peers/<peer>-<digest of the .txt and of the Python>/

Peers and their dependencies would clash with ours, so none of them is installed beside holdfast.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.spark_integration.java import cache_dir

_REQUIREMENTS = Path(__file__).parent / "requirements"
_READY = ".ready"
_LOG_LINES = 15


@dataclass(frozen=True)
class Environment:
    """Where a peer is installed: about so many MB, for Pythons from the oldest to the newest that it has wheels for."""

    peer: str
    unpacked_mb: int
    pythons: tuple[tuple[int, int], tuple[int, int]]

    @property
    def requirements(self) -> Path:
        """The locked versions."""
        return _REQUIREMENTS / f"{self.peer}.txt"

    @property
    def folder(self) -> Path:
        """Where it is installed, or will be."""
        wanted = self.requirements.read_bytes() + f"\n{sys.implementation.cache_tag} {sys.platform}".encode()
        return cache_dir() / "bench-peers" / f"{self.peer}-{hashlib.sha256(wanted).hexdigest()[:16]}"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def version(self) -> str:
        """Return the locked version of the peer itself, as ``apache-flink 2.1.0``."""
        wanted = self.requirements.with_suffix(".in").read_text().split("\n")
        name = next(line.partition("=")[0] for line in wanted if line and not line.startswith("#"))
        locked = self.requirements.read_text().split("\n")
        return next(line.split(" ")[0].replace("==", " ") for line in locked if line.startswith(f"{name}=="))

    def install(self, tell: Callable[[str], None] = lambda _: None) -> None:
        """Make the environment where it is missing."""
        if (self.folder / _READY).exists():
            return
        oldest, newest = self.pythons
        if not oldest <= sys.version_info[:2] <= newest:
            raise InvalidArgumentError(
                f"{self.peer} has no wheels for this Python; leave its engines out, or take another Python",
                python=_dotted(sys.version_info[:2]),
                oldest=_dotted(oldest),
                newest=_dotted(newest),
            )
        tell(f"installing {self.version()}: about {self.unpacked_mb} MB below {self.folder.parent}")
        _run([sys.executable, "-m", "venv", "--clear", str(self.folder)], self.peer)
        pip = [str(self.python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        # Nothing but the lock: pip would look up the newest version of a package that another one wants with an extra,
        # and refuse it, since the lock has no hash of it. `check` says if the lock lacks something.
        _run([*pip, "install", "--no-deps", "--require-hashes", "-r", str(self.requirements)], self.peer)
        _run([*pip, "check"], self.peer)
        (self.folder / _READY).touch()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _run(command: list[str], peer: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        log = "\n".join((done.stdout + done.stderr).splitlines()[-_LOG_LINES:])
        raise UnavailableError(f"{peer} could not be installed from PyPI:\n{log}")
