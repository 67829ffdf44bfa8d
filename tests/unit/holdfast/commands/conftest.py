"""A state directory on a local disk, with the history of one shard."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from typing_extensions import Buffer

from holdfast.backends import stored_file
from holdfast.cli import group
from holdfast.snapshotter.ownership.operator_record import OperatorRecord
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import WrappedStorage
from holdfast.testing.state_rows import COUNTS
from tests.model.shard_history import ShardHistory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "durable"


class OneByOne(WrappedStorage):
    """A local disk on which each object is younger than the one before.

    File systems that are in memory store several within one tick of the clock, and what was stored last then counts
    for all of them.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(open_storage(str(root)))
        self._root = root
        self._last_ns = 0

    def put(self, key: str, data: Buffer) -> None:
        super().put(key, data)
        path = self._root / key
        self._last_ns = max(path.stat().st_mtime_ns, self._last_ns + 1_000_000)
        os.utime(path, ns=(self._last_ns, self._last_ns))


@pytest.fixture
def storage(root: Path) -> Iterator[ObjectStorage]:
    with OneByOne(root) as opened:
        yield opened


@pytest.fixture
def shard(storage: ObjectStorage) -> ShardHistory:
    """Return a shard of 30 versions with a snapshot after each 10."""
    put_record(storage)
    history = ShardHistory(storage)
    history.grow(None, 30, snapshot_every=10)
    return history


DAY_S = 24 * 60 * 60


def put_record(
    storage: ObjectStorage, operator: str = "totals", shards: int = 4, retained: int = 100, query: str = "query-1"
) -> None:
    record = OperatorRecord(operator, query, "definition-1", "run-1", shards, {"counts": COUNTS}, retained)
    storage.put(f"{operator}/operator", stored_file.encode("operator", record.to_json())[0])


def age(root: Path, days: float = 2) -> None:
    for path in root.rglob("*"):
        then_ns = path.stat().st_mtime_ns - int(days * DAY_S * 1e9)
        os.utime(path, ns=(then_ns, then_ns))


def run(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(group, [str(a) for a in arguments], env=environment)


def document(*arguments: object, status: int = 0) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == status, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
