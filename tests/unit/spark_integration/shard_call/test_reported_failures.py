"""What a failed call of a shard reports in the state directory, and what it does not."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.errors import CorruptionError, FencedError, UnavailableError
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.troubles import read_trouble
from holdfast.spark_integration.shard_call.announcing import reported
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from holdfast.testing.state_rows import TABLES

SHARD = "totals/shard-0003"


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[FaultyStorage]:
    with FaultyStorage(open_storage(str(tmp_path / "durable"))) as opened:
        yield opened


@pytest.fixture
def log(storage: FaultyStorage, tmp_path: Path) -> Iterator[ObjectCommitLog]:
    with ThreadPoolExecutor(1) as executor:
        yield ObjectCommitLog(storage, SHARD, TABLES, executor, tmp_path, "memory", 0, {})


def told(storage: FaultyStorage) -> list[tuple[str, str]]:
    shard = PrefixedStorage(storage, SHARD)
    reports = [read_trouble(shard, info.key) for info in shard.list("troubles/")]
    return [(report.what, report.error) for report in reports]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no number: 'x'"), "ValueError: no number: 'x'"),
        (CorruptionError("a commit is damaged", key="1-aa"), "a commit is damaged, key=1-aa"),
    ],
)
def test_what_fails_is_reported_and_raised(
    storage: FaultyStorage, log: ObjectCommitLog, error: Exception, text: str
) -> None:
    """The user's function, or ours: the error is in the state directory, and Spark gets it as it was."""
    with pytest.raises(type(error)) as raised, reported(log, 42, lambda: 1_000):
        raise error
    assert raised.value is error
    assert told(storage) == [("micro-batch-42", text)]


@pytest.mark.parametrize("error", [FencedError("a newer run has begun"), UnavailableError("the storage is away")])
def test_what_is_no_failure_of_the_query_is_not_reported(
    storage: FaultyStorage, log: ObjectCommitLog, error: Exception
) -> None:
    """A run that was replaced stops; a storage that is away takes no report."""
    with pytest.raises(type(error)), reported(log, 42):
        raise error
    assert storage.operations == []


def test_success_costs_no_request(storage: FaultyStorage, log: ObjectCommitLog) -> None:
    """Only what fails does."""
    with reported(log, 42):
        pass
    assert storage.operations == []


def test_a_report_that_cannot_be_stored_hides_no_error(storage: FaultyStorage, log: ObjectCommitLog) -> None:
    """The query's own failure is what Spark hears of; so is one without durable state, or of unknown number."""
    storage.faults.append(Fault("fail", action="put", times=None))
    for where, batch_id in ((log, 42), (None, 42), (log, None)):
        with pytest.raises(ValueError, match="no number"), reported(where, batch_id):
            raise ValueError("no number")
    assert told(storage) == []
