"""The Parquet backend keeps the promises of all backends and its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from holdfast_parquet import ParquetBackend

from holdfast import clock
from holdfast.backends.registry import find_backend
from holdfast.backends.run import TableSchema
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError, SchemaMismatchError
from holdfast.testing import BackendContract, MakeBackend
from holdfast.testing.state_rows import COUNTS, P1, P2, TABLES, contents, counts, run_of


class TestParquetBackend(BackendContract):
    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        return lambda directory, tables: ParquetBackend(directory, tables, clock.new_id)


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[ParquetBackend]:
    with ParquetBackend(tmp_path / "shard", TABLES, clock.new_id, {"compression": "none"}) as backend:
        backend.apply(None, P1, counts(("ann", 1), ("bob", 2)), {"step": 1})
        yield backend


def test_it_is_found_by_its_name() -> None:
    """The entry point works, so `spark.holdfast.backend=parquet` suffices."""
    assert find_backend("parquet") is ParquetBackend


def test_a_wrong_option_is_refused_before_a_query_starts() -> None:
    """An unknown name or value is an error with a remedy, not replaced by a default."""
    assert ParquetBackend.parse_options("parquet", {"compression": "snappy"}) == {"compression": "snappy"}
    with pytest.raises(InvalidArgumentError, match=r"did you mean spark\.holdfast\.parquet\.compression"):
        ParquetBackend.parse_options("parquet", {"compresion": "snappy"})
    with pytest.raises(InvalidArgumentError, match=r"spark\.holdfast\.parquet\.compression cannot be 'zip'.*zstd"):
        ParquetBackend.parse_options("parquet", {"compression": "zip"})


def test_any_parquet_reader_opens_the_state(backend: ParquetBackend) -> None:
    """The files are plain Parquet with a row per live key."""
    (path,) = [path for path in backend.freeze(P1) if path.suffix == ".parquet"]
    rows = pq.read_table(str(path)).select(["key.user", "value.n"]).to_pylist()
    assert sorted(rows, key=str) == [{"key.user": "ann", "value.n": 1}, {"key.user": "bob", "value.n": 2}]


def test_the_option_arrives(backend: ParquetBackend) -> None:
    """The fixture disables compression."""
    (path,) = [path for path in backend.freeze(P1) if path.suffix == ".parquet"]
    assert pq.read_metadata(path).row_group(0).column(0).compression == "UNCOMPRESSED"


def test_state_of_another_declaration_is_refused(backend: ParquetBackend) -> None:
    """Different columns, or a table that is no longer declared, are an error, not misread rows."""
    other = TableSchema.of("counts", COUNTS.key, pa.schema([("n", pa.string())]))
    for tables in ({"counts": other}, {"members": TABLES["members"]}):
        with (
            ParquetBackend(backend.directory, tables, clock.new_id) as changed,
            pytest.raises(SchemaMismatchError, match="counts"),
        ):
            changed.view(P1)
    assert backend.versions() == [P1]


def test_damage_anywhere_is_noticed_and_set_aside(backend: ParquetBackend) -> None:
    """A flipped bit in any file is an error that names the file; afterwards the version can be restored."""
    state = counts(("ann", 1), ("bob", 2))
    for name in [path.name for path in backend.freeze(P1)]:
        path = next(path for path in backend.freeze(P1) if path.name == name)
        good = path.read_bytes()
        for place in range(0, len(good), max(1, len(good) // 50)):
            path.write_bytes(good[:place] + bytes([good[place] ^ 0x40]) + good[place + 1 :])
            with pytest.raises(CorruptionError, match=name):
                backend.view(P1)
            with pytest.raises(NotFoundError):
                backend.view(P1)
            assert backend.versions() == []
            backend.load(P1, state, {"step": 1})
    with backend.view(P1) as view:
        assert contents(view, "counts") == {("ann",): (1,), ("bob",): (2,)}


def test_nothing_is_built_on_damage(backend: ParquetBackend) -> None:
    """Damaged files are neither frozen nor built upon; the clean-up removes what was set aside."""
    for path in backend.freeze(P1):
        if path.suffix == ".parquet":
            path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptionError):
        backend.freeze(P1)
    assert backend.versions() == []
    backend.load(P1, counts(("ann", 1)), {})
    for path in backend.freeze(P1):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptionError):
        backend.apply(P1, P2, counts(("ann", 3)), {})
    assert backend.versions() == []
    assert backend.remove_leftovers(before_ns=2**63) == 2
    assert not [path for path in backend.directory.rglob("*") if path.is_file()]


def test_a_version_that_lost_a_file_is_not_here_and_is_replaced(backend: ParquetBackend) -> None:
    """A version with a missing file does not read as empty state, and can be restored."""
    for path in backend.freeze(P1):
        if path.suffix == ".parquet":
            path.unlink()
    with pytest.raises(NotFoundError):
        backend.view(P1)
    backend.load(P1, counts(("ann", 1)), {})
    with backend.view(P1) as view:
        assert contents(view, "counts") == {("ann",): (1,)}


def test_a_type_that_parquet_lacks_is_named(tmp_path: Path) -> None:
    """A struct without fields is an error that names the table, and creates no version."""
    table = TableSchema.of("state", pa.schema([("k", pa.int64())]), pa.schema([("v", pa.struct([]))]))
    with ParquetBackend(tmp_path / "shard", {"state": table}, clock.new_id) as backend:
        with pytest.raises(SchemaMismatchError, match=r"Parquet cannot hold.*table=state"):
            backend.apply(None, P1, {"state": run_of(table, [((1,), ({},))])}, {})
        assert backend.versions() == []
