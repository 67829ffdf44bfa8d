"""Stored reads: what is stored comes back, anything else is refused, and old ones go."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast.backends import stored_file
from holdfast.backends.base import Pointer
from holdfast.backends.column_names import ColumnChanges
from holdfast.backends.run import TableSchema
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.stored_reads import ReadDirectory, ReadShard, StoredRead, fetch_read, store_read

STATE = TableSchema.of("state", pa.schema([("user", pa.string())]), pa.schema([("n", pa.int64())]))
WIDER = TableSchema.of("state", STATE.key, pa.schema([("n", pa.int64()), ("m", pa.int64())]))
PLAIN = StoredTables.of_first_run({"state": STATE})
RENAMED = StoredTables.of_first_run({"state": WIDER}).with_changes(
    {"state": ColumnChanges(frozenset({"m"}), {"n": "total"})}
)
READ = StoredRead(
    "totals",
    {
        "totals": ReadDirectory(4, RENAMED),
        "totals@5d1f": ReadDirectory(4, PLAIN),
    },
    (
        ReadShard("totals", 0, Pointer(7, "aa"), b"carried"),
        ReadShard("totals", 3, Pointer(8, "bb"), None),
        ReadShard("totals@5d1f", 3, Pointer(8, "cc"), b"x"),
    ),
)


def test_what_is_stored_comes_back(tmp_path: Path) -> None:
    with open_storage(str(tmp_path)) as storage:
        read_id = store_read(storage, "totals", READ)
        assert fetch_read(storage, "totals", read_id) == READ


def test_those_of_yesterday_go(tmp_path: Path) -> None:
    """And nothing else that lies there."""
    with open_storage(str(tmp_path)) as storage:
        old, young = store_read(storage, "totals", READ), store_read(storage, "totals", READ)
        (tmp_path / "totals/reads/thesis.tex").write_text("years of work")
        for name in (old, "thesis.tex"):
            path = tmp_path / "totals/reads" / name
            os.utime(path, (path.stat().st_mtime - 90_000,) * 2)
        new = store_read(storage, "totals", READ)
        assert {path.name for path in (tmp_path / "totals/reads").iterdir()} == {young, new, "thesis.tex"}
        with pytest.raises(NotFoundError, match=r"call holdfast\.state again"):
            fetch_read(storage, "totals", old)


@pytest.mark.parametrize(("directory", "read_id"), [("totals/..", "0" * 16), ("totals", "../operator"), ("", "0" * 16)])
def test_names_lead_nowhere_else(tmp_path: Path, directory: str, read_id: str) -> None:
    with open_storage(str(tmp_path)) as storage, pytest.raises(InvalidArgumentError, match="not the name of a read"):
        fetch_read(storage, directory, read_id)


def _shard(header: dict[str, Any], **values: Any) -> None:
    header["shards"][1] |= values


ALTERED: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("belongs elsewhere", lambda header: header.update(operator="pairs")),
    ("other fields", lambda header: header.update(more=1)),
    ("invalid field", lambda header: _shard(header, shard=-1)),
    ("invalid field", lambda header: _shard(header, pointer="../../x")),
    ("does not have", lambda header: _shard(header, shard=4)),
    ("does not have", lambda header: _shard(header, directory="totals@other")),
    ("a shard twice", lambda header: _shard(header, shard=0)),
    ("does not hold what", lambda header: _shard(header, carries=True)),
    ("sections that no shard has", lambda header: header["shards"].pop()),
    ("another operator", lambda header: header["directories"].update({"..": header["directories"]["totals"]})),
    ("no directory", lambda header: header.update(directories={}, shards=[])),
    ("other tables", lambda header: header["directories"]["totals"].update(latest={})),
    ("cannot be read", lambda header: header["directories"]["totals"]["held"].update(state=["a", "b"])),
    ("invalid field", lambda header: header["directories"]["totals"].update(shards=0)),
]


@pytest.mark.parametrize(("said", "alter"), ALTERED)
def test_what_cannot_be_is_refused(said: str, alter: Callable[[dict[str, Any]], object]) -> None:
    """With a right checksum: it proves that a file is whole, not who wrote it."""
    whole = stored_file.decode(READ.encode(), source="x", kind="read")
    header: dict[str, Any] = dict(whole.header)
    alter(header)
    sections = {name: (lambda file, data=data: file.write(data)) for name, data in whole.sections.items()}
    data = stored_file.encode("read", header, {} if said == "no directory" else sections)[0]
    with pytest.raises(CorruptionError, match=said):
        StoredRead.decode(memoryview(data), "totals", "x")


def test_every_flipped_byte_is_noticed() -> None:
    data = READ.encode().to_pybytes()
    for at in range(0, len(data), 97):
        altered = bytearray(data)
        altered[at] ^= 1
        with pytest.raises(CorruptionError):
            StoredRead.decode(memoryview(bytes(altered)), "totals", "x")
