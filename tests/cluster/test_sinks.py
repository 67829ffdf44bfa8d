"""Sinks on a standalone cluster: executors are killed under them, and slow tasks are attempted twice."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.cluster import sink_speculating
from tests.cluster.standalone import cluster
from tests.faults.sinks.killed_query import Job
from tests.faults.sinks.killing import SinkKillings
from tests.faults.sinks.targets import target_of
from tests.spark.application import run_program
from tests.tiers import cases, kills

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.slow(90), pytest.mark.timeout(1800)]


@pytest.mark.all
@pytest.mark.parametrize("target", cases(["parquet", "postgres", "postgres upsert"]))
def test_executors_are_killed_under_a_sink(target: str, java_home: Path, tmp_path: Path) -> None:
    """What they had prepared and nobody knows of is ended; another executor's attempt counts."""
    with cluster(tmp_path) as master, target_of(target).served(tmp_path) as place:
        job = Job(str(tmp_path), master=master, target=target, place=place)
        run = SinkKillings(job, random.Random(target))
        run.run(kills(quick=2), ["executor"])
        found = run.judged()
    print(f"\n{target}: killed {run.done}; {found}")
    assert found.is_right, f"{found}; {run.describe()}"


@pytest.mark.all
@pytest.mark.parametrize("target", cases(["csv", "parquet", "postgres", "postgres upsert"]))
def test_two_attempts_at_a_task_show_one(target: str, java_home: Path, tmp_path: Path) -> None:
    """With speculation both write and may prepare: the rows are those of one, and nothing of the other is left."""
    with cluster(tmp_path, hosts=2) as master, target_of(target).served(tmp_path) as place:
        told, _ = run_program(Path(sink_speculating.__file__), tmp_path, master, target, json.dumps(place))
        rows = target_of(target).read(place)
    found = json.loads(told)
    assert found["twins"] == sink_speculating.BATCHES - 1
    assert found["left"] == 0, "attempts that did not count are ended"
    newest = sink_speculating.BATCHES - 1
    batches = [newest] if target_of(target).upserts else range(newest + 1)
    shown = sorted(zip(rows["batch"].to_pylist(), rows["key"].to_pylist(), strict=True))
    assert shown == [(batch, key) for batch in batches for key in range(sink_speculating.KEYS)]
    attempts = {tuple(row[name] for name in ("batch", "part", "attempt")) for row in rows.to_pylist()}
    assert len(attempts) == len({attempt[:2] for attempt in attempts}), "a partition has rows of one attempt"
    print(f"\n{target}: {found}")
