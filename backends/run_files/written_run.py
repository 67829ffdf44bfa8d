"""The content of a run file: the stretches of a run, and in the header an index of the stretches.

::

    section     schema ‖ stretch: hashes up to 0x07… ‖ stretch: up to 0x0f… ‖ …
    header      {"table": …}                                      a file with one stretch
                {"table": …, "columns": …, "stretches": [[440, "07…"], [16777960, "0f…"], …]}

The index has each stretch's start and last hash, so that a look-up in a stored file reads only its end and one stretch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Self

import pyarrow as pa
import pyarrow.ipc as ipc

from holdfast.backends.run import Run, join_runs
from holdfast.backends.schema import TableSchema, decode_schema, encode_schema
from holdfast.errors import CorruptionError

#: Size of a stretch, which a look-up of one key reads whole. Each stretch adds microseconds to a look-up of many keys.
STRETCH_BYTES = 16 << 20
_HASH_DIGITS = 16


class WrittenRun:
    """Writes one run file; its header is complete once `write` has returned."""

    def __init__(self, schema: TableSchema) -> None:
        self._schema = schema
        self.header: dict[str, Any] = {"table": schema.name}
        self.rows = self.size_bytes = 0

    def write(self, runs: Iterable[Run], file: pa.NativeFile) -> None:
        """Write runs in order; holds all rows of runs that share a hash."""
        stretches: list[list[Any]] = []
        columns = self._schema.columns.with_metadata({"holdfast.table": self._schema.name})
        with ipc.new_stream(file, columns) as writer:
            for run in self._stretches(runs):
                writer.write_batch(run.batch)
                stretches.append([file.tell() - ipc.get_record_batch_size(run.batch), _last_hash(run)])
        if len(stretches) > 1:
            self.header |= {"columns": encode_schema(self._schema.columns), "stretches": stretches}

    def _stretches(self, runs: Iterable[Run]) -> Iterator[Run]:
        for _, of_hash in groupby((found.projected(self._schema) for found in runs), key=_last_hash):
            run = join_runs(list(of_hash))
            self.rows, self.size_bytes = self.rows + len(run), self.size_bytes + run.size_bytes
            if run.size_bytes <= STRETCH_BYTES:
                yield run  # even an empty run, because a file needs a batch
            else:
                yield from run.stretches(STRETCH_BYTES)


def _last_hash(run: Run) -> str:
    return f"{int(run.hashes[-1]):0{_HASH_DIGITS}x}" if len(run) else ""


@dataclass(frozen=True)
class StretchIndex:
    """The positions of a run file's stretches."""

    columns: pa.Schema
    places: tuple[tuple[int, int], ...]  #: Begin and end of each stretch in the file
    last_hashes: tuple[int, ...] = field(repr=False)

    @classmethod
    def read(cls, header: Mapping[str, Any], section_bytes: int, source: str) -> Self | None:
        """Return the index in a run file's header; None if the file has none. Raises `CorruptionError`."""
        if "stretches" not in header:
            return None
        try:
            begins = [begin for begin, _ in header["stretches"]]
            hashes = [int(text, 16) for _, text in header["stretches"]]
            if any(type(begin) is not int for begin in begins) or not begins[0] >= 0 or begins[-1] >= section_bytes:
                raise ValueError("a stretch lies outside the section")
            if (
                sorted(set(begins)) != begins
                or sorted(set(hashes)) != hashes
                or not 0 <= hashes[0] <= hashes[-1] < 1 << 64
            ):
                raise ValueError("the stretches do not ascend")
            columns = decode_schema(header["columns"])
        except (KeyError, TypeError, ValueError, IndexError, OSError, pa.ArrowException) as exc:
            raise CorruptionError(f"{source} has an invalid index: {exc!r}") from exc
        return cls(columns, tuple(zip(begins, [*begins[1:], section_bytes], strict=True)), tuple(hashes))

    def within(self, first_hash: int, last_hash: int) -> range:
        """Return the numbers of the stretches that may hold rows with hashes in [first_hash, last_hash]."""
        count = len(self.last_hashes)
        return range(
            bisect_left(self.last_hashes, first_hash), min(count, bisect_left(self.last_hashes, last_hash) + 1)
        )
