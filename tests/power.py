"""A process that is killed at any of its changes to storages, played by an exception."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import WrappedStorage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Buffer

    from holdfast.snapshotter.storage.object_storage import ObjectStorage

NEVER = 10_000


class Killed(BaseException):
    """As if the process had been killed: nothing of it that is left does anything."""


class Power:
    """Is cut off when a driver is about to change the storage for the n-th time, counted from 0."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.changes = 0

    def open(self, url: str, options: Mapping[str, object]) -> ObjectStorage:
        return _Powered(open_storage(url, options), self)

    def change(self) -> None:
        if self.changes >= self.after:
            raise Killed
        self.changes += 1

    def stops(self) -> range:
        """Return after how many changes to stop it the next time: the last one removes the mark of what was made."""
        assert self.changes > 2, "a mark, what it is for, and the mark's end"
        return range(self.changes - 1)


class _Powered(WrappedStorage):
    def __init__(self, inner: ObjectStorage, power: Power) -> None:
        super().__init__(inner)
        self._power = power

    def put(self, key: str, data: Buffer) -> None:
        self._power.change()
        super().put(key, data)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._power.change()
        super().put_if_absent(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        for key in list(keys):  # one at a time, so that it stops between two
            self._power.change()
            super().delete([key])
