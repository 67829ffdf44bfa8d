"""A file source's log as it was, rebuilt from later compacted files.

::

    9.compact   every file of 0 to 9
    10 … 18     the files of that number
    19.compact  every file of 0 to 19      ──▶ the log up to 15: those of its lines whose "batchId" is at most 15

A log has a file for each time that new files of the source were found. Each tenth, or as often as Spark is set to,
holds all before it too, and some time later Spark deletes these. Spark itself finds lines of deleted files so.

Source: Spark 4.3's ``CompactibleFileStreamLog`` and ``FileStreamSourceLog``.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable

from holdfast.errors import CorruptionError

COMPACT = ".compact"
_NAME = re.compile(rf"([0-9]{{1,18}})({re.escape(COMPACT)})?")
_VERSION = re.compile(r"v[0-9]{1,3}")
# Each is cut from the same file of all.
_SINGLE_FILES_MAX = 1000


def number_of(name: str) -> int | None:
    """Return the number of a log file; None for other files."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def compacted(names: Iterable[str]) -> list[int]:
    """Return the numbers of compacted files, ascending."""
    return sorted(int(name.removesuffix(COMPACT)) for name in names if name.endswith(COMPACT) and _NAME.fullmatch(name))


def first_missing(numbers: set[int], first: int, last: int) -> int | None:
    """Return the first missing number in a range; None if all exist."""
    if sum(first <= number <= last for number in numbers) > last - first:
        return None
    return next(number for number in itertools.count(first) if number not in numbers)


def names_up_to(end: int, compact_numbers: list[int]) -> list[str]:
    """Return the names of the files that make up a log up to a number, from later compacted files.

    One for each number below the first that Spark would have compacted; else one file of all, from which Spark derives
    how often to compact.
    """
    *_, before, last = [-1, -1, *compact_numbers]
    if before >= 0 and end + 1 < min(last - before, _SINGLE_FILES_MAX):
        return [str(number) for number in range(end + 1)]
    return [f"{end}{COMPACT}"]


def cut(data: bytes | memoryview, name: str, source: str) -> bytes:
    """Return a log file, cut from a later compacted one.

    Parameters
    ----------
    data : bytes-like
        The later one.
    name : str
        Of the file to make.
    source : str
        What to call the later one in an error.

    Raises
    ------
    CorruptionError
        It is no log, or does not hold all that it should.
    """
    is_compact, end = name.endswith(COMPACT), number_of(name)
    assert end is not None
    first = 0 if is_compact else end
    try:
        version, *lines = bytes(data).decode().split("\n")
    except UnicodeDecodeError as exc:
        raise CorruptionError(f"{source} is not text: it is damaged") from exc
    if not _VERSION.fullmatch(version):
        raise CorruptionError(f"{source} does not begin with a version: it is damaged")
    kept, found = [version], set[int]()
    for line in filter(None, lines):
        number = _number_of_line(line, source)
        if first <= number <= end:
            kept.append(line)
            found.add(number)
    missing = first_missing(found, first, end)
    if missing is not None:
        raise CorruptionError(f"{source} lacks the files of an earlier time: it is damaged", number=missing)
    return "\n".join(kept).encode()


def _number_of_line(line: str, source: str) -> int:
    try:
        number = json.loads(line)["batchId"]
    except (ValueError, TypeError, KeyError, RecursionError):
        number = None
    if type(number) is not int:
        raise CorruptionError(f"{source} has a line that is not a file of the source: it is damaged")
    return number
