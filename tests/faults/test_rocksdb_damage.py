"""Damaged, missing and hostile files of generations: an error that names the file, never wrong data.

A shard has two versions: P1 is a generation alone, P2 the same generation with a run above it.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from rocksdict import Options, Rdict

from holdfast import clock
from holdfast.backends.base import Backend, Pointer, View
from holdfast.backends.rocksdb import backend as rocksdb
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.backends.rocksdb.generation import SETTINGS
from holdfast.backends.rocksdb.generation_file import GenerationFile
from holdfast.backends.run import Run, TableSchema
from holdfast.errors import CorruptionError, HoldfastError, NotFoundError
from holdfast.testing.backend_contract import StoredElsewhere
from holdfast.testing.state_rows import (
    COUNTS,
    P1,
    P2,
    P3,
    PAIRS,
    TABLES,
    Row,
    answers,
    contents,
    keys_of,
    run_of,
    users,
)
from tests.damage import flip

ROWS = 3000
OPTIONS = {"compression": "none"}
EVERYONE = [f"user {i}" for i in range(ROWS)]
PAIR_ROWS: list[tuple[Row, Row | None]] = [((i, 0.5, f"n{i % 7}"), (f"note {i}", None)) for i in range(300)]
BEFORE = Pointer(1, "before")


@pytest.fixture(autouse=True)
def everything_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocksdb.RocksDBBackend, "share_bytes", lambda _: 0)


def open_shard(directory: Path, tables: dict[str, TableSchema] = TABLES) -> RocksDBBackend:
    return RocksDBBackend(directory, tables, clock.new_id, OPTIONS)


def first_state() -> dict[str, Run]:
    rows: list[tuple[Row, Row | None]] = [((name,), (i,)) for i, name in enumerate(EVERYONE)]
    return {"counts": run_of(COUNTS, rows), "pairs": run_of(PAIRS, PAIR_ROWS)}


def change() -> dict[str, Run]:
    puts: list[tuple[Row, Row | None]] = [((name,), (-i,)) for i, name in enumerate(EVERYONE[:50])]
    return {"counts": run_of(COUNTS, [*puts, *(((name,), None) for name in EVERYONE[50:60])])}


def expected_counts(pointer: Pointer) -> dict[Row, Row]:
    found: dict[Row, Row] = {(name,): (i,) for i, name in enumerate(EVERYONE)}
    if pointer == P2:
        found |= {(name,): (-i,) for i, name in enumerate(EVERYONE[:50])}
        for name in EVERYONE[50:60]:
            del found[name,]
    return found


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    directory = tmp_path / "original" / "shard"
    with open_shard(directory) as backend:
        backend.load(BEFORE, first_state(), {})
        assert backend.maintain(BEFORE) == 1
        backend.apply(BEFORE, P1, {}, {"step": 1})
        backend.apply(P1, P2, change(), {"step": 2})
        backend.drop([BEFORE])
    assert len(list(directory.glob("generations/*"))) == 1
    return directory


def copy_of(shard: Path, tmp_path: Path) -> Path:
    copy = tmp_path / clock.new_id() / "shard"
    shutil.copytree(shard, copy)
    return copy


def check_reads(view: View, pointer: Pointer) -> None:
    """Each way of reading: all at once, some keys, many keys, prefixes."""
    expected = expected_counts(pointer)
    assert contents(view, "counts") == expected
    assert users(view, *EVERYONE[::97]) == [expected.get((name,)) for name in EVERYONE[::97]]
    assert users(view, *EVERYONE) == [expected.get((name,)) for name in EVERYONE]
    rows = [row for row, _ in PAIR_ROWS]
    assert answers(view, "pairs", keys_of(PAIRS, rows[::3])) == [value for _, value in PAIR_ROWS[::3]]
    assert view.properties == {"step": pointer.version}


def check_frozen(files: list[Path], pointer: Pointer, where: Path) -> None:
    """Frozen files are whole: another shard takes them."""
    folder = where / clock.new_id()
    folder.mkdir()
    for file in files:
        shutil.copy(file, folder / file.name)
    with open_shard(where / clock.new_id() / "shard") as other:
        other.thaw(pointer, folder)
        with other.view(pointer) as view:
            check_reads(view, pointer)


def use(backend: Backend, pointer: Pointer) -> None:
    """What one may do with a version: read, upload, go on, move."""
    with backend.view(pointer) as view:
        check_reads(view, pointer)
    check_frozen(backend.freeze(pointer), pointer, backend.directory.parent)
    new = Pointer(pointer.version + 5, clock.new_id())
    backend.apply(pointer, new, {"counts": run_of(COUNTS, [(("user 99",), None)])}, {})
    backend.maintain(new)
    with backend.view(new) as view:
        assert contents(view, "counts") == {k: v for k, v in expected_counts(pointer).items() if k != ("user 99",)}
    backend.drop([new])


def check_damaged(directory: Path, *, verify: bool) -> str:
    """Use a shard with a damaged file; return how it was noticed. Wrong data fails an assertion."""
    noticed = "never"
    with open_shard(directory) as backend:
        if verify and backend.verify():
            noticed = "verify"
        for pointer in (P1, P2):
            for _ in range(2):
                try:
                    use(backend, pointer)
                except CorruptionError as exc:
                    noticed = "reading" if str(directory) in str(exc) else "an error that names no file"
                    assert pointer not in backend.versions(), "set aside"
                    assert any((directory / "set-aside").iterdir())
                except NotFoundError:
                    assert noticed != "never", "only damage makes a version vanish"
        backend.load(P1, first_state(), {"step": 1})
        with backend.view(P1) as view:
            check_reads(view, P1)
        backend.remove_leftovers(2**63)
        assert not any((directory / "set-aside").iterdir())
    return noticed


def files_of(shard: Path) -> list[Path]:
    return sorted(path.relative_to(shard) for path in shard.glob("generations/*/*") if not path.is_symlink())


@pytest.mark.slow
@pytest.mark.parametrize("verify", [False, True], ids=["read", "verified"])
def test_a_lost_or_cut_file_is_noticed(shard: Path, tmp_path: Path, verify: bool) -> None:
    """Verifying finds it, and a flipped byte too, before anything reads or freezes the file."""
    for file in files_of(shard):
        size = (shard / file).stat().st_size
        for length in (None, 0, size // 2, size - 1, size):
            copy = copy_of(shard, tmp_path)
            if length is None:
                (copy / file).unlink()
            elif length == size:
                flip(copy / file, size // 2)
            else:
                os.truncate(copy / file, length)
            assert check_damaged(copy, verify=verify) == ("verify" if verify else "reading"), (file, length)
            shutil.rmtree(copy.parent)


def move_and_freeze(backend: Backend, pointer: Pointer) -> None:
    """Whether RocksDB reads the damaged table to merge it, or leaves it as it is."""
    backend.maintain(pointer)
    new = Pointer(pointer.version + 1, clock.new_id())
    backend.apply(pointer, new, {}, {})
    backend.drop([pointer])
    backend.freeze(new)


def test_what_is_damaged_is_never_moved_on(shard: Path) -> None:
    """Else it would get a new digest, and be trusted for ever."""
    (table,) = shard.glob("generations/*/*.sst")
    flip(table, 20_000)
    with open_shard(shard) as backend:
        backend.drop([P1])
        with pytest.raises(CorruptionError, match=r"file=\S+\.sst"):
            move_and_freeze(backend, P2)
        assert backend.versions() == []


def test_a_file_that_was_written_to_since_is_verified_again(shard: Path) -> None:
    """It would be stored once more, as it is no longer the file that a snapshot has."""
    (table,) = shard.glob("generations/*/*.sst")
    with open_shard(shard) as backend:
        assert table in backend.freeze(P1)
        verified = table.stat()
        flip(table, 20_000)
        os.utime(table, ns=(verified.st_atime_ns, verified.st_mtime_ns))
        assert table in backend.freeze(P1)  # or each snapshot would read the whole database
        os.utime(table)
        with pytest.raises(CorruptionError, match=str(table)):
            backend.freeze(P1)
        assert backend.versions() == []


def test_damage_of_a_generation_leaves_versions_on_others(shard: Path) -> None:
    """A shard may have several for a while: one of them is set aside, alone."""
    with open_shard(shard) as backend:
        backend.load(P3, {"counts": run_of(COUNTS, [(("bob",), (2,))])}, {})
        (first,) = shard.glob("generations/*")
        (first / "CURRENT").write_text("MANIFEST-999999\n")
        with pytest.raises(CorruptionError, match=str(first)):
            backend.view(P2)
        assert backend.versions() == [P3]
        with backend.view(P3) as view:
            assert users(view, "bob") == [(2,)]


def test_all_views_learn_of_damage(shard: Path) -> None:
    """Other readers of the same generation get an error, not the silence of an iterator."""
    (table,) = shard.glob("generations/*/*.sst")
    with open_shard(shard) as backend:
        first, second = backend.view(P1), backend.view(P2)
        flip(table, 20_000)
        for view in (first, second):
            with pytest.raises(CorruptionError, match=str(table)):
                contents(view, "counts")
            view.close()
        assert backend.versions() == []


# Hostile files.


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def test_planted_pickles_run_no_code(shard: Path, tmp_path: Path) -> None:
    """rocksdict unpickles values unless it is told not to, and may be told by a file that lies beside the data."""
    (home,) = shard.glob("generations/*")
    bomb = pickle.dumps(Bomb(tmp_path / "trace"))
    planted = Rdict(str(home), Options(raw_mode=True))
    for key, _ in list(planted.items()):
        planted[key] = bomb
    planted.flush()
    planted.close()
    (home / "rocksdict-config.json").write_text(json.dumps({"raw_mode": False}))
    with open_shard(shard) as backend:
        for pointer in (P1, P2):
            with pytest.raises(HoldfastError), backend.view(pointer) as view:
                contents(view, "counts")
    assert not (tmp_path / "trace").exists()
    pickle.loads(bomb)
    assert (tmp_path / "trace").exists(), "the bomb works"


def test_rows_of_another_format_count_as_damaged(shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a later release: commits and snapshots stand in for them."""
    with open_shard(shard) as backend:
        frozen = backend.freeze(P2)
    monkeypatch.setattr("holdfast.backends.rocksdb.generation_file.ROWS_FORMAT", 2)
    files = StoredElsewhere(frozen, tmp_path / "elsewhere")
    folder = tmp_path / "frozen"
    folder.mkdir()
    for path in frozen:
        shutil.copyfile(path, folder / path.name)
    refused = pytest.raises(CorruptionError, match="not a file that this release of holdfast reads")
    with open_shard(tmp_path / "empty") as backend:
        with refused, backend.open_frozen(P2, TABLES, files, clock.new_id):
            pass
        with refused:
            backend.thaw(P2, folder)
        assert backend.versions() == []
    with open_shard(shard) as backend:
        with refused:
            backend.view(P2)
        assert backend.versions() == []


def test_local_files_are_private(shard: Path) -> None:
    for path in (shard, *shard.rglob("*")):
        assert path.is_symlink() or path.stat().st_mode & 0o077 == 0, path


def test_a_generation_says_which_files_it_has(shard: Path) -> None:
    """Nothing else lies in its folder, also when it has been read: so all of it is verified."""
    with open_shard(shard) as backend, backend.view(P1) as view:
        check_reads(view, P1)
    (home,) = shard.glob("generations/*")
    assert {path.name for path in home.iterdir()} == {"generation", SETTINGS, *GenerationFile.read(home).files}
