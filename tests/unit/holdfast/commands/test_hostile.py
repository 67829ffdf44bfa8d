"""The commands on directories that somebody else has written: whatever stands there, they answer, or say what is wrong.

Digests find damage; they do not prove who wrote. So each header here is whole, and says what no query would.
"""

from __future__ import annotations

import copy
import json
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from holdfast.backends import stored_file
from holdfast.cli import group
from holdfast.errors import HoldfastError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests.model.shard_history import ShardHistory
from tests.tiers import LONG
from tests.unit.holdfast.commands.state_dir import age, files, put_record
from tests.unit.snapshotter.ownership.runs import claimant, take, take_after

EVERY = 1 if LONG else 61
COMMANDS = (["inspect", "--shards"], ["log"], ["verify"], ["gc", "--dry-run", "--grace", "0"])
KINDS = {"operator": "operator", "claims": "claim", "commits": "commit", "snapshots": "snapshot", "files": "part"}
ANYTHING: tuple[Any, ...] = (
    None, True, -1, 10**30, 1.5, "", "x", "../../etc/passwd", "\u202e\x1b[31m[red]", [], [[]], {}, {"a": {}}, [None, 7]
)  # fmt: skip


@pytest.fixture
def storage(root: Path) -> Iterator[ObjectStorage]:
    """Return a directory with a shard of four versions, a snapshot and a claim."""
    with open_storage(str(root)) as opened:
        put_record(opened)
        ShardHistory(opened).grow(None, 4, snapshot_every=2)
        take(opened, claimant("query-1"))
        take_after(opened, "r2", "r1", query="query-1")
        yield opened


def run(*arguments: object) -> Result:
    return CliRunner().invoke(group, [str(a) for a in arguments])


def require_an_answer(root: Path, what: object) -> None:
    """Run all commands: each ends by itself, or with an error of ours, and shows nothing to the terminal but text."""
    for command in COMMANDS:
        for as_json in ([], ["--json"]):
            result = run(command[0], root, *command[1:], *as_json)
            error = result.exception
            assert error is None or isinstance(error, (HoldfastError, SystemExit)), (what, command, repr(error))
            assert "\x1b" not in result.output, (what, command)
            if as_json and result.stdout:
                json.loads(result.stdout)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where in a header each value stands."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from paths_in(part, (*path, key))


def changed(header: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a header with another value in one place."""
    made = copy.deepcopy(header)
    at = made
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return made


@pytest.mark.slow
def test_headers_that_say_anything(root: Path, storage: ObjectStorage) -> None:
    """Each place of each kind of header, with each kind of value."""
    every = {key.split("/")[-2] if "shard" in key else key.split("/")[1]: key for key in files(root)}
    assert every.keys() == KINDS.keys()
    number = 0
    for kind, key in sorted(every.items()):
        before = bytes(storage.get(key))
        stored = stored_file.decode(memoryview(before), source=key, kind=KINDS[kind])
        for path in [p for p in paths_in(stored.header) if p]:
            for value in ANYTHING:
                number += 1
                if number % EVERY:
                    continue
                sections = {name: lambda file, data=data: file.write(data) for name, data in stored.sections.items()}
                data, _ = stored_file.encode(stored.kind, changed(stored.header, path, value), sections)
                (root / key).write_bytes(data)
                require_an_answer(root, (kind, path, value))
        (root / key).write_bytes(before)
    assert number > 500
    assert run("verify", root).exit_code == 0, "all is as it was"


@pytest.mark.slow(0.5)
@pytest.mark.parametrize("kind", KINDS)
def test_objects_of_a_terabyte(root: Path, storage: ObjectStorage, kind: str) -> None:
    """Nothing is read of what is larger than its kind can be, and ``verify`` says so."""
    folder = next(path for path in root.rglob(kind) if path.is_dir() or kind == "operator")
    planted = max(folder.iterdir()) if folder.is_dir() else folder
    os.truncate(planted, 1 << 40)  # it takes no room on the disk
    require_an_answer(root, kind)  # and what the commands import is no part of what is measured
    tracemalloc.start()
    try:
        results = [run(command[0], root, *command[1:]) for command in COMMANDS]
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 << 20
    (verified,) = (result for command, result in zip(COMMANDS, results, strict=True) if command[0] == "verify")
    assert verified.exit_code == 1
    found = json.loads(run("verify", root, "--json").stdout)["damages"]
    assert [f"size_bytes={1 << 40}" in damage["problem"] for damage in found] == [True]
    assert str(planted.relative_to(root)) in found[0]["key"]
    assert storage


NAMES = (
    "totals/shard-0003/commits/1-\x1b[31m",
    "totals/shard-9999/commits/99999999999999999999-aa",
    "totals/shard-\u0660\u0660\u0660\u0661/commits/1-aa",
    "totals/shard-999999999/commits/1-aa",
    "totals/shard-0003/snapshots/[red]",
    "totals/claims/99999999999999999999",
    f"totals/claims/beside@{'9' * 17}@r9@@@0123456789abcdef",
    f"totals/claims/beside@{'0' * 17}@..%2F..%2Foperator@@1@0123456789abcdef",
    "totals/claims/\u06600000000000000000001",
    "[bold]/operator",
    "a\\/operator",
    " /x",
)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_that_nobody_would_give(root: Path, storage: ObjectStorage, name: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(b"?")
    require_an_answer(root, name)
    assert storage


def test_names_and_times_that_only_a_file_system_allows(root: Path, storage: ObjectStorage) -> None:
    """Bytes that are no UTF-8, and moments that no calendar has."""
    with open(os.fsencode(root) + b"/totals/shard-0003/commits/1-\xff", "wb"):
        pass
    commit = next((root / ShardHistory(storage).prefix / "commits").iterdir())
    os.utime(commit, (400_000_000_000, 400_000_000_000))
    require_an_answer(root, "names and times")
    result = run("gc", root, "--yes", "--grace", "0", "--retain", "1")
    assert result.exception is None or isinstance(result.exception, (HoldfastError, SystemExit))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gc", "--operator", "", "--yes"], "--operator must name"),
        (["inspect", "--operator", ""], "--operator must name"),
        (["inspect", "--operator", "../durable"], ""),
        (["inspect", "--operator", "totals/shard-0003"], ""),
        (["gc", "--grace", "nan", "--yes"], "--grace must be a number"),
        (["gc", "--grace", "inf", "--yes"], "--grace must be a number"),
        (["gc", "--grace", "1e305", "--yes"], "--grace must be a number"),
    ],
    ids=str,
)
def test_options_that_mean_nothing(root: Path, storage: ObjectStorage, arguments: list[str], said: str) -> None:
    """They are refused, and delete nothing; above all what a script's empty variable leaves."""
    age(root)
    before = files(root)
    result = run(arguments[0], root, *arguments[1:])
    assert isinstance(result.exception, (InvalidArgumentError, NotFoundError))
    assert said in str(result.exception)
    assert files(root) == before
    assert storage


@pytest.mark.parametrize(
    "url", ["", " ", "s3:/bucket", "nothing://x", "s3://", "file:///nowhere/at/all", "\x00"], ids=ascii
)
def test_urls_that_lead_nowhere(url: str) -> None:
    for command in COMMANDS:
        result = run(command[0], url, *command[1:])
        assert isinstance(result.exception, HoldfastError), (command, repr(result.exception))


@pytest.mark.parametrize(
    ("key", "needing"),
    [
        ("totals/operator", {"inspect", "verify", "gc"}),
        ("totals/claims/*", {"inspect", "verify", "gc"}),
        ("*/snapshots/*", {"log", "verify", "gc"}),
    ],
)
def test_what_may_not_be_read_is_said(
    root: Path, storage: ObjectStorage, key: str, needing: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A permission that is missing is no damage: no command judges without what it may not see."""

    def denied() -> InvalidArgumentError:
        return InvalidArgumentError("access denied", key=key)

    def faulty(url: str, options: dict[str, object]) -> ObjectStorage:
        return FaultyStorage(open_storage(url, options), [Fault("fail", "get", key, times=1000, error=denied)])

    monkeypatch.setattr("holdfast.commands.target.open_storage", faulty)
    before = files(root)
    for command in COMMANDS:
        result = run(command[0], root, *command[1:])
        assert ("access denied" in str(result.exception)) == (command[0] in needing), command
    assert files(root) == before
    assert storage
