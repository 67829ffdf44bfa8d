"""What a stopped attempt at a new query has left is deleted by the next one, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

from holdfast.backends.run import TableSchema
from holdfast.errors import ConflictError, CorruptionError, HoldfastError, InvalidArgumentError, UnavailableError
from holdfast.settings import Settings
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator
from holdfast.snapshotter.ownership.query_origin import QueryOrigin, declare_origin
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.savepoints import new_query as module
from holdfast.spark_integration.savepoints.new_query import new_query
from holdfast.testing.faulty_storage import Fault, FaultyStorage

TABLE = TableSchema.of("state", pa.schema([("k", pa.int64())]), pa.schema([("n", pa.int64())]))
RECORD = OperatorRecord.of("totals", "original", "def-1", "run-1", 2, {"state": TABLE}, 100)


def stopped(folder: Path, query_id: str) -> None:
    """Leave what a clone leaves that is killed once it has declared itself."""
    with open_storage(str(folder / query_id)) as location, open_storage(str(folder / "green")) as storage:
        module.begin(location, query_id)
        declare_origin(storage, QueryOrigin(query_id, "original", "original", 7, {"totals": "original"}))


def filled(storage: ObjectStorage) -> None:
    declare_operator(storage, RECORD)
    storage.put("totals/shard-0000/commits/1-aa", b"state")


def repeat(folder: Path, query_id: str) -> set[str]:
    """Begin again in the location of a stopped clone; return what the state directory holds then."""
    settings = Settings.parse({"spark.holdfast.state.dir": str(folder / "green")})
    with (
        new_query(settings, {}, folder / query_id),
        open_storage(str(folder / "green")) as storage,
    ):
        return {info.key for info in storage.list("")}


def test_a_killed_clone_that_is_repeated_leaves_what_another_one_filled(tmp_path: Path) -> None:
    """Both records name the original: only the clone that had taken the state directory may clear it."""
    stopped(tmp_path, "b")
    with pytest.raises(ConflictError, match="was interrupted"):
        stopped(tmp_path, "a")
    with open_storage(str(tmp_path / "green")) as storage:
        filled(storage)
    theirs = {"_queries/b", "_queries/original.fills", "totals/operator", "totals/shard-0000/commits/1-aa"}
    assert repeat(tmp_path, "a") == theirs


def test_a_killed_clone_that_is_repeated_clears_what_it_filled(tmp_path: Path) -> None:
    stopped(tmp_path, "a")
    with open_storage(str(tmp_path / "green")) as storage:
        filled(storage)
        storage.put("other/operator", b"of another query")
    assert repeat(tmp_path, "a") == {"other/operator"}


def test_a_state_directory_is_no_place_for_a_query(tmp_path: Path) -> None:
    """Swapped, and one directory for both."""
    with open_storage(str(tmp_path / "green")) as storage:
        filled(storage)
    settings = Settings.parse({"spark.holdfast.state.dir": str(tmp_path / "other")})
    with (
        pytest.raises(InvalidArgumentError, match="this is a state directory"),
        new_query(settings, {}, tmp_path / "green"),
    ):
        pass
    with (
        pytest.raises(InvalidArgumentError, match="must not be its checkpointLocation"),
        new_query(settings, {}, tmp_path / "other"),
    ):
        pass


def begun(folder: Path, error: BaseException, *faults: Fault) -> list[str]:
    """Make a query up to its last step, and fail; return what was deleted, in order."""
    settings = Settings.parse({"spark.holdfast.state.dir": str(folder / "green")})
    deleted: list[str] = []

    class Watched(FaultyStorage):
        def delete(self, keys: Iterable[str]) -> None:
            wanted = list(keys)
            super().delete(wanted)
            deleted.extend(wanted)

    def opened(url: str, options: Mapping[str, object]) -> ObjectStorage:
        return Watched(open_storage(url, options), faults)

    def make() -> None:
        with new_query(settings, {}, folder / "location") as new:
            new.fill(QueryOrigin(new.query_id, new.query_id, "original", 7, {"totals": new.query_id}))
            declare_operator(new.storage, replace(RECORD, query_id=new.query_id))
            new.storage.put("totals/shard-0000/commits/1-aa", b"state")
            new.location.put("offsets/0", b"")
            new.location.put("metadata", b"")
            with open_storage(new.stub_url) as stub:
                stub.put("offsets/0", b"")
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "open_storage", opened)
        with pytest.raises(type(error)):
            make()
    return deleted


def left(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def failed_job() -> UnavailableError:
    """Return what becomes of a job of Spark's that has failed."""
    error = UnavailableError("tasks of the savepoint failed")
    error.__cause__ = PySparkException("Job aborted due to stage failure")
    return error


@pytest.mark.parametrize("error", [UnavailableError("the storage"), CorruptionError("a piece")], ids=repr)
def test_what_fails_leaves_nothing(tmp_path: Path, error: HoldfastError) -> None:
    """And what Spark would start from goes before the state, without which it must not start."""
    deleted = begun(tmp_path, error)
    assert left(tmp_path) == []
    assert deleted.index("metadata") < deleted.index("totals/shard-0000/commits/1-aa")


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), SystemExit(1), PySparkException("a job failed"), failed_job()],
    ids=["Ctrl-C", "exit", "Spark's own", "a failed job"],
)
def test_what_leaves_tasks_keeps_what_lets_the_next_attempt_clean_up(
    tmp_path: Path, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """Spark waits for no task then: what one writes later belongs to a record, and goes with it. No query starts."""
    deleted = begun(tmp_path, error)
    assert deleted == ["metadata"]
    assert f"once they have ended, run the same command again with the checkpoint location {tmp_path / 'location'}" in (
        caplog.text
    )
    with open_storage(str(tmp_path / "green")) as storage:
        storage.put("totals/shard-0001/commits/1-bb", b"state of a task that went on")
    settings = Settings.parse({"spark.holdfast.state.dir": str(tmp_path / "green")})
    with new_query(settings, {}, tmp_path / "location") as new:
        assert left(tmp_path) == [f"location/holdfast-restoring-{new.query_id}"]


def test_ctrl_c_after_all_is_done_keeps_the_query(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings.parse({"spark.holdfast.state.dir": str(tmp_path / "green")})

    def make() -> None:
        with new_query(settings, {}, tmp_path / "location") as new:
            new.finish()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make()
    assert left(tmp_path) == ["location/metadata"]
    assert not caplog.text


@pytest.mark.parametrize(
    ("error", "key"),
    [(CorruptionError("a piece"), key) for key in ("metadata", "totals/*", "offsets/*")]
    + [(KeyboardInterrupt(), "metadata")],
    ids=repr,
)
def test_a_clean_up_that_fails_says_what_deletes_the_rest(
    tmp_path: Path, error: BaseException, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The location can be started only while all of it is there; else the next attempt deletes it."""
    begun(tmp_path, error, Fault("fail", "delete", key, times=None))
    assert f"run the same command again with the checkpoint location {tmp_path / 'location'}" in caplog.text
    there = left(tmp_path)
    settings = Settings.parse({"spark.holdfast.state.dir": str(tmp_path / "green")})
    again = new_query(settings, {}, tmp_path / "location")
    if "location/metadata" in there:
        assert {"green/totals/operator", "green/totals/shard-0000/commits/1-aa", "location/offsets/0"} <= {*there}
        with pytest.raises(ConflictError, match="must be empty"):
            again.__enter__()
    else:
        with again as new:
            assert left(tmp_path) == [f"location/holdfast-restoring-{new.query_id}"]


def finished(folder: Path, *faults: Fault) -> None:
    """Make a query whole, with faults of its location."""

    def opened(url: str, options: Mapping[str, object]) -> ObjectStorage:
        storage = open_storage(url, options)
        return FaultyStorage(storage, faults) if url == str(folder / "location") else storage

    settings = Settings.parse({"spark.holdfast.state.dir": str(folder / "green")})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "open_storage", opened)
        with new_query(settings, {}, folder / "location") as new:
            new.fill(QueryOrigin(new.query_id, new.query_id, "original", 7, {"totals": new.query_id}))
            declare_operator(new.storage, replace(RECORD, query_id=new.query_id))
            new.storage.put("totals/shard-0000/commits/1-aa", b"state")
            new.location.put("offsets/0", b"")
            new.finish()


WHOLE = {"green/totals/operator", "green/totals/shard-0000/commits/1-aa", "location/metadata", "location/offsets/0"}


@pytest.mark.parametrize("lands", [True, False])
def test_a_last_step_of_which_nobody_knows_deletes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lands: bool
) -> None:
    """Its put may land later: then Spark starts the query, whose positions and state must be there."""
    with pytest.raises(UnavailableError):
        finished(tmp_path, Fault("fail", "put", "metadata"))
    if lands:
        (tmp_path / "location/metadata").write_bytes(b"{}")
        assert {*left(tmp_path)} >= WHOLE
    else:
        finished(tmp_path)
        assert len({*left(tmp_path)} - WHOLE) == 1, "what the query began with"
    assert "if there is a file metadata, the query is whole and can be started; else run the same" in caplog.text
    assert f"the checkpoint location {tmp_path / 'location'}" in caplog.text


def test_of_two_that_fill_one_directory_the_record_decides(tmp_path: Path) -> None:
    """Each has found it free: the second one is told, and clears what is its own."""
    with open_storage(str(tmp_path / "green")) as storage:
        filled(storage)
    settings = Settings.parse({"spark.holdfast.state.dir": str(tmp_path / "green")})

    def fill() -> None:
        with new_query(settings, {}, tmp_path / "location") as new:
            new.fill(QueryOrigin(new.query_id, "other", "other", 7, {"pairs": "other", "totals": "other"}))
            for name in ("pairs", "totals"):
                declare_operator(new.storage, replace(RECORD, operator=name, query_id="other"))

    with pytest.raises(ConflictError, match="holds the state of another query"):
        fill()
    assert left(tmp_path) == ["green/totals/operator", "green/totals/shard-0000/commits/1-aa"]
