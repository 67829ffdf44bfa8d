"""Jobs: what they refuse, what each micro-batch of theirs holds, and the rows that they are made of."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.backends.registry import backend_names
from holdfast.backends.run import Run
from holdfast.benches.instruments.measured import Places
from holdfast.benches.jobs import rows
from holdfast.benches.jobs.by_key import DropIn, Timers
from holdfast.benches.jobs.by_name import JOBS, read_job
from holdfast.benches.jobs.job import Job
from holdfast.benches.jobs.job_a import JobA
from holdfast.benches.jobs.job_b import JobB
from holdfast.benches.jobs.store.commits import Commits
from holdfast.errors import InvalidArgumentError
from holdfast.testing import PandasWithStateTester


@pytest.mark.parametrize("kind", JOBS.values())
def test_a_stored_job_is_read_as_it_was(kind: type[Job]) -> None:
    job = kind(batches=900, warmup=3, memory_mb=77)
    assert read_job(json.loads(json.dumps(job.stored()))) == job


def test_as_many_timeouts_are_due_in_each_counted_batch() -> None:
    """What the bench of timers says that it measures."""
    job = Timers(rows=4, keys=40, fill_rows=20, due=2, batches=6)
    tester = PandasWithStateTester(
        job.one_key, "key", "key long, v long, at timestamp", job.output, job.state, "EventTimeTimeout", eventTime="at"
    )
    fired = []
    for batch in range(job.all_batches):
        at = dt.datetime.fromtimestamp(1_700_000_000 + 60 * batch, dt.UTC)
        if batch:
            fired.append(len(tester.setWatermark(int(at.timestamp() - 60) * 1000)))
        fills = batch < job.fill_batches
        keys = range(batch * 20, batch * 20 + 20) if fills else range(20 + batch * 4, 24 + batch * 4)
        assert len(tester.test([(20 + key % 20 if not fills else key, 1, at) for key in keys])) == len(keys)
    assert fired[job.counted.start - 1 :] == [job.due] * len(job.counted)
    assert sum(fired) == fired[job.fill_batches + 1] + job.due * len(job.counted)


def test_every_drop_in_batch_touches_as_many_keys_as_said() -> None:
    job = DropIn(rows=8, keys=12, touched=4, batches=6, warmup=0)
    tester = PandasWithStateTester(job.one_key, "key", "key long, v long", job.output, job.state)
    for _ in range(3):
        found = tester.test([(i % job.touched, 2) for i in range(job.rows)])
        assert len(found) == job.touched
    assert (found[0].n, found[0].s) == (6, 12)


def test_no_snapshot_falls_into_job_b() -> None:
    job = JobB()
    settings = job.settings()
    for key in ("spark.holdfast.snapshot.maxCommits", "spark.sql.streaming.stateStore.minDeltasForSnapshot"):
        assert int(settings[key]) > job.all_batches


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (JobA, {"rows": 0}),
        (JobA, {"warmup": 8}),
        (JobA, {"slots": 0}),
        (JobA, {"memory_mb": 0}),
        (JobB, {"skew": 0.5}),
        (JobB, {"fill_rows": 8}),
        (DropIn, {"touched": 50_000}),
        (Timers, {"keys": 30_000}),
        (Timers, {"warmup": 2}),
        (Commits, {"keys": 10**9}),
        (Commits, {"value_bytes": 15}),
    ],
)
def test_impossible_jobs_are_refused(kind: type[Job], wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        kind(**wrong)


@pytest.mark.parametrize("value_bytes", [16, 17, 100, 1000])
def test_rows_of_the_store_benches_are_as_wide_as_said(value_bytes: int) -> None:
    table = rows.table_of(value_bytes)
    keys = rows.keys_of(table, np.arange(1000))
    values = rows.values_of(table, 1000, value_bytes, np.random.default_rng(0))
    assert len(Run.build(table, keys, values)) == 1000, "no two keys are equal"
    assert len(np.unique(keys.hashes >> np.uint64(56))) > 200, "hashes are spread over the shard"
    assert keys.columns.nbytes == 1000 * (16 + 8)
    assert sum(column.nbytes for column in values.columns) == 1000 * (value_bytes + (value_bytes > 16) * 8)


def test_commits_write_every_key_and_touch_old_ones() -> None:
    job = Commits(rows=10, keys=35, batches=7, warmup=1)
    touched = [job.numbers(batch, np.random.default_rng(batch)) for batch in range(job.batches)]
    assert sorted(set(np.concatenate(touched).tolist())) == list(range(35))
    assert [int(numbers.max()) for numbers in touched] == [4, 9, 14, 19, 24, 29, 34]
    assert all(len(numbers) > 5 for numbers in touched[1:]), "some are old"


@pytest.mark.all
@pytest.mark.slow
@pytest.mark.parametrize("backend", backend_names())
def test_stalls_of_every_backend_are_measured(backend: str, tmp_path: Path) -> None:
    job = Commits(rows=200, keys=1000, batches=12, warmup=2)
    found = job.measure(backend, {}, Places(tmp_path, tmp_path))
    assert len(found.batch_ms) == 12
    assert set(found.phases_ms[0]) == {"begin", "get", "commit"}
    assert all(total > 0 for total in found.batch_ms)
    assert found.state_bytes["local_peak"] >= found.state_bytes["local_final"] > 1000 * 32
    assert found.memory["store"]["rss"] > 0
