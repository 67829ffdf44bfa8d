"""Looking disturbs nobody: look-ups, the page and metrics, without pause, while processes are killed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.faults.killed_driver import METRICS, Job
from tests.faults.killings import FILE_ROWS, Killings, State, expected, micro_batches
from tests.faults.test_exactly_once import KILLS, check_result
from tests.faults.watching import Watcher
from tests.servers.programs import free_ports
from tests.tiers import ALL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BACKENDS = ["filesystem", "rocksdb"]

pytestmark = [pytest.mark.slow(60), pytest.mark.spark, pytest.mark.timeout(3000)]


@pytest.mark.all
@pytest.mark.parametrize("backend", BACKENDS if ALL else BACKENDS[1:])
def test_looking_changes_nothing(backend: str, spark: SparkSession, tmp_path: Path) -> None:
    """The result is the undisturbed one, each look-up was right for its micro-batch, and each view a page."""
    job = Job(str(tmp_path), backend, metrics_port=free_ports(1)[0])
    run = Killings(job, random.Random(f"watched {backend}"))
    watcher = Watcher(job, random.Random(f"watcher {backend}"))
    with watcher.watching():
        run.run(KILLS)
    check_looks(watcher)
    check_metrics(run)
    check_result(run, spark)
    print(f"\n{watcher.pages} pages, {len(watcher.looked_up)} versions of keys, {watcher.scrapes} scrapes; {run.done}")


def check_looks(watcher: Watcher) -> None:
    """Compare what look-ups found with the state after their micro-batch."""
    states: list[State] = []
    expected(micro_batches(watcher.job.path), lambda _number, state: states.append(dict(state)))
    for batch_id, key, rows in watcher.looked_up:
        held = states[batch_id].get(key)
        wanted = [] if held is None else [{"key": key, **dict(zip(("n", "total", "last"), held, strict=True))}]
        assert rows == wanted, (batch_id, key)
    assert not watcher.wrong, watcher.wrong[:3]
    assert min(len(watcher.looked_up), watcher.histories, watcher.views, watcher.scrapes) > 0, watcher


def check_metrics(run: Killings) -> None:
    """Compare the rows that the last driver's progress told with the input of its micro-batches."""
    batches = micro_batches(run.job.path)
    told = json.loads((run.job.path / METRICS).read_text())
    own = range(run.committed_before, len(batches))
    assert told == {str(number): FILE_ROWS * len(batches[number].files) for number in own}
