"""What tests of the `rocksdb` backend share: shards, all ways of reading them, and kills at a chosen place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import clock
from holdfast.backends.base import Pointer, View
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.backends.rocksdb.writes import RowWriter
from holdfast.testing.state_rows import (
    COUNTS,
    TABLES,
    Row,
    contents,
    keys_of,
    users,
)

State = dict[Row, Row]


def open_shard(directory: Path) -> RocksDBBackend:
    return RocksDBBackend(directory, TABLES, clock.new_id)


def abandon(backend: RocksDBBackend) -> None:
    """End a backend as a kill would, as far as its own doing goes."""
    for database in backend._shard.opened:
        database.abandon()
    backend._shard.opened.clear()
    backend.close()


def databases(backend: RocksDBBackend) -> list[Path]:
    return sorted((backend.directory / "databases").iterdir())


def check(view: View, state: State) -> None:
    """All ways of reading agree with a dictionary."""
    assert contents(view, "counts") == state
    everyone = [f"u{i}" for i in range(40)]
    for some in (everyone, everyone[::7]):
        assert users(view, *some) == [state.get((name,)) for name in some]
    prefixes = keys_of(COUNTS, [(name,) for name in everyone[::3]])
    found = {key: value for run in view.scan_prefix("counts", prefixes) for key, value in rows(run)}
    assert found == {key: value for key, value in state.items() if key[0] in everyone[::3]}


def rows(run: Any) -> Iterator[tuple[Row, Row]]:
    for key, value in zip(run.keys.column(0).to_pylist(), run.values.column(0).to_pylist(), strict=True):
        yield (key,), (value,)


def check_frozen(backend: RocksDBBackend, pointer: Pointer, model: dict[Pointer, State]) -> None:
    home = backend.directory.parent / f"copy-{clock.new_id()}" / "databases" / "copy"
    home.mkdir(parents=True)
    for file in backend.freeze(pointer):
        os.link(file, home / file.name)
    with open_shard(home.parent.parent) as copy, copy.view(pointer) as view:
        check(view, model[pointer])


def fail_in_batch(monkeypatch: pytest.MonkeyPatch, fail_at: int, flush: bool = False) -> None:
    write, numbers = RowWriter._write, iter(range(1000))

    def fail(writer: RowWriter, marker: bytes | None) -> None:
        if next(numbers) == fail_at:
            if flush:
                writer._database.flush()
            raise MemoryError
        write(writer, marker)

    monkeypatch.setattr(RowWriter, "_write", fail)
