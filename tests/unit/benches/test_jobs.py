"""Jobs: what they refuse, what each micro-batch of theirs holds, and the rows that they are made of."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from holdfast.backends.run import Run
from holdfast.benches.jobs import rows
from holdfast.benches.jobs.by_key import DropIn, one_key
from holdfast.benches.jobs.by_name import JOBS, read_job
from holdfast.benches.jobs.job import Job
from holdfast.benches.jobs.job_a import JobA
from holdfast.benches.jobs.job_b import JobB
from holdfast.errors import InvalidArgumentError
from holdfast.testing import PandasWithStateTester


@pytest.mark.parametrize("kind", JOBS.values())
def test_a_stored_job_is_read_as_it_was(kind: type[Job]) -> None:
    job = kind(batches=900, warmup=3, memory_mb=77)
    assert read_job(json.loads(json.dumps(job.stored()))) == job


def test_every_drop_in_batch_touches_as_many_keys_as_said() -> None:
    job = DropIn(rows=8, keys=12, touched=4, batches=6, warmup=0)
    tester = PandasWithStateTester(one_key, "key", "key long, v long", job.output, job.state)
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
