"""Features whose client is a package that not everybody has."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.distribution import pip_install
from holdfast.errors import InvalidArgumentError


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Say what to install where an import fails.

    Raises
    ------
    InvalidArgumentError
        A package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        raise _missing(name, exc.name) from exc


def require_extra(name: str, package: str) -> None:
    """Say what to install where a package is missing, without importing it.

    Raises
    ------
    InvalidArgumentError
        It is.
    """
    if importlib.util.find_spec(package) is None:
        raise _missing(name, package)


def _missing(name: str, package: str | None) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"this needs a package that is not installed: {pip_install(name)}, on the driver and the executors",
        missing=package,
    )
