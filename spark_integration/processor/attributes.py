"""Warns of a processor that keeps state in its attributes: they are gone when the call of its shard ends."""

from __future__ import annotations

import warnings
from functools import cached_property
from typing import Any

from pyspark.sql.streaming.stateful_processor import StatefulProcessor

_CONTAINERS = (dict, list, set, bytearray)
_ABSENT = object()
#: The classes of which this process has warned.
_warned: set[str] = set()


class AttributeWatch:
    """Compares a processor's attributes before and after its calls.

    What ``init`` makes, such as a cache, may fill. A container that the processor came with may not: whoever fills it
    expects to find it filled.

    Parameters
    ----------
    processor : StatefulProcessor
        Before its ``init``.
    """

    def __init__(self, processor: StatefulProcessor) -> None:
        self._processor = processor
        self._came_with = self._attributes()
        self._before: dict[str, Any] = {}
        self._sizes: dict[str, int] = {}

    def begin(self) -> None:
        """Note the attributes as ``init`` has left them."""
        self._before = self._attributes()
        self._sizes = {
            name: len(value)
            for name, value in self._before.items()
            if value is self._came_with.get(name) and isinstance(value, _CONTAINERS)
        }

    def warn_of_changes(self) -> None:
        """Warn if they have changed, once in this process for each class of processors."""
        owner, changed = type(self._processor), self._changed()
        name = f"{owner.__module__}.{owner.__qualname__}"
        if not changed or name in _warned:
            return
        _warned.add(name)
        warnings.warn(
            f"{owner.__name__} has changed its attributes while it handled rows or timers: {', '.join(changed)}. They "
            "will be gone in the next micro-batch: keep them in a state variable, or make them in init if they are a "
            "cache",
            stacklevel=2,
        )

    def _changed(self) -> list[str]:
        after = self._attributes()
        bound_anew = [
            name
            for name in {**self._before, **after}
            if after.get(name, _ABSENT) is not self._before.get(name, _ABSENT)
            and not isinstance(getattr(type(self._processor), name, None), cached_property)
        ]
        grown = [name for name, size in self._sizes.items() if name not in bound_anew and len(after[name]) != size]
        return bound_anew + grown

    def _attributes(self) -> dict[str, Any]:
        return dict(vars(self._processor))
