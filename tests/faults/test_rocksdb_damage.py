"""Damaged, missing and hostile local files of the rocksdb backend: an error that names the file, never wrong data."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rocksdict import Options, Rdict

from holdfast import clock
from holdfast.backends.base import Backend, Pointer, View
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.backends.rocksdb.marker import MARKER_KEY, Marker
from holdfast.backends.run import Run, TableSchema
from holdfast.errors import CorruptionError, HoldfastError, NotFoundError, SchemaMismatchError
from holdfast.testing.backend_files_contract import StoredElsewhere
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
    counts,
    keys_of,
    no_counts,
    run_of,
    users,
)
from tests.tiers import cases, repetitions

ROWS = 3000
OPTIONS = {"blockSize": "1k", "compression": "none"}
EVERYONE = [f"user {i}" for i in range(ROWS)]
PAIR_ROWS: list[tuple[Row, Row | None]] = [((i, 0.5, f"n{i % 7}"), (f"note {i}", None)) for i in range(300)]
# Beside the data, and not read when a database is opened.
HARMLESS = ("LOG", "LOG.old", "LOCK", "IDENTITY", "OPTIONS")
_ENTRY_HEADER_BYTES = 7


def open_shard(directory: Path) -> RocksDBBackend:
    return RocksDBBackend(directory, TABLES, clock.new_id, OPTIONS)


def first_state() -> dict[str, Run]:
    return counts(*((name, i) for i, name in enumerate(EVERYONE))) | {"pairs": run_of(PAIRS, PAIR_ROWS)}


def expected_counts(pointer: Pointer) -> dict[Row, Row]:
    found: dict[Row, Row] = {(name,): (i,) for i, name in enumerate(EVERYONE)}
    if pointer == P2:
        found |= {(name,): (-i,) for i, name in enumerate(EVERYONE[:50])}
        for name in EVERYONE[50:60]:
            del found[name,]
    return found


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard closed cleanly: one database with two versions, the older one as undo rows; frozen files."""
    directory = tmp_path_factory.mktemp("rocksdb") / "shard"
    with open_shard(directory) as backend:
        backend.apply(None, P1, first_state(), {"step": 1})
        backend.apply(P1, P2, change(), {"step": 2})
    return directory


def change() -> dict[str, Run]:
    puts: list[tuple[Row, Row | None]] = [((name,), (-i,)) for i, name in enumerate(EVERYONE[:50])]
    return {"counts": run_of(COUNTS, [*puts, *(((name,), None) for name in EVERYONE[50:60])])}


def check_reads(view: View, pointer: Pointer) -> None:
    """Each way of reading: all at once, some keys, many keys, prefixes."""
    expected = expected_counts(pointer)
    assert contents(view, "counts") == expected
    assert users(view, *EVERYONE[::97]) == [expected.get((name,)) for name in EVERYONE[::97]]
    assert users(view, *EVERYONE) == [expected.get((name,)) for name in EVERYONE]
    rows = [row for row, _ in PAIR_ROWS]
    assert answers(view, "pairs", keys_of(PAIRS, rows[::3])) == [value for _, value in PAIR_ROWS[::3]]
    assert view.properties == {"step": pointer.version}


def attempts(backend: Backend, pointer: Pointer) -> Iterator[Callable[[], Any]]:
    """What one may do with a version, from the cheapest read to an upload and the next commit."""

    def read() -> None:
        with backend.view(pointer) as view:
            check_reads(view, pointer)

    def write() -> None:
        new = Pointer(pointer.version + 5, clock.new_id())
        backend.apply(pointer, new, no_counts("user 99"), {})
        with backend.view(new) as view:
            assert contents(view, "counts") == {k: v for k, v in expected_counts(pointer).items() if k != ("user 99",)}

    yield read
    yield lambda: check_frozen(backend.freeze(pointer), pointer, backend.directory.parent)
    yield write
    yield read


def check_frozen(files: list[Path], pointer: Pointer, where: Path) -> None:
    """A frozen copy is a whole database: put among those of another shard it holds the version."""
    home = where / clock.new_id() / "databases" / "copy"
    home.mkdir(parents=True)
    for file in files:
        shutil.copy(file, home / file.name)
    with open_shard(home.parent.parent) as copy, copy.view(pointer) as view:
        assert copy.versions() == [pointer]
        check_reads(view, pointer)


def check_damaged(directory: Path, *, verify: bool, may_vanish: bool = False) -> str:
    """Use a shard with a damaged file; return how it was noticed. Wrong data fails an assertion."""
    noticed = "never"
    with open_shard(directory) as backend:
        if verify and backend.verify():
            noticed = "verify"
        for pointer in (P1, P2):
            for attempt in attempts(backend, pointer):
                try:
                    attempt()
                except CorruptionError as exc:
                    noticed = "reading" if str(directory) in str(exc) else "an error that names no file"
                    assert pointer not in backend.versions(), "set aside"
                    assert any((directory / "set-aside").iterdir())
                except NotFoundError:
                    assert noticed != "never" or may_vanish, "only damage makes a version vanish"
        backend.load(P1, first_state(), {"step": 1})
        with backend.view(P1) as view:
            check_reads(view, P1)
        backend.remove_leftovers(2**63)
        assert not any((directory / "set-aside").iterdir())
    return noticed


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1 << offset % 8
    file.write_bytes(data)


def ends_early(manifest: bytes) -> bool:
    """Tell whether an entry of a list of files claims more bytes than there are.

    RocksDB takes it for the last one, which a power cut has left unfinished, and the list ends before it: versions may
    be missing, as after that power cut.
    """
    at = 0
    while at < len(manifest):
        at += _ENTRY_HEADER_BYTES + int.from_bytes(manifest[at + 4 : at + 6], "little")  # behind a checksum
    return at > len(manifest)


def files_of(shard: Path) -> list[Path]:
    return sorted(p.relative_to(shard) for p in shard.glob("databases/*/*") if p.is_file() and p.stat().st_size)


@pytest.mark.all
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("verify", cases([False, True]), ids=lambda verify: "verified" if verify else "read")
def test_a_flipped_byte_is_noticed_or_harmless(shard: Path, tmp_path: Path, verify: bool) -> None:
    """In every kind of file, at sampled offsets: right answers, or an error that names the file; then restored.

    Of the list of files the last entries may be missing: then so is a version, and no answer is wrong.
    """
    chance = random.Random(verify)
    noticed: Counter[tuple[str, str]] = Counter()
    for file in files_of(shard):
        kind = file.suffix or file.name.split("-")[0]
        size = (shard / file).stat().st_size
        few = range(1) if kind in HARMLESS else repetitions(2, 60)
        for offset in sorted({0, size - 1, *(chance.randrange(size) for _ in few)}):
            copy = tmp_path / "case" / "shard"
            shutil.copytree(shard, copy)
            flip(copy / file, offset)
            may_vanish = kind == "MANIFEST" and ends_early((copy / file).read_bytes())
            noticed[kind, check_damaged(copy, verify=verify, may_vanish=may_vanish)] += 1
            shutil.rmtree(tmp_path / "case")
    assert {how for _, how in noticed} == {"never", "verify" if verify else "reading"}
    assert noticed[".sst", "verify" if verify else "reading"] >= 4
    assert {kind for kind, how in noticed if how != "never"} >= {".sst", "MANIFEST", "CURRENT"}
    assert not any(noticed[kind, how] for kind in HARMLESS for how in ("verify", "reading"))


@pytest.mark.slow
@pytest.mark.all
def test_a_lost_or_cut_file_is_noticed(shard: Path, tmp_path: Path) -> None:
    """Of every kind that a database needs."""
    noticed: Counter[str] = Counter()
    for file in files_of(shard):
        kind = file.suffix or file.name.split("-")[0]
        size = (shard / file).stat().st_size
        for length in (None, 0, size // 2, size - 1) if kind not in HARMLESS else (None, size // 2):
            copy = tmp_path / "case" / "shard"
            shutil.copytree(shard, copy)
            if length is None:
                (copy / file).unlink()
            else:
                os.truncate(copy / file, length)
            noticed[kind] += check_damaged(copy, verify=bool(noticed.total() % 2)) != "never"
            shutil.rmtree(tmp_path / "case")
    assert noticed[".sst"] >= 4
    assert noticed["MANIFEST"]
    assert noticed["CURRENT"]


@pytest.mark.parametrize("verify", [False, True], ids=["read", "verified"])
def test_a_damaged_table_is_named_also_where_rocksdb_does_not(shard: Path, tmp_path: Path, verify: bool) -> None:
    """Damaged properties of a table: RocksDB's error names no table, and guesses at the list of files."""
    copy = tmp_path / "shard"
    shutil.copytree(shard, copy)
    table = max(copy.glob("databases/*/*.sst"), key=lambda file: file.stat().st_size)
    table.write_bytes(table.read_bytes().replace(b"eleted.keys", b"\0leted.keys"))
    with open_shard(copy) as backend:
        if verify:
            assert backend.verify() == [table]
        else:
            with pytest.raises(CorruptionError, match="properties unsorted") as failure:
                backend.versions()
            assert failure.value.facts["file"] == str(table)
        assert not table.exists(), "set aside"


def test_half_a_file_that_a_kill_has_left_is_no_damage(shard: Path, tmp_path: Path) -> None:
    """A flush that did not finish: no version needs its file, which goes when the database is opened."""
    copy = tmp_path / "shard"
    shutil.copytree(shard, copy)
    table = next(copy.glob("databases/*/*.sst"))
    half = table.with_name("000099.sst")
    half.write_bytes(table.read_bytes()[:1000])
    with open_shard(copy) as backend:
        assert backend.verify() == []
        assert not half.exists()
        for pointer in (P1, P2):
            with backend.view(pointer) as view:
                check_reads(view, pointer)


def test_damage_of_one_database_leaves_the_others(tmp_path: Path) -> None:
    """A shard may have several databases for a while: one of them is set aside, alone."""
    with open_shard(tmp_path / "shard") as backend:
        backend.apply(None, P1, counts(("ann", 1)), {})
        (first,) = (tmp_path / "shard" / "databases").iterdir()
        backend.load(P2, counts(("bob", 2)), {})
    (first / "CURRENT").write_text("MANIFEST-999999\n")
    with open_shard(tmp_path / "shard") as backend:
        with pytest.raises(CorruptionError, match=str(first)):
            backend.view(P2)
        assert backend.versions() == [P2]
        with backend.view(P2) as view:
            assert users(view, "bob") == [(2,)]


def test_what_becomes_damaged_while_it_is_open_is_never_frozen(tmp_path: Path) -> None:
    """The disk goes bad under a running process: RocksDB's own copy would succeed and hold the damage."""
    with open_shard(tmp_path / "shard") as backend:
        backend.apply(None, P1, first_state(), {"step": 1})
        backend.maintain(P1)
        (table,) = (tmp_path / "shard" / "databases").glob("*/*.sst")
        flip(table, 20_000)
        with pytest.raises(CorruptionError, match=r"file=\S+\.sst "):
            backend.freeze(P1)
        assert list((tmp_path / "shard" / "frozen").iterdir()) == []
        assert backend.versions() == []
        with pytest.raises(NotFoundError):
            backend.view(P1)
        backend.load(P1, first_state(), {"step": 1})
        check_frozen(backend.freeze(P1), P1, tmp_path)


def test_a_view_of_a_damaged_database_says_so_and_stays_closed(tmp_path: Path) -> None:
    """Other readers of the same database get an error, not the silence of an iterator."""
    with open_shard(tmp_path / "shard") as backend:
        backend.apply(None, P1, first_state(), {"step": 1})
        first, second = backend.view(P1), backend.view(P1)
        (table,) = (tmp_path / "shard" / "databases").glob("*/*.sst")
        flip(table, 20_000)
        with pytest.raises(CorruptionError, match=str(table)):
            contents(first, "counts")
        for view in (first, second):
            with pytest.raises(HoldfastError):
                contents(view, "counts")
            view.close()


# Hostile files.


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def test_planted_pickles_run_no_code(shard: Path, tmp_path: Path) -> None:
    """rocksdict unpickles values unless it is told not to, and may be told by a file that lies beside the data."""
    copy = tmp_path / "shard"
    shutil.copytree(shard, copy)
    (home,) = (copy / "databases").iterdir()
    bomb = pickle.dumps(Bomb(tmp_path / "trace"))
    planted = Rdict(str(home), Options(raw_mode=True))
    for key, _ in list(planted.items()):
        if key != MARKER_KEY:
            planted[key] = bomb
    planted.close()
    for settings in ({"raw_mode": False}, {}):
        (home / "rocksdict-config.json").write_text(json.dumps(settings))
        with open_shard(copy) as backend:
            for pointer in (P1, P2):
                with pytest.raises(HoldfastError), backend.view(pointer) as view:
                    contents(view, "counts")
        if not home.exists():
            shutil.copytree(next((copy / "set-aside").iterdir()), home)
    assert not (tmp_path / "trace").exists()
    pickle.loads(bomb)
    assert (tmp_path / "trace").exists(), "the bomb works"


def test_a_marker_of_another_format_is_refused_and_kept(shard: Path, tmp_path: Path) -> None:
    """A database of a later release is not damaged: it says what to do, and nothing is moved or removed."""
    copy = tmp_path / "shard"
    shutil.copytree(shard, copy)
    (home,) = (copy / "databases").iterdir()
    planted = Rdict(str(home), Options(raw_mode=True))
    marker = Marker.decode(planted[MARKER_KEY], home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.backends.rocksdb.marker.ROWS_FORMAT", 2)
        planted[MARKER_KEY] = marker.encode()
    planted.close()
    for _ in range(2):
        with (
            open_shard(copy) as backend,
            pytest.raises(SchemaMismatchError, match=r"does not read.*format=2 readable=1"),
        ):
            backend.versions()
    assert home.exists()


def test_a_snapshot_of_another_format_is_refused_as_one_that_is_damaged(shard: Path, tmp_path: Path) -> None:
    """It came from durable storage, where commits can stand in for it: no local state needs the newer release."""
    copy = tmp_path / "shard"
    shutil.copytree(shard, copy)
    with open_shard(copy) as backend:
        folder = tmp_path / "frozen"
        folder.mkdir()
        for path in backend.freeze(P2):
            shutil.copyfile(path, folder / path.name)
    planted = Rdict(str(folder), Options(raw_mode=True))
    marker = Marker.decode(planted[MARKER_KEY], folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.backends.rocksdb.marker.ROWS_FORMAT", 2)
        planted[MARKER_KEY] = marker.encode()
    planted.flush()
    planted.close()
    files = StoredElsewhere([path for path in folder.iterdir() if path.name not in HARMLESS], tmp_path / "elsewhere")
    with open_shard(tmp_path / "empty") as backend:
        refused = pytest.raises(CorruptionError, match=r"another release.*format=2 readable=1")
        with refused, backend.open_frozen(P2, TABLES, files, clock.new_id):
            pass
        with refused:
            backend.thaw(P2, folder)
        assert backend.versions() == []


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"counts": COUNTS}, "does not declare.*pairs"),
        (
            {**TABLES, "counts": TableSchema("counts", COUNTS.key, PAIRS.value)},
            r"a different schema.*counts.*value\.n: int64",
        ),
    ],
)
def test_state_of_other_tables_is_refused(
    shard: Path, tmp_path: Path, tables: dict[str, TableSchema], message: str
) -> None:
    """Stored columns that the operator does not declare are neither dropped nor misread."""
    shutil.copytree(shard, tmp_path / "shard")
    with RocksDBBackend(tmp_path / "shard", tables, clock.new_id) as backend:
        for ask in (backend.view, backend.freeze, lambda p: backend.apply(p, P3, {}, {})):
            with pytest.raises(SchemaMismatchError, match=message):
                ask(P2)
    with open_shard(tmp_path / "shard") as backend:
        assert backend.versions() == [P1, P2]


def test_a_table_may_be_added(shard: Path, tmp_path: Path) -> None:
    """A table that was never written is not part of the stored state."""
    shutil.copytree(shard, tmp_path / "shard")
    other = TableSchema.of("another", COUNTS.key, COUNTS.value)
    with RocksDBBackend(tmp_path / "shard", {**TABLES, "another": other}, clock.new_id) as backend:
        backend.apply(P2, P3, {"another": run_of(other, [(("ann",), (7,))])}, {})
        with backend.view(P3) as view, backend.view(P2) as old:
            assert contents(view, "another") == {("ann",): (7,)}
            assert contents(old, "another") == {}
            assert contents(view, "counts") == expected_counts(P2)


def test_local_files_are_private(shard: Path) -> None:
    """State may hold what others must not read, whatever the process's mask is."""
    for path in (shard, *shard.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
