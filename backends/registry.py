"""Finds backend classes by name: built-in ones and plug-ins of other distributions."""

from __future__ import annotations

import pkgutil
from functools import lru_cache

from holdfast.backends.base import CONTRACT_VERSION, Backend
from holdfast.backends.options import did_you_mean
from holdfast.errors import InvalidArgumentError

GROUP = "holdfast.backends"
# Not looked up as entry points: plain files shipped to executors have no metadata. pyproject.toml registers them, too.
_BUILT_IN = {
    "filesystem": "holdfast.backends.run_files.backend:FilesystemBackend",
    "memory": "holdfast.backends.run_files.memory:MemoryBackend",
    "rocksdb": "holdfast.backends.rocksdb.backend:RocksDBBackend",
}


def backend_names() -> list[str]:
    """Return the names that `find_backend` accepts."""
    return sorted({*_BUILT_IN, *(name for name, _ in _plug_ins())})


def _plug_ins() -> set[tuple[str, str]]:
    """Return the name and class path of every registered entry point."""
    # Imported on demand: a worker with a built-in backend neither loads it nor reads all distributions' metadata.
    from importlib.metadata import entry_points

    return {(point.name, f"{point.module}:{point.attr}") for point in entry_points(group=GROUP)}


@lru_cache
def find_backend(name: str) -> type[Backend]:
    """Return the backend class registered under a name; built-ins take precedence. Raises `InvalidArgumentError`."""
    if name in _BUILT_IN:
        return _load(name, _BUILT_IN[name])
    points = [point for plug_in, point in _plug_ins() if plug_in == name]
    if not points:
        known = backend_names()
        raise InvalidArgumentError(
            f"no backend named {name!r}{did_you_mean(name, known) or ';'} known names: {', '.join(known)}; a plug-in "
            f"registers under the entry point group {GROUP!r}"
        )
    if len(points) > 1:
        raise InvalidArgumentError(
            f"several distributions register a backend named {name!r}: uninstall all but one", classes=sorted(points)
        )
    return _load(name, points[0])


def _load(name: str, point: str) -> type[Backend]:
    try:
        found = pkgutil.resolve_name(point)
    except (ImportError, AttributeError) as exc:
        raise InvalidArgumentError(f"backend {name!r} cannot be loaded from {point!r}: {exc}") from exc
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise InvalidArgumentError(f"backend {name!r} is not a subclass of Backend: {point!r}")
    built_for = getattr(found, "contract_version", None)
    lacking = sorted(getattr(found, "__abstractmethods__", ()))
    if lacking and built_for in (None, CONTRACT_VERSION):
        raise InvalidArgumentError(
            f"backend {name!r} does not implement methods of the contract: {', '.join(lacking)}; add them to the class",
            registered=point,
        )
    if built_for != CONTRACT_VERSION:
        raise InvalidArgumentError(
            f"backend {name!r} was built for a different version of the backend contract: install a matching release, "
            "whose class sets contract_version",
            built_for=built_for,
            wanted=CONTRACT_VERSION,
            registered=point,
        )
    return found
