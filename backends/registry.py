"""Backends by name: the built-in ones and those of other distributions."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from holdfast.backends.base import CONTRACT_VERSION, Backend
from holdfast.backends.options import nearest_name
from holdfast.errors import InvalidArgumentError

GROUP = "holdfast.backends"
# Not entry points of this distribution: shipped to executors as plain files it has no metadata there.
_BUILT_IN = (
    EntryPoint("filesystem", "holdfast.backends.run_files.filesystem:FilesystemBackend", GROUP),
    EntryPoint("memory", "holdfast.backends.run_files.memory:MemoryBackend", GROUP),
    EntryPoint("rocksdb", "holdfast.backends.rocksdb.backend:RocksDBBackend", GROUP),
)


def backend_names() -> list[str]:
    """Return the names that `find_backend` knows."""
    return sorted({point.name for point in _points()})


def _points() -> list[EntryPoint]:
    return [*_BUILT_IN, *entry_points(group=GROUP)]


@lru_cache
def find_backend(name: str) -> type[Backend]:
    """Return the backend class registered under `name`; looked up once in a process.

    Raises
    ------
    InvalidArgumentError
        There is none, two distributions claim the name, or what is registered is not a usable backend.
    """
    points = {point.value: point for point in _points() if point.name == name}
    if not points:
        known = backend_names()
        near = nearest_name(name, known)
        hint = f"did you mean {near!r}? " if near else ""
        raise InvalidArgumentError(
            f"no backend named {name!r}: {hint}known are {', '.join(known)}; a plug-in registers under the "
            f"entry point group {GROUP!r}"
        )
    if len(points) > 1:
        raise InvalidArgumentError(
            f"several distributions register a backend named {name!r}: uninstall all but one",
            classes=sorted(points),
        )
    return _load(next(iter(points.values())))


def _load(point: EntryPoint) -> type[Backend]:
    try:
        found = point.load()
    except (ImportError, AttributeError) as exc:
        raise InvalidArgumentError(f"backend {point.name!r} cannot be loaded from {point.value!r}: {exc}") from exc
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise InvalidArgumentError(f"backend {point.name!r} is not a subclass of Backend: {point.value!r}")
    lacking = sorted(getattr(found, "__abstractmethods__", ()))
    if lacking:
        raise InvalidArgumentError(
            f"backend {point.name!r} lacks methods of the contract: {', '.join(lacking)}; add them to the class",
            registered=point.value,
        )
    built_for = getattr(found, "contract_version", None)
    if built_for != CONTRACT_VERSION:
        raise InvalidArgumentError(
            f"backend {point.name!r} was built for another version of the backend contract: install the release "
            "of it that fits, and see that its class states contract_version",
            built_for=built_for,
            wanted=CONTRACT_VERSION,
            registered=point.value,
        )
    return found
