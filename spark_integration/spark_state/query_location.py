"""Reads a query's checkpoint location without Spark.

::

    metadata            {"id": "<query id>"}
    offsets/7           v1
                        {"batchWatermarkMs": …, "batchTimestampMs": …, "conf": {…}}
                        {"logOffset": 3}          each source's end of micro-batch 7, or "-";
                                                  since v2  <name>:{"logOffset": 3}
    commits/7           v1
                        {"nextBatchWatermarkMs": …}
    sources/0/3         source 0's log; for files also 9.compact, with 0 to 9
    state/…             Spark's state, which holds our pointers

A micro-batch counts once it is in both logs. Other file names are leftovers, checksums or files of later releases.

Source: Spark 4.3's ``OffsetSeqLog``, ``CommitLog`` and ``HDFSMetadataLog``, and locations that it wrote.

An earlier log of a file source is rebuilt from later compacted files::

    9.compact   all files of 0 to 9
    10 … 18     the files of each number
    19.compact  all files of 0 to 19       ──▶ the log up to 15: the lines whose "batchId" is at most 15

Source: Spark 4.3's ``CompactibleFileStreamLog`` and ``FileStreamSourceLog``.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.snapshotter.sink_log import plan_of
from holdfast.snapshotter.storage.object_storage import ObjectStorage

COMPACT = ".compact"
_NAME = re.compile(rf"([0-9]{{1,18}})({re.escape(COMPACT)})?")
# Each is cut from the same compacted file.
_SINGLE_FILES_MAX = 1000
_LOG_BYTES_MAX = 256 << 20
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_VERSION = re.compile(r"v[0-9]{1,3}")
#: Names of checksums and of unfinished files.
LEFTOVER = re.compile(r"(^|/)\.[^/]*$|\.(crc|tmp)$")
_NAMED = re.compile(r"([A-Za-z0-9_]+):(.*)", re.DOTALL)
# Files of other programs, such as Hadoop's markers, are not in a source's folder.
_IN_SOURCE = re.compile(r"sources/([A-Za-z0-9_]+)/")
#: The version of an offset log with named sources, and the setting that enables names.
NAMED_SOURCES, NAMED_SOURCES_SETTING = "v2", "spark.sql.streaming.queryEvolution.enableSourceEvolution"


def json_object(text: str) -> dict[str, Any] | None:
    """Parse a JSON object; return None for any other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def number_of(name: str) -> int | None:
    """Return the number of a log file, or None for other files."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def compacted(names: Iterable[str]) -> list[int]:
    """Return the numbers of compacted files, ascending."""
    return sorted(int(name.removesuffix(COMPACT)) for name in names if name.endswith(COMPACT) and _NAME.fullmatch(name))


def first_missing(numbers: set[int], first: int, last: int) -> int | None:
    """Return the first missing number of a range, or None if all exist."""
    if sum(first <= number <= last for number in numbers) > last - first:
        return None
    return next(number for number in itertools.count(first) if number not in numbers)


def names_up_to(end: int, compact_numbers: list[int]) -> list[str]:
    """Return the file names of a log that is cut at a number from later compacted files.

    A file per number below the first compaction; else a compacted file, from which Spark derives the interval.
    """
    *_, before, last = [-1, -1, *compact_numbers]
    if before >= 0 and end + 1 < min(last - before, _SINGLE_FILES_MAX):
        return [str(number) for number in range(end + 1)]
    return [f"{end}{COMPACT}"]


def cut(data: bytes | memoryview, name: str, source: str) -> bytes:
    """Return a log file cut from a later compacted file, `source`. Raises `CorruptionError`."""
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
        number = (json_object(line) or {}).get("batchId")
        if type(number) is not int:
            raise CorruptionError(f"{source} has a line that is not a file of the source: it is damaged")
        if first <= number <= end:
            kept.append(line)
            found.add(number)
    missing = first_missing(found, first, end)
    if missing is not None:
        raise CorruptionError(f"{source} lacks earlier files: it is damaged", number=missing)
    return "\n".join(kept).encode()


@dataclass(frozen=True)
class PlannedOffsets:
    """A micro-batch as Spark logged it before running it."""

    offsets_version: str  #: ``v1`` or ``v2``
    batch: str  #: JSON: watermark, time and pinned settings
    sources: tuple[tuple[str, str], ...]  #: Each source's number or name, and its end offset

    @classmethod
    def parse(cls, text: str, source: str) -> PlannedOffsets:
        """Parse a file of ``offsets/``. Raises `CorruptionError` if it cannot be read."""
        version, batch, *lines = _lines(text, source, 2)
        if not isinstance(_json(batch, source).get("conf"), dict):
            raise _damaged(source, "pins no settings")
        if version != NAMED_SOURCES:
            return cls(version, batch, tuple((str(number), line) for number, line in enumerate(lines)))
        named = [_NAMED.fullmatch(line) for line in lines]
        if not all(named):
            raise _damaged(source, "has a source without a name")
        return cls(version, batch, tuple((match[1], match[2]) for match in named if match))

    @property
    def plan(self) -> str:
        """The text that distinguishes this micro-batch from others with the same number; see `plan_of`."""
        return plan_of(self.batch, self.sources)

    @property
    def conf(self) -> dict[str, Any]:
        """The settings that Spark pinned."""
        found: dict[str, Any] = json.loads(self.batch)["conf"]
        return found


@dataclass(frozen=True)
class LoggedBatch(PlannedOffsets):
    """A committed micro-batch in Spark's logs."""

    batch_id: int
    next_watermark_ms: int
    #: Ids of state stores by operator, for each partition, as logged; empty before version 2 of the log
    unique_ids: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoggedTimes:
    """The times at which a micro-batch was planned and committed, by the store's clock, in ms since 1970."""

    batch_id: int
    planned_ms: int
    committed_ms: int | None  #: None if it is running or failed


class QueryLocation:
    """A query's checkpoint location, which is the root of `storage`."""

    def __init__(self, storage: ObjectStorage) -> None:
        self._storage, self.url = storage, storage.url

    def query_id(self) -> str:
        """Return the query's id. Raises `InvalidArgumentError` if this is not a checkpoint location."""
        try:
            text, source = self._text("metadata")
        except NotFoundError as exc:
            raise InvalidArgumentError(
                "this is not the checkpoint location of a query: it lacks the file metadata", location=self.url
            ) from exc
        found = _json(text, source)
        if not isinstance(found.get("id"), str):
            raise _damaged(source, "names no query")
        query_id: str = found["id"]
        return query_id

    def find_id(self) -> str | None:
        """Return the query's id, or None if this is not a checkpoint location or is damaged."""
        with suppress(InvalidArgumentError, CorruptionError):
            return self.query_id()
        return None

    def committed(self) -> list[int]:
        """Return the committed micro-batches that are still logged, ascending."""
        return sorted(self._numbers("commits/") & self._numbers("offsets/"))

    def times(self) -> list[LoggedTimes]:
        """Return the planning and commit times of the micro-batches that are still logged, ascending by number."""
        planned, committed = self._logged_ms("offsets/"), self._logged_ms("commits/")
        return [LoggedTimes(number, planned[number], committed.get(number)) for number in sorted(planned)]

    def newest_planned(self) -> int | None:
        """Return Spark's last planned micro-batch, committed or not, or None before the first."""
        return max(self._numbers("offsets/"), default=None)

    def batch(self, batch_id: int | None = None) -> LoggedBatch:
        """Return a committed micro-batch, by default the last. Raises `NotFoundError`, `CorruptionError`."""
        committed = self.committed()
        if not committed:
            self.query_id()  # raises a clear error if there is no query
            raise NotFoundError(
                "the query has not committed a micro-batch yet: wait for its first one", location=self.url
            )
        if batch_id is not None and batch_id not in committed:
            raise NotFoundError(
                "this micro-batch is not committed, or Spark has purged it: choose an available one",
                batch_id=batch_id,
                first=committed[0],
                last=committed[-1],
                location=self.url,
            )
        return self.logged(committed[-1] if batch_id is None else batch_id)

    def logged(self, number: int) -> LoggedBatch:
        """Return a micro-batch that is in both logs. Raises `NotFoundError`, `CorruptionError`."""
        offsets, (text, source) = self._offsets(number), self._text(f"commits/{number}")
        _, *committed_lines = _lines(text, source, 1)
        watermark = _json(committed_lines[0] if committed_lines else "{}", source)
        next_watermark_ms = watermark.get("nextBatchWatermarkMs", 0)
        if type(next_watermark_ms) is not int or next_watermark_ms < 0:
            raise _damaged(source, "has an invalid watermark")
        unique_ids = watermark.get("stateUniqueIds") or {}
        if not isinstance(unique_ids, dict):
            raise _damaged(source, "names invalid state")
        return LoggedBatch(**vars(offsets), batch_id=number, next_watermark_ms=next_watermark_ms, unique_ids=unique_ids)

    def planned(self, number: int) -> PlannedOffsets | None:
        """Return a planned micro-batch, committed or not, or None if Spark has not planned it or has purged it."""
        try:
            return self._offsets(number)
        except NotFoundError:
            return None

    def _offsets(self, number: int) -> PlannedOffsets:
        return PlannedOffsets.parse(*self._text(f"offsets/{number}"))

    def kept_sources(self, sources: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
        """Return the sources that have a folder, and the offset up to which the folder's files count.

        A source that a plan reads twice, as in ``df.union(df)``, has two lines in the log but one folder, so that later
        folders have lower numbers than their lines. The log does not show which line repeats, so files count up to
        the latest offset.
        """
        repeated = len(sources) - len({offset for _, offset in sources})
        ends = {name: end for name, offset in sources if (end := self._log_offset(offset)) is not None}
        if not (repeated and ends):
            return sources
        newest = self._newest_files()
        last = max(ends.values())
        is_one_each = all(newest.get(name, -1) >= end for name, end in ends.items())
        if is_one_each or len(ends.keys() - newest.keys()) > repeated or max(newest.values(), default=-1) < last:
            return sources
        return [(name, json.dumps({"logOffset": min(last, newest[name])})) for name, _ in sources if name in newest]

    def _newest_files(self) -> dict[str, int]:
        newest: dict[str, int] = {}
        for info in self._storage.list("sources/"):
            source, _, name = info.key.removeprefix("sources/").partition("/")
            if (number := number_of(name)) is not None:
                newest[source] = max(newest.get(source, -1), number)
        return newest

    def source_logs(self, source: str, offset: str) -> list[str]:
        """Return the paths of a source's files up to an offset, including files that Spark has since compacted."""
        folder = f"sources/{source}/"
        names = [info.key.removeprefix(folder) for info in self._storage.list(folder)]
        names = [name for name in names if not LEFTOVER.search(name)]
        end = self._log_offset(offset)
        if end is None:
            return names
        found = {name: number for name in names if (number := number_of(name)) is not None}
        wanted = {name: number for name, number in found.items() if number <= end}
        whole = compacted(found)
        newest = max((number for number in whole if number <= end), default=-1)
        missing = first_missing(set(wanted.values()), newest + 1, end)
        if missing is None:
            return sorted(wanted, key=lambda name: (wanted[name], name))
        in_folders = filter(None, (_IN_SOURCE.match(info.key) for info in self._storage.list("sources/")))
        if not names and not all(_NUMBER.fullmatch(match[1]) for match in in_folders):
            raise InvalidArgumentError(
                "the query's sources have names, but its log of micro-batches does not: Spark 4.2 writes them with "
                "spark.sql.streaming.offsetLog.formatVersion=2, set before the query's first start",
                source=source,
                location=self.url,
            )
        if whole and whole[-1] > end:
            return names_up_to(end, whole)
        raise UnavailableError(
            "Spark's log of a source has a gap: if the query runs, try again",
            source=source,
            missing=missing,
            location=self.url,
        )

    def source_log(self, source: str, name: str) -> memoryview:
        """Return a source's file, even if Spark compacted it. Raises `NotFoundError`, `CorruptionError`."""
        folder = f"sources/{source}/"
        try:
            return self._storage.get(folder + name, _LOG_BYTES_MAX)
        except NotFoundError:
            number = number_of(name)
            names = (info.key.removeprefix(folder) for info in self._storage.list(folder))
            later = [one for one in compacted(names) if number is not None and one > number]
            if not later:
                raise
            key = f"{folder}{later[0]}{COMPACT}"
            data = self._storage.get(key, _LOG_BYTES_MAX)
            return memoryview(cut(data, name, f"{self.url}/{key}"))

    def _log_offset(self, offset: str) -> int | None:
        number = (json_object(offset) or {}).get("logOffset")
        return number if type(number) is int else None

    def _numbers(self, folder: str) -> set[int]:
        return set(self._logged_ms(folder))

    def _logged_ms(self, folder: str) -> dict[int, int]:
        """Return the time at which each micro-batch was logged."""
        names = {info.key.removeprefix(folder): info.modified_ms for info in self._storage.list(folder)}
        return {int(name): modified_ms for name, modified_ms in names.items() if _NUMBER.fullmatch(name)}

    def _text(self, key: str) -> tuple[str, str]:
        """Return a file's text, and the file's name for errors."""
        source = f"{self.url}/{key}"
        try:
            return bytes(self._storage.get(key, _LOG_BYTES_MAX)).decode(), source
        except UnicodeDecodeError as exc:
            raise _damaged(source, "is not text") from exc


def _lines(text: str, source: str, least: int) -> list[str]:
    """Return the lines of a log, at least `least`; the first is the version."""
    lines = [line for line in text.split("\n") if line]
    if len(lines) < least or not _VERSION.fullmatch(lines[0]):
        raise _damaged(source, "is cut off, or does not begin with a version")
    return lines


def _json(text: str, source: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise _damaged(source, "is not JSON") from exc
    if not isinstance(found, dict):
        raise _damaged(source, "is not a JSON object")
    return found


def _damaged(source: str, what: str) -> CorruptionError:
    return CorruptionError(f"{source} {what}: it is damaged, or of a later release of Spark")
