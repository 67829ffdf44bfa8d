"""Features that need a package from an extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.distribution import pip_install
from holdfast.errors import InvalidArgumentError


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Say what to install if an import fails. Raises `InvalidArgumentError` if a package is missing."""
    try:
        yield
    except ModuleNotFoundError as exc:
        raise InvalidArgumentError(
            f"this needs a package that is not installed: {pip_install(name)}, on the driver and the executors",
            missing=exc.name,
        ) from exc
