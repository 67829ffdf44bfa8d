"""Gathers all rows of one shard and micro-batch before its function is called: in memory or, if large, in a file.

Rows are grouped by key, so all of them must have arrived before the first key is called. Beyond `MEMORY_BYTES` they
go to an unlinked file on a local disk and are mapped, so that the operating system can evict their pages. The keys, and
a few numbers per row for sorting, stay in memory.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc as ipc

from holdfast.backends import local_files
from holdfast.spark_integration.executor import local_dirs

MEMORY_BYTES = 128 << 20


def gather_rows(tables: Iterable[pa.Table], schema: pa.Schema, root: Path) -> pa.Table:
    """Return the rows of all tables as one.

    Parameters
    ----------
    tables : iterable of pyarrow.Table
        Of one schema; consumed one at a time.
    schema : pyarrow.Schema
        Of the empty result, if there are no tables.
    root : pathlib.Path
        A directory on disk, the root of local state.

    Returns
    -------
    pyarrow.Table
        With one chunk per column or, if mapped, one per table.

    Raises
    ------
    UnavailableError
        The disk is full or failing.
    """
    tables = iter(tables)
    held: list[pa.Table] = []
    held_bytes = 0
    for table in tables:
        held.append(table)
        held_bytes += table.nbytes
        if held_bytes > MEMORY_BYTES:
            return _mapped(itertools.chain(_given_away(held), tables), table.schema, root)
    return pa.concat_tables(held).combine_chunks() if held else schema.empty_table()


def _given_away(held: list[pa.Table]) -> Iterator[pa.Table]:
    while held:
        yield held.pop(0)


def _mapped(tables: Iterable[pa.Table], schema: pa.Schema, root: Path) -> pa.Table:
    directory = local_dirs.user_directory(root)
    with local_files.writing(directory), tempfile.TemporaryFile(dir=directory) as file:
        with ipc.new_file(file, schema) as writer:
            for table in tables:
                writer.write_table(table.combine_chunks())
        file.flush()
        return ipc.open_file(pa.memory_map(f"/dev/fd/{file.fileno()}")).read_all()
