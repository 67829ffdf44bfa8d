"""Runs that several tests look at, made once; also those that fail."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

R = TypeVar("R")


class Once(Generic[R]):
    """Results by key."""

    def __init__(self) -> None:
        self._found: dict[Hashable, R | Exception] = {}

    def get(self, key: Hashable, make: Callable[[], R]) -> R:
        """Return what `make` returned for this key, or raise what it raised."""
        if key not in self._found:
            try:
                self._found[key] = make()
            except Exception as exc:  # noqa: BLE001
                self._found[key] = exc
        found = self._found[key]
        if isinstance(found, Exception):
            raise found
        return found
