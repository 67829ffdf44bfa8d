"""A state directory, and commands run on it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from holdfast.backends import stored_file
from holdfast.cli import group
from holdfast.snapshotter.ownership.operator_record import OperatorRecord
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.testing.state_rows import COUNTS

DAY_S = 24 * 60 * 60


def put_record(storage: ObjectStorage, operator: str = "totals", shards: int = 4, retained: int = 100) -> None:
    record = OperatorRecord.of(operator, "query-1", "definition-1", "run-1", shards, {"counts": COUNTS}, retained)
    storage.put(f"{operator}/operator", stored_file.encode("operator", asdict(record))[0])


def age(root: Path, days: float = 2) -> None:
    """Make everything below a folder so much older."""
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
