"""Every stored format that was released opens for ever, savepoints included; see FORMAT.md."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc as ipc
import pytest
from pyspark.sql import SparkSession

from holdfast import savepoints
from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, UnavailableError
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator, read_operator
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.retention import run_retention
from holdfast.snapshotter.upkeep.troubles import report_trouble
from holdfast.testing.state_rows import COUNTS
from tests.formats import sample
from tests.formats.savepoint_samples import CASES, keys
from tests.fuzz.forge import digest_of, resealed, with_header
from tests.fuzz.hostile_files import SHARD, Shard
from tests.model.shard_history import ShardHistory
from tests.spark.conftest import Lab
from tests.spark.conftest import configured as placed
from tests.spark.parity.engines import configured
from tests.spark.savepoints import waiting
from tests.tiers import cases
from tests.unit.holdfast.commands.conftest import age, document, files, put_record
from tests.unit.snapshotter.conftest import Shard as SmallShard
from tests.unit.snapshotter.ownership.conftest import claimant, take, take_after

SAMPLES = sorted(p for p in Path(__file__).parent.iterdir() if p.name.startswith("format-"))


@pytest.fixture(params=SAMPLES, ids=lambda p: p.name)
def sample_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a copy of a sample: reading must not need to write, and must not change the original."""
    return Path(shutil.copytree(request.param, tmp_path / "sample"))


def test_there_is_a_sample() -> None:
    """The other tests here test something."""
    assert SAMPLES


def test_an_old_directory_restores_the_same(
    sample_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Snapshot, commits, a delete and an all-null value, with every kind of column, read as they were written."""
    pointer = Pointer.parse((sample_folder / "pointer").read_text().strip())
    with ThreadPoolExecutor(2) as threads:
        log = ObjectCommitLog(open_storage(str(sample_folder)), sample.SHARD, sample.TABLES, threads, tmp_path)
        with log.restore(pointer) as restored:
            pass
    assert caplog.text == "", "nothing was taken for damaged"
    assert [e["kind"] for e in restored.properties["chain"]] == ["snapshot", "commit", "commit"]
    run = restored.runs["state"]
    rows = {key["user"]: value for key, value in zip(run.keys.to_pylist(), run.values.to_pylist(), strict=True)}
    nothing = dict.fromkeys(sample.VALUE.names)
    assert rows == {None: sample.value(3), "": nothing, "dan": sample.value(2)}
    assert run.hashes.tolist() == [5, 7, 2**63]


def test_an_old_operator_record_still_admits_its_query(sample_folder: Path) -> None:
    """A query that began with that release goes on with this one."""
    record = OperatorRecord(sample.OPERATOR, "query", "another definition", "another run", 1, sample.TABLES, 7)
    declare_operator(open_storage(str(sample_folder)), record)


def test_a_commit_opens_as_an_arrow_stream(sample_folder: Path) -> None:
    """Anyone with an Arrow library reads state without holdfast."""
    for path in (sample_folder / sample.SHARD / "commits").iterdir():
        table = ipc.open_stream(path).read_all()
        assert table.schema.names[:4] == ["hash", "deleted", "key.user", "key.amount"]


SAVEPOINT_SAMPLES = sorted(
    (folder, name)
    for folder in Path(__file__).parent.iterdir()
    if folder.name.startswith("savepoints-")
    for name in CASES
)


def ids(value: object) -> str:
    return value.name if isinstance(value, Path) else str(value)


def test_there_is_a_sample_of_each_api() -> None:
    assert {name for _, name in SAVEPOINT_SAMPLES} == set(CASES)
    assert SAVEPOINT_SAMPLES


@pytest.mark.parametrize(("folder", "name"), SAVEPOINT_SAMPLES, ids=ids)
def test_an_old_savepoint_is_whole_and_opens_with_pyarrow(folder: Path, name: str) -> None:
    """State, timers in both orders, and rows that expire: one of each key."""
    assert savepoints.verify(folder, name) == []
    found = savepoints.read(folder, name)
    assert {listed.name for listed in savepoints.listed(folder) if listed.savepoint} == set(CASES)
    (operator,) = found.operators
    assert set(operator.rows.values()) == {len(waiting.KEYS)}
    assert {"timers", "timers_by_due"} < set(operator.rows)
    table = next(table for table in operator.rows if table.split(".")[-1] in ("counts", "state"))
    pieces = [ipc.open_stream(folder / name / piece.key).read_all() for piece in operator.of_table(table)]
    rows = pa.concat_tables(pieces).sort_by("key.key")
    assert rows["key.key"].to_pylist() == list(waiting.KEYS)
    assert rows["value.n"].to_pylist() == [1] * len(waiting.KEYS)


@pytest.mark.spark
@pytest.mark.smoke
@pytest.mark.parametrize(("folder", "name"), cases(SAVEPOINT_SAMPLES), ids=ids)
def test_a_query_goes_on_from_an_old_savepoint(spark: SparkSession, tmp_path: Path, folder: Path, name: str) -> None:
    """Each key's timer, which was overdue, fires with the key's state."""
    copied = shutil.copytree(folder, tmp_path / "savepoints")
    case, lab = CASES[name], Lab(spark, tmp_path, tmp_path / "local")
    with placed(lab), configured(spark, case.settings):
        savepoints.restore(spark, copied, name, tmp_path / "query", shards=3)
        found = waiting.run_once(lab, case, "query", "durable", keys(spark))
    due = [f"{{'key': '{key}', 'n': 1, 'is_due': True}}" for key in waiting.KEYS]
    assert [row for row in found if "'z'" not in row] == due
    assert len(found) > len(due), "what came next"


TABLES = {"counts": COUNTS}


def raised(data: bytes) -> bytes:
    """Return a file as a release with another format version writes it."""
    return resealed(data[:-26] + (2).to_bytes(2, "little") + data[-24:])


def extended(data: bytes) -> bytes:
    """Return a file with a field that this release does not know."""
    return with_header(data, lambda header: header.update(since_then={"by": "a newer release"}))


CHANGES = pytest.mark.parametrize("changed", [raised, extended])
SAID = r"than this release of holdfast reads: open it with the release that wrote it"


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shard]:
    with ThreadPoolExecutor(2) as threads:
        yield Shard(tmp_path_factory.mktemp("releases"), threads)


@CHANGES
def test_state_never_lacks_a_commit_of_a_newer_release(shard: Shard, changed: Callable[[bytes], bytes]) -> None:
    """The query goes back to an older release: it stops, and is told which release to use."""
    commits = [key for key in shard.objects if "/commits/" in key]
    snapshot_version = 3
    needed = [key for key in commits if int(key.rpartition("/")[2].partition("-")[0]) > snapshot_version]
    assert len(needed) == 2
    for key in needed:
        with pytest.raises(CorruptionError, match=f"{key} has .*{SAID}"):
            shard.restored(key, changed(shard.objects[key]))


@pytest.mark.parametrize(("folder", "changed"), [("snapshots", raised), ("snapshots", extended), ("files", raised)])
def test_a_snapshot_of_a_newer_release_is_done_without(
    shard: Shard, folder: str, changed: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """The commits give the same version; the log names what could not be read."""
    for key in [key for key in shard.objects if f"/{folder}/" in key]:
        caplog.clear()
        assert shard.restored(key, changed(shard.objects[key])) == "restored"
        assert "restored without a damaged snapshot" in caplog.text
        assert "the release that wrote it" in caplog.text


@CHANGES
def test_a_record_of_a_newer_release_lets_no_query_in(tmp_path: Path, changed: Callable[[bytes], bytes]) -> None:
    with open_storage(str(tmp_path)) as storage:
        record = OperatorRecord("totals", "query", "definition", "run", 4, TABLES, 100)
        declare_operator(storage, record)
        storage.put("totals/operator", changed(bytes(storage.get("totals/operator"))))
        before = files(tmp_path)
        for call in (lambda: declare_operator(storage, record), lambda: read_operator(storage, "totals")):
            with pytest.raises(CorruptionError, match=f"totals/operator has .*{SAID}"):
                call()
        assert files(tmp_path) == before


# What may be deleted.


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "durable"


@pytest.fixture
def storage(root: Path) -> Iterator[ObjectStorage]:
    with open_storage(str(root)) as opened:
        put_record(opened, retained=5)
        yield opened


@CHANGES
@pytest.mark.parametrize("newest", ["commits/31-*", "snapshots/30-*"])
def test_nothing_is_deleted_where_a_newer_release_has_written(
    root: Path, storage: ObjectStorage, newest: str, changed: Callable[[bytes], bytes]
) -> None:
    """It may need what this one would not: `gc` of an older installation, an executor that was not restarted."""
    history = ShardHistory(storage)
    made = history.grow(None, 31 if newest.startswith("commits") else 30, snapshot_every=10)
    (path,) = (root / history.prefix).glob(newest)
    data = changed(path.read_bytes())
    if newest.startswith("snapshots"):
        path.unlink()
        path = path.with_name(f"{path.name[:-16]}{digest_of(data)[:16]}")
    path.write_bytes(data)
    age(root)
    before = files(root)
    done = document("gc", root, "--yes", status=1)
    (error,) = [s["error"] for s in done["shards"] if s["error"]]
    assert error.startswith(f"file://{path} has ")
    assert files(root) == before
    if newest.startswith("snapshots"):
        at = made[24]  # an executor that does not know of the newer release
        with pytest.raises(CorruptionError, match="the release that wrote it"):
            run_retention(PrefixedStorage(storage, history.prefix), at.pointer, at.chain, retained=5)
        assert files(root) == before


def test_what_lies_beside_the_shards_is_a_newer_releases_own(root: Path, storage: ObjectStorage) -> None:
    """That is where it puts kinds of objects that this release does not know; below a shard they would go."""
    history = ShardHistory(storage)
    history.grow(None, 30, snapshot_every=10)
    for key in ("totals/savepoints/1/run-0", "totals/index", f"{history.prefix}/index/1"):
        storage.put(key, b"?")
    age(root)
    before = files(root)
    document("gc", root, "--yes")
    gone = before - files(root)
    assert f"{history.prefix}/index/1" in gone
    assert not {key for key in gone if not key.startswith(history.prefix)}


# What only tells people something.


def change_claim(root: Path, changed: Callable[[bytes], bytes]) -> Path:
    (path,) = (root / "totals/claims").iterdir()
    path.write_bytes(changed(path.read_bytes()))
    return path


def test_a_claim_with_more_fields_is_a_claim(root: Path, storage: ObjectStorage) -> None:
    """It says what is retained, and a run of this release follows it."""
    take(storage, claimant("query-1", retained_versions=12))
    change_claim(root, extended)
    history = ShardHistory(storage)
    history.grow(None, 30, snapshot_every=10)
    age(root)
    found = {s["shard"]: s for s in document("gc", root, "--yes")["shards"]}
    assert (found[history.prefix]["needed_from"], found[history.prefix]["error"]) == (1, None)
    assert document("verify", root)["damages"] == []
    assert take_after(storage, "r2", "r1", query="query-1").claim.number == 2


def test_a_claim_of_a_newer_version_is_not_guessed_at(root: Path, storage: ObjectStorage) -> None:
    """Neither by gc, which does not know what it retains, nor by a run, which does not know who holds the directory."""
    take(storage, claimant("query-1", retained_versions=12))
    claim = change_claim(root, raised)
    ShardHistory(storage).grow(None, 30, snapshot_every=10)
    age(root)
    before = files(root)
    with pytest.raises(CorruptionError, match=rf"{claim.name} has .*{SAID}"):
        take_after(storage, "r2", "r1", query="query-1")
    done = document("gc", root, "--yes", status=1)
    assert claim.name in " ".join(s["error"] or "" for s in done["shards"])
    assert files(root) == before
    (damage,) = document("verify", root, status=1)["damages"]
    assert claim.name in damage["problem"]
    assert document("gc", root, "--yes", "--retain", "5")["objects"] == 9


def test_a_failure_that_a_newer_release_reported_is_shown(root: Path, storage: ObjectStorage) -> None:
    """With more fields as it is, of a newer version as one that cannot be read."""
    history = ShardHistory(storage)
    history.grow(None, 1)
    report_trouble(PrefixedStorage(storage, SHARD), "snapshot", UnavailableError("the disk is full"), 3, "host-1", 0)
    (path,) = (root / history.prefix / "troubles").iterdir()
    said = {extended: "the disk is full", raised: "the release that wrote it"}
    good = path.read_bytes()
    for changed, text in said.items():
        path.write_bytes(changed(good))
        (operator,) = document("inspect", root, status=1)["operators"]
        (trouble,) = operator["troubles"]
        assert text in trouble["error"]


# Local state.


@pytest.fixture
def small(storage: ObjectStorage, tmp_path: Path) -> Iterator[SmallShard]:
    with ThreadPoolExecutor(2) as threads:
        yield SmallShard(storage, threads, tmp_path / "here")


def test_a_local_version_of_a_newer_release_is_restored(small: SmallShard) -> None:
    """An executor takes over a directory that outlived the one before: what it cannot read comes from storage."""
    pointer = small.grow(None, 3)
    path = small.backend.directory / "versions" / str(pointer) / "version"
    path.write_bytes(raised(path.read_bytes()))
    with pytest.raises(CorruptionError, match="the release that wrote it"):
        small.state(pointer)
    assert small.state(pointer) == {"u0": 0, "u1": 1, "u2": 2}


@CHANGES
def test_a_note_of_a_newer_release_counts_as_none(small: SmallShard, changed: Callable[[bytes], bytes]) -> None:
    """The next commit builds on what it knows, and nothing else is lost."""
    pointer = small.grow(None, 3)
    small.log.write_snapshot(small.backend, pointer)
    path = small.backend.directory / "snapshots" / str(pointer)
    path.write_bytes(changed(path.read_bytes()))
    after = small.commit(pointer, ("ann", 1))
    with small.store.read_at(after) as view:
        assert [entry["kind"] for entry in view.properties["chain"]] == ["commit"] * 4
