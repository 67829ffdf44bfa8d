"""The distribution of this package: its name on PyPI, its version, and its namesake.

On PyPI, ``holdfast`` is an unrelated project whose package has the same name. pip installs both into one folder: the
later one replaces ``holdfast/__init__.py``, and uninstalling either removes it from both.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import ConflictError, InvalidArgumentError

NAME = "holdfast-spark"
#: Defined only here; pyproject.toml reads it.
VERSION = "0.1.0"
NAMESAKE = "holdfast"

_FIRST_MODULE = Path(__file__).with_name("__init__.py")
_FIX = f"pip uninstall {NAMESAKE}, then pip install --force-reinstall --no-deps {NAME}"


def pip_install(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install '{NAME}[{extra}]'"


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Raise `InvalidArgumentError`, naming the extra to install, if an import fails."""
    try:
        yield
    except ModuleNotFoundError as exc:
        raise InvalidArgumentError(
            f"this needs a package that is not installed: {pip_install(name)}, on the driver and the executors",
            missing=exc.name,
        ) from exc


def refuse_old_spark(exc: ImportError) -> None:
    """Raise `ImportError` if PySpark is older than 4.0, in place of Python's error for a missing name."""
    pyspark = sys.modules.get("pyspark")
    version = getattr(pyspark, "__version__", "")
    major = version.partition(".")[0]
    if (exc.name or "").startswith("pyspark.") and major.isdecimal() and int(major) < 4:
        folder = Path(str(getattr(pyspark, "__file__", None))).parent
        raise ImportError(
            f"{NAME} needs Spark 4.0 or later, but this Python has PySpark {version} in {folder}", name=exc.name
        ) from exc


@functools.cache
def require_no_namesake() -> None:
    """Raise `ConflictError` if ``import holdfast`` finds the other project's package; warn if it owns files here."""
    first = sys.modules["holdfast"]
    if not hasattr(first, "_EXPORTS"):
        raise ConflictError(
            f"`import holdfast` finds another project's package, not {NAME}: {_FIX}", module=first.__file__
        )
    if (other := _namesake()) is not None:
        warnings.warn(
            f"{NAMESAKE} {other}, another project, is installed in the folder of {NAME}; upgrading or removing it "
            f"breaks {NAME}: {_FIX}",
            stacklevel=3,
        )


def _namesake() -> str | None:
    """Return the version of the other project's distribution, if it owns this package's first module."""
    from importlib.metadata import distributions

    for found in distributions(name=NAMESAKE):
        owned = (found.locate_file(file) for file in found.files or () if file.name == _FIRST_MODULE.name)
        if any(Path(str(path)).resolve() == _FIRST_MODULE.resolve() for path in owned):
            return found.version
    return None
