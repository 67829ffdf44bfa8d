"""Locations that show nothing yet: what the page says of them, and that it shows them once there is something."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from holdfast.errors import NotFoundError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.ui.directory import Awaited
from holdfast.ui.site import Site
from tests.unit.holdfast.commands.state_dir import put_record, run
from tests.unit.holdfast.ui.sample_state import QUERY
from tests.unit.holdfast.ui.serving import TOKEN, opened

pytestmark = pytest.mark.usefixtures("at_once")

FIRST = f"/{TOKEN}/"


def begin(location: Path) -> Path:
    """Make a query's checkpoint location, as Spark does before the first micro-batch."""
    location.mkdir(parents=True, exist_ok=True)
    (location / "metadata").write_text(json.dumps({"id": QUERY}))
    return location


def plan(location: Path, batch_id: int = 0) -> None:
    """Let the query plan a micro-batch."""
    (location / "offsets").mkdir(exist_ok=True)
    planned = {"batchWatermarkMs": 0, "batchTimestampMs": 1_700_000_000_000, "conf": {}}
    (location / f"offsets/{batch_id}").write_text(f'v1\n{json.dumps(planned)}\n{{"logOffset":0}}')


def said(text: str) -> str:
    """Return what a page says, without markup."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def test_what_is_empty_may_become_anything(tmp_path: Path) -> None:
    """Two empty places: the page says so, follows by itself, and knows each as soon as it is something."""
    state, location = tmp_path / "state", tmp_path / "query"
    with opened(location, state) as page:
        text = page.get(FIRST).text
        assert said(text).count("Empty, or it does not exist") == 2
        assert 'data-follow="5"' in text
        assert 'data-follow="0"' in page.get(f"{FIRST}?follow=0").text
        begin(location)
        assert "The query has not planned a micro-batch yet; waiting for its first commit." in said(
            page.get(FIRST).text
        )
        plan(location)
        assert "Micro-batch 0 is running or has failed; waiting for its commit." in said(page.get(FIRST).text)
        with open_storage(str(state)) as storage:
            put_record(storage)
        text = page.get(FIRST).text
        assert "Empty" not in said(text)
        assert ">totals</a>" in text
        assert page.get(f"{FIRST}1/totals/").status_code == 200
        assert page.get(f"{FIRST}0/totals/").status_code == 404


def test_a_query_alone_is_shown_with_its_directory(tmp_path: Path) -> None:
    """A place that becomes a query's needs a directory: the one that was given for queries, or the page says so."""
    with opened(tmp_path / "query") as page:
        assert "Empty" in page.get(FIRST).text
        begin(tmp_path / "query")
        assert "start the page with the state directory, too" in said(page.get(FIRST).text)
    (tmp_path / "query/metadata").unlink()
    with opened(tmp_path / "query", state_dir=tmp_path / "state") as page:
        assert said(page.get(FIRST).text).count("Empty, or it does not exist") == 2
        begin(tmp_path / "query")
        assert "waiting for its first commit" in said(page.get(FIRST).text)
        with open_storage(str(tmp_path / "state")) as storage:
            put_record(storage)
        assert ">totals</a>" in page.get(FIRST).text


def test_a_directory_that_is_a_query(tmp_path: Path) -> None:
    """Of two locations of queries none is the other's state directory."""
    one, other = begin(tmp_path / "one"), begin(tmp_path / "other")
    with pytest.raises(NotFoundError, match="holds only pointers"), opened(one, state_dir=other):
        pass


def test_a_place_that_is_named_twice(tmp_path: Path) -> None:
    """Written in two ways it is still one."""
    with open_storage(str(tmp_path / "state")) as storage:
        put_record(storage)
    with opened(tmp_path / "state", tmp_path / "state/../state") as page:
        assert ">Operators</h2>" in page.get(FIRST).text  # else each has its place for a heading


def test_what_a_query_stores_first_is_no_foreign_file(tmp_path: Path) -> None:
    """Before its record an operator has probes and claims: the directory is awaited, not refused."""
    with open_storage(str(tmp_path / "state")) as storage:
        storage.put("totals/probes/0123", b"probe")
        storage.put("_queries/0f1e2d3c", b"origin")
    with opened(tmp_path / "state") as page:
        assert "Nothing to show yet" in page.get(FIRST).text
        with open_storage(str(tmp_path / "state")) as storage:
            put_record(storage, "sessions")
        assert ">sessions</a>" in page.get(FIRST).text
        assert "not holdfast's" not in page.get(FIRST).text


def test_a_record_that_was_deleted(tmp_path: Path) -> None:
    """Of an operator that lost its record the page says that its state cannot be used, and shows the others."""
    with open_storage(str(tmp_path / "state")) as storage:
        put_record(storage)
        storage.put("sessions/shard-0000/commits/1-0123456789abcdef", b"commit")
    with opened(tmp_path / "state") as page:
        assert "without an operator record: sessions. Their state cannot be used." in said(page.get(FIRST).text)
        assert "Does anything fail? Yes The record of sessions is gone" in said(page.get(FIRST).text)
        assert "not holdfast's" not in page.get(FIRST).text
        (tmp_path / "state/totals/operator").unlink()
        (tmp_path / "state/totals").rmdir()
        assert "without an operator record: sessions. Their state cannot be used." in said(page.get(FIRST).text)


def test_a_directory_that_is_emptied(tmp_path: Path, sample: Path) -> None:
    """Beside another one that is not, a directory whose objects are deleted is awaited again; no view fails."""
    with open_storage(str(tmp_path / "state")) as storage:
        put_record(storage, "mine")
    with opened(tmp_path / "state", sample) as page:
        assert ">mine</a>" in page.get(FIRST).text
        (tmp_path / "state/mine/operator").unlink()
        text = said(page.get(FIRST).text)
        assert "Waiting for" in text
        assert "mine" not in text
        assert page.get(f"{FIRST}0/mine/").status_code == 404


def test_a_damaged_log_is_told_at_the_start(tmp_path: Path) -> None:
    """Waiting does not help there, so the command ends with it."""
    with open_storage(str(tmp_path / "state")) as storage:
        put_record(storage)
    plan(begin(tmp_path / "query"))
    (tmp_path / "query/commits").mkdir()
    (tmp_path / "query/commits/0").write_text("no log")
    with pytest.raises(NotFoundError, match="commits/0 is cut off"), opened(tmp_path / "state", tmp_path / "query"):
        pass


def test_the_directory_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for look-ups; the command says what it awaits."""
    monkeypatch.setattr("waitress.server.BaseWSGIServer.run", lambda _server: None)
    monkeypatch.setenv("HOLDFAST_STATE_DIR", str(tmp_path / "state"))
    result = run("ui", begin(tmp_path / "query"), "--port", "0")
    assert result.exit_code == 0
    assert f"waiting for {tmp_path}/query: The query has not planned a micro-batch yet" in result.stderr
    assert f"waiting for {tmp_path}/state: Empty" in result.stderr


def test_what_is_awaited_does_nothing_to_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be an error that names what somebody else has written."""
    monkeypatch.setattr("waitress.server.BaseWSGIServer.run", lambda _server: None)
    monkeypatch.setattr(Site, "awaited", lambda *_: [Awaited("there", "as \x1b]0;title\x07 says")])
    result = run("ui", tmp_path / "state", "--port", "0")
    assert r"waiting for there: as \x1b]0;title\x07 says" in result.stderr
