"""A fence: numbered objects, each put once. Taking a number ends all work under the previous number.

::

    <folder>/00000000000000000001     driver A begins
    <folder>/00000000000000000002     A decides
    <folder>/00000000000000000003     driver B begins: A's next put, also of number 3, fails

Each step is one object; nothing is checked before a put or undone after it. A process that has read the newest number
may try the next; one attempt succeeds, the others read again::

    for _ in looks(storage.url):
        number, newest = fence.newest()
        ...  # decide on the next object, or raise an error
        with suppress(ConflictError):  # another process was faster: read again
            return fence.take(number + 1, data)

Invariants
----------
* **one successor**: if two processes take the same number, the storage refuses one of them (`put_if_absent`).
* **closed past**: once number n is taken, no other put of n can succeed, even if it is already in flight.
* **newest counts**: old numbers are deleted. A process that sleeps until its next number is free again puts an object
  below the newest; nobody reads that object, and the listing after its put tells the process.

Cost: one list and one get to read the newest object; one put and one list to take the next number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from holdfast.errors import ConflictError, FencedError, NotFoundError
from holdfast.snapshotter.fields import Stored, refuse_stray
from holdfast.snapshotter.storage.object_storage import Buffer, ObjectInfo, ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

T = TypeVar("T")
S = TypeVar("S", bound=Stored)

_DIGITS = 20
#: Each failed attempt means that another process was faster; at most this many are expected to start at once.
_LOOKS = 100
_OLD_KEPT = 16
_NUMBER = re.compile(rf"[0-9]{{{_DIGITS}}}")


class Fence:
    """A sequence of objects in `folder`, as durable as the storage's `put_if_absent`; for any thread."""

    def __init__(self, storage: ObjectStorage, folder: str) -> None:
        self._folder = PrefixedStorage(storage, folder)
        self.url = self._folder.url

    def numbers(self) -> list[int]:
        """Return the stored numbers in order; ignore foreign objects."""
        return sorted(filter(None, (number_of(info.key) for info in self._folder.list(""))))

    def newest(self) -> tuple[int, memoryview | None]:
        """Return the newest number and its object; 0 and None if the fence is empty. Raises `NotFoundError`."""
        number_and_data = read_newest(self._folder, lambda newest, _: (int(newest.key), self._folder.get(newest.key)))
        return number_and_data or (0, None)

    def read(self, number: int) -> memoryview:
        """Return an object. Raises `NotFoundError` if it does not exist or was deleted."""
        return self._folder.get(key_of(number))

    def take(self, number: int, data: Buffer) -> list[int]:
        """Put an object under the number after the newest that the caller has read; return all numbers, in order.

        Raises `FencedError` if the number is taken: the object does not count. Raises `ConflictError` if later numbers
        are taken: the object may count. With a random id in `data`, only one caller succeeds.
        """
        try:
            self._folder.put_if_absent(key_of(number), data)
        except ConflictError as exc:
            raise FencedError("another process was first", number=number, storage=self.url) from exc
        numbers = self.numbers()
        if numbers[-1:] != [number]:
            raise ConflictError("another process has taken this number", number=number, storage=self.url)
        return numbers

    def delete(self, numbers: Iterable[int]) -> None:
        self._folder.delete([key_of(number) for number in numbers])

    @staticmethod
    def old(numbers: Sequence[int]) -> Sequence[int]:
        """Return the numbers to delete if only the newest object matters: usually none, otherwise many at once."""
        return numbers[:-_OLD_KEPT] if len(numbers) >= 2 * _OLD_KEPT else ()


class TypedFence(Fence, Generic[S]):
    """A fence whose objects are values of one class; `expected` gives the fields that all of them share."""

    def __init__(self, storage: ObjectStorage, folder: str, kind: type[S], **expected: object) -> None:
        super().__init__(storage, folder)
        self._kind, self._expected = kind, expected

    def decode(self, number: int, data: Buffer) -> S:
        """Return an object's value. Raises `CorruptionError`."""
        source = f"{self.url}/{key_of(number)}"
        found = self._kind.decode(data, source, **self._expected)
        if (own := getattr(found, "number", number)) != number:
            refuse_stray(source, **self._expected, number=own)
        return found

    def newest_value(self) -> tuple[int, S | None]:
        """Return the newest number and its value; 0 and None if the fence is empty. Raises `CorruptionError`."""
        number, data = self.newest()
        return number, None if data is None else self.decode(number, data)

    def replace(self, number: int, value: S) -> None:
        """Take a number, and delete old objects, since only the newest matters; raises the errors of `take`."""
        if old := self.old(self.take(number, value.encode())):  # many, if two programs alternate
            self.delete(old)


def looks(url: str) -> Iterator[int]:
    """Yield once per attempt to take the next number; raise `ConflictError` after the last."""
    yield from range(_LOOKS)
    raise ConflictError(
        "other processes were first at every attempt: start again, one at a time", looks=_LOOKS, storage=url
    )


def newest_among(infos: Iterable[ObjectInfo]) -> ObjectInfo | None:
    """Return the newest listed object of a fence's folder; ignore foreign objects."""
    return max((info for info in infos if number_of(info.key)), key=lambda info: info.key, default=None)


def read_newest(folder: ObjectStorage, read: Callable[[ObjectInfo, Sequence[ObjectInfo]], T]) -> T | None:
    """Return what `read` returns for a fence's newest object and the listing; None if empty. Raises `NotFoundError`."""
    missing: str | None = None
    while (newest := newest_among(infos := folder.list(""))) is not None:
        try:
            return read(newest, infos)
        except NotFoundError:  # deleted since the listing because a newer one exists, or lost
            if newest.key == missing:
                raise
            missing = newest.key
    return None


def key_of(number: int) -> str:
    """Return the key of a number below its fence's folder."""
    return f"{number:0{_DIGITS}d}"


def number_of(key: str) -> int | None:
    """Return the number of a key below a fence's folder; None for any other key."""
    return int(key) or None if _NUMBER.fullmatch(key) else None
