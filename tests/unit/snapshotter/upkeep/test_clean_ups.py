"""Clean-ups in the long run: jobs that run for a moment, fast queries, queries that go back."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest

from holdfast.backends import stored_file
from holdfast.snapshotter.snapshots.snapshots import SnapshotPolicy
from tests.soak.cluster import ClockedStorage
from tests.tiers import ALL
from tests.unit.snapshotter.upkeep.upkeep_bench import HOUR_MS, Bench, counters


@pytest.mark.all
@pytest.mark.slow
def test_a_scheduled_job_stores_no_more_than_a_running_one(tmp_path: Path) -> None:
    """Six applications of 60 micro-batches, each with a server of its own, against one of 360."""
    objects, asked = [], []
    for lives in (6, 1):
        bench = Bench(tmp_path / str(lives))
        query = bench.query(policy=SnapshotPolicy(max_commits=20), retained_versions=100)
        for _ in range(lives):
            executor = bench.executor()
            bench.run(query, executor, 360 // lives, step_ms=2 * 60_000)
            assert executor.failures() == {}
            bench.end(executor)
        query.check(tmp_path, bench.threads)
        objects.append(len(bench.place.stored_ms))
        asked.append(bench.place.requests)
        bench.close()
    assert objects[0] - 5 <= objects[1] < 260
    # Each life restores, and does not know yet what former ones have read.
    assert asked[0].total() < asked[1].total() + 6 * 60


@pytest.mark.slow
def test_a_job_of_one_micro_batch_uses_the_snapshots_of_the_one_before(bench: Bench) -> None:
    """A snapshot after the last commit of an application is in no commit: the next ones wrote the whole shard again."""
    query = bench.query()
    written = cleaned = 0
    jobs = 60 if ALL else 40
    for _ in range(jobs):
        executor = bench.executor()
        bench.run(query, executor, step_ms=HOUR_MS)
        written += counters(executor)["snapshots"]
        cleaned += counters(executor)["clean_ups"]
        assert executor.failures() == {}
        bench.end(executor)
    assert abs(written - jobs / 5) <= 2
    assert cleaned >= jobs // 30
    query.check(bench.path, bench.threads)


@pytest.mark.slow(1)
def test_a_part_that_somebody_deletes_is_sent_again_before_anything_goes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each snapshot names the parts of files that stay as they are: all of them lacked it, and the rest was deleted."""
    # So that files stay.
    monkeypatch.setattr("holdfast.backends.run_files.backend.first_to_merge", lambda sizes, *_: len(sizes) - 1)
    executor, query = bench.executor(), bench.query(policy=SnapshotPolicy(max_commits=2), retained_versions=3)
    bench.run(query, executor, 12, step_ms=HOUR_MS)
    assert query.storage is not None
    snapshots = [bytes(query.storage.get(key)) for key in bench.stored("snapshots")]
    lost = next(key for key in bench.stored("files") if all(Path(key).name.encode() in one for one in snapshots))
    query.storage.delete([lost])
    bench.run(query, executor, 30, step_ms=HOUR_MS)
    query.check(bench.path, bench.threads)
    assert counters(executor)["clean_up_errors"] >= 1
    assert counters(executor)["snapshot_errors"] == 0
    failed = counters(executor)["clean_up_errors"]
    bench.run(query, executor, 10, step_ms=HOUR_MS)
    assert counters(executor)["clean_up_errors"] == failed, "once nothing needs what was stored before, all is well"
    assert len(bench.stored("commits")) < 30


@pytest.mark.slow(1)
def test_a_query_that_is_faster_than_its_uploads_is_cleaned_up_after(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version that it had accepted was always gone when the clean-up asked for it."""
    query, executor = bench.query(retained_versions=5), bench.executor()
    put = ClockedStorage.put
    nested = itertools.count()

    def put_while_the_query_goes_on(storage: ClockedStorage, key: str, data: Any) -> None:
        put(storage, key, data)
        if "/files/" in key and next(nested) < 10_000:
            for path in executor.directory.glob("memory/*/*/shard-*/versions"):
                versions = sorted(path.iterdir(), key=lambda p: int(p.name.partition("-")[0]))
                for old in versions[:-1]:
                    with contextlib.suppress(FileNotFoundError):  # housekeeping drops versions too
                        old.rename(executor.directory / f"gone-{next(nested)}")

    monkeypatch.setattr(ClockedStorage, "put", put_while_the_query_goes_on)
    bench.run(query, executor, 60, step_ms=10 * 60_000)
    assert len(list(executor.directory.glob("gone-*"))) > 10
    assert counters(executor)["clean_ups"] >= 2
    assert executor.failures() == {}


@pytest.mark.slow
def test_a_stray_object_does_not_stop_clean_ups_after_the_query_went_back(bench: Bench) -> None:
    """What a late attempt stores below all that was cleaned up made history look torn."""
    query, executor = bench.query(retained_versions=20), bench.executor()
    bench.run(query, executor, 60, step_ms=10 * 60_000)
    at_60, state_60 = query.rows[0], dict(query.state[0])
    bench.run(query, executor, 20, step_ms=10 * 60_000)
    assert counters(executor)["deleted_objects"] > 20
    assert query.storage is not None
    header = {"rows": {}, "plain_bytes": {}, "chain": [], "last": None, "pointer": "3-dead", "since": ["3-dead"]}
    commit, _ = stored_file.encode("commit", header | {"shard": "one/shard-0000"})
    query.storage.put("one/shard-0000/commits/3-dead", commit)
    query.rows[0], query.state[0], query.batch_id = at_60, state_60, 60
    query.retained_versions = 60  # all that is there, and more
    bench.run(query, executor, 30, step_ms=1000)
    assert executor.failures() == {}
    query.retained_versions = 20
    bench.run(query, executor, 40, step_ms=10 * 60_000)
    assert executor.failures() == {}
    assert "one/shard-0000/commits/3-dead" not in bench.place.stored_ms
    query.check(bench.path, bench.threads)
