"""A state directory knows where its queries' checkpoint locations are, so one path is enough, whichever it is."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import holdfast
from holdfast import savepoints
from holdfast.cli import group
from holdfast.errors import InvalidArgumentError, NotFoundError
from holdfast.snapshotter.ownership.claims import find_claim
from holdfast.snapshotter.ownership.queries import NotedLocation, find_noted, note_location
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.lookup.places import find_state_dir
from tests.faults.executor_process import eventually
from tests.spark.conftest import Lab

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def one_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_STATE_DIR", raising=False)


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(group, [str(one) for one in arguments])
    if status:
        assert result.exit_code == status, result.output
        return str(result.exception)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def get(state_dir: Path, operator: str = "totals", *options: object) -> Any:
    return json.loads(run("get", state_dir, operator, "key=a", "--json", *options))["tables"]["state"]


def total(state_dir: Path, operator: str = "totals", *options: object) -> int:
    (row,) = get(state_dir, operator, *options)
    found: int = row["total"]
    return found


def query_id(location: Path) -> str:
    found: str = json.loads((location / "metadata").read_text())["id"]
    return found


def noted(state_dir: Path, location: Path) -> NotedLocation | None:
    """Return the note of the query that is at a location."""
    with open_storage(str(state_dir)) as storage:
        return find_noted(storage, query_id(location))


def ran(lab: Lab, location: str, **options: Any) -> None:
    """Run a query, and wait for the note, which no micro-batch waits for."""
    lab.run(lab.totals(**options), location)
    place = lab.folder / location

    def is_noted() -> bool:
        found = noted(lab.folder / "durable", place)
        return found is not None and found.location == f"file:{place}"

    eventually(is_noted)


@pytest.mark.smoke
@pytest.mark.slow(10)
def test_the_state_directory_is_enough(lab: Lab) -> None:
    """Of a query in a location with a space, that was moved, and in whose place another one began."""
    state_dir, location = lab.folder / "durable", lab.folder / "my query"
    lab.feed([("a", 1), ("b", 2)])
    ran(lab, "my query")
    assert get(state_dir) == [{"key": "a", "n": 1, "total": 1}]
    with holdfast.open_query(state_dir) as query:
        assert query.operator("totals").name == "totals"
    run("history", state_dir, "totals", "key=a")
    run("savepoint", "create", state_dir, "--to", lab.folder / "saved", "--name", "first")
    run("export", state_dir, "--operator", "totals", "--to", lab.folder / "exported")
    for given in (state_dir, location):
        (health,) = json.loads(run("inspect", given, "--json"))["queries"]
        assert health["committed"] == 0
    assert f"checkpointLocation file:{location}\n" in run("inspect", state_dir)

    # Moved: until its next start nothing tells where to. What is given counts.
    moved = location.rename(lab.folder / "moved")
    assert "was moved or deleted" in run("get", state_dir, "totals", "key=a", status=1)
    assert "was moved or deleted" in run("inspect", state_dir)
    assert "was moved or deleted" not in run("inspect", state_dir, "--checkpoint-location", moved)
    assert total(moved) == total(moved, "totals", "--state-dir", state_dir) == 1
    lab.feed([("a", 5)])
    ran(lab, "moved")
    assert total(state_dir) == 6

    # Another query begins where that one was.
    shutil.copytree(moved, location)
    (location / "metadata").write_text('{"id":"another"}')
    shutil.rmtree(moved)
    location.rename(moved)
    assert "was moved or deleted" in run("get", state_dir, "totals", "key=a", status=1)


def test_a_note_counts_only_if_what_is_there_agrees(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes to the state directory may note anything: no other store is opened, no other state shown."""
    state_dir, location = lab.folder / "durable", lab.folder / "query"
    lab.feed([("a", 1)])
    ran(lab, "query")
    right = noted(state_dir, location)
    assert right is not None
    opened = []

    def opens(url: str, options: Any) -> Any:
        opened.append(url)
        return open_storage(url, options)

    monkeypatch.setattr("holdfast.spark_integration.lookup.places.open_storage", opens)

    def says(text: str) -> str:
        with open_storage(str(state_dir)) as storage:
            note_location(storage, replace(right, location=text))
        assert "checkpointLocation" in run("inspect", state_dir)
        return run("get", state_dir, "totals", "key=a", status=1)

    for elsewhere in ("s3a://attacker/q", "hdfs://nn:8020/q", "http://169.254.169.254/latest", "memory://q"):
        told = says(elsewhere)
        assert "on a different store, which holdfast opens only on request" in told
        assert f"checkpoint_location={elsewhere}" in told
    for wrong in ("s3://key:secret@bucket/q", "file://host/q", "simplecache::s3://b/q", "~/query", "C:\\q"):
        with pytest.raises(InvalidArgumentError):
            says(wrong)
    assert set(opened) == {str(state_dir)}
    for absent in ("/dev", "/no/such", str(state_dir), f"file:{lab.folder}/input"):
        assert "was moved or deleted" in says(absent)

    # A query whose state is elsewhere; the same state as that of a copied directory.
    lab.configure({"state.dir": str(lab.folder / "other state")})
    lab.run(lab.totals(), "other")
    other = query_id(lab.folder / "other")
    with open_storage(str(state_dir)) as storage:
        note_location(storage, NotedLocation(right.state_id, other, str(lab.folder / "other"), "host"))
    assert "pointers name a different state directory" in run("get", state_dir, "totals", "key=a", status=1)
    with open_storage(str(state_dir)) as storage:
        note_location(storage, right)
    copied = shutil.copytree(state_dir, lab.folder / "copied state")
    assert "with --state-dir" in run("get", copied, "totals", "key=a", status=1)
    assert total(location, "totals", "--state-dir", copied) == total(state_dir) == 1
    assert total(state_dir, "totals", "--state-dir", state_dir) == 1
    (lab.folder / "link").symlink_to(state_dir)
    assert total(lab.folder / "link") == 1

    # A location that was left behind: the query goes on in a copy of it, and noted nothing since.
    shutil.copytree(location, lab.folder / "goes on")
    lab.configure({"state.dir": str(state_dir)})
    lab.feed([("a", 5)])
    ran(lab, "goes on")
    with open_storage(str(state_dir)) as storage:
        note_location(storage, right)
    assert "has run a later micro-batch than" in run("get", state_dir, "totals", "key=a", status=1)


def test_of_several_queries_the_operator_tells_which(lab: Lab) -> None:
    state_dir = lab.folder / "durable"
    lab.feed([("a", 1)])
    for name in ("first", "second"):
        ran(lab, name, name=name)
    assert total(state_dir, "second") == 1
    told = run("savepoint", "create", state_dir, "--to", lab.folder / "saved", "--name", "one", status=1)
    assert "of several queries: name the checkpointLocation" in told
    assert f"checkpointLocation file:{lab.folder}/first" in told
    with open_storage(str(state_dir)) as storage:
        claim = find_claim(storage, "first")
        assert claim is not None
        storage.delete([info.key for info in storage.list(f"_queries/{claim.query_id}.locations/")])
    assert "does not record where its query is" in run("get", state_dir, "first", "key=a", status=1)
    assert total(lab.folder / "first", "first") == 1


def test_a_new_query_is_noted_before_it_runs(lab: Lab) -> None:
    lab.feed([("a", 1)])
    lab.run(lab.totals())
    savepoints.create(lab.spark, lab.folder / "query", lab.folder / "saved", "one")
    restored = lab.folder / "restored state"
    run(
        *("savepoint", "restore", lab.folder / "saved", "one", "--state-dir", restored),
        *("--checkpoint-location", lab.folder / "restored"),
    )
    assert find_state_dir(lab.folder / "restored", {}) == str(restored)
    assert total(restored) == 1
    cloned = lab.folder / "cloned state"
    run("clone", restored, "--to-state-dir", cloned, "--checkpoint-location", lab.folder / "clone")
    with pytest.raises(NotFoundError, match="with --state-dir"):
        holdfast.open_query(cloned)
    assert total(lab.folder / "clone", "totals", "--state-dir", cloned) == 1
