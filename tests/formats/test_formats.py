"""Every stored format that was released opens for ever; see FORMAT.md."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.ipc as ipc
import pytest

from holdfast.backends.base import Pointer
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator
from holdfast.snapshotter.storage.opening import open_storage
from tests.formats import sample

SAMPLES = sorted(p for p in Path(__file__).parent.iterdir() if p.name.startswith("format-"))


@pytest.fixture(params=SAMPLES, ids=lambda p: p.name)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a copy of a sample: reading must not need to write, and must not change the original."""
    return Path(shutil.copytree(request.param, tmp_path / "sample"))


def test_there_is_a_sample() -> None:
    """The other tests here test something."""
    assert SAMPLES


def test_an_old_directory_restores_to_the_same_state(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Snapshot, commits, a delete and an all-null value, with every kind of column, read as they were written."""
    pointer = Pointer.parse((folder / "pointer").read_text().strip())
    with ThreadPoolExecutor(2) as threads:
        log = ObjectCommitLog(open_storage(str(folder)), sample.SHARD, sample.TABLES, threads, tmp_path)
        with log.restore(pointer) as restored:
            pass
    assert caplog.text == "", "nothing was taken for damaged"
    assert [e["kind"] for e in restored.properties["chain"]] == ["snapshot", "commit", "commit"]
    run = restored.runs["state"]
    rows = {key["user"]: value for key, value in zip(run.keys.to_pylist(), run.values.to_pylist(), strict=True)}
    nothing = dict.fromkeys(sample.VALUE.names)
    assert rows == {None: sample.value(3), "": nothing, "dan": sample.value(2)}
    assert run.hashes.tolist() == [5, 7, 2**63]


def test_an_old_operator_record_still_admits_its_query(folder: Path) -> None:
    """A query that began with that release goes on with this one."""
    record = OperatorRecord.of(sample.OPERATOR, "query", "another definition", "another run", 1, sample.TABLES, 7)
    declare_operator(open_storage(str(folder)), record)


def test_a_commit_opens_as_an_arrow_stream(folder: Path) -> None:
    """Anyone with an Arrow library reads state without holdfast."""
    for path in (folder / sample.SHARD / "commits").iterdir():
        table = ipc.open_stream(path).read_all()
        assert table.schema.names[:4] == ["hash", "deleted", "key.user", "key.amount"]
