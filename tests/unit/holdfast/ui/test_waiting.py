"""Stores that hang, and locations that show nothing yet: each view answers all the same, and shows the rest."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from holdfast.errors import NotFoundError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.lookup.stored_query import StoredQuery
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from holdfast.ui import inquiry
from holdfast.ui.app import make_app
from holdfast.ui.site import Awaited, Site
from tests import sink_logs
from tests.servers.programs import wait_until
from tests.unit.holdfast.commands.conftest import put_record, run
from tests.unit.holdfast.ui.places import TOKEN, SiteOf, Stored, directory, location, opened
from tests.unit.holdfast.ui.sample_state import QUERY
from tests.unit.holdfast.ui.test_views import text

pytestmark = pytest.mark.usefixtures("at_once")

#: A view waits for two seconds, and a little for what hangs beside; a store that hangs here, for ever.
VIEW_S = 8.0


@pytest.fixture
def answers(site_of: SiteOf) -> Iterator[threading.Event]:
    """Return what ends the hanging, at the latest after the test, and before its threads are waited for."""
    event = threading.Event()
    yield event
    event.set()


def page_of(site: Site) -> FlaskClient:
    return make_app(site, TOKEN, ["localhost"]).test_client()


def shown(page: FlaskClient, view: str = "") -> str:
    """Open a view in time; return what it says."""
    begun = time.monotonic()
    found = text(page, view)
    assert time.monotonic() - begun < VIEW_S, view
    return found


@pytest.mark.slow(3)
def test_a_hanging_directory_holds_up_no_query(tmp_path: Path, site_of: SiteOf, answers: threading.Event) -> None:
    """It is found in the directory that answers; the one that does not is asked once, however many look."""
    hangs = directory(tmp_path / "other", "other")
    hangs.faults.append(Fault("delay", action="get", key="totals/operator", times=None, wait=answers.wait))
    site = site_of([location(tmp_path / "query"), hangs], lambda _query, _home: Stored())
    page = page_of(site)
    for _ in range(3):
        told = shown(page)
        assert "the storage has not responded yet" in told
        assert "other" in shown(page, "1/other/")
    assert sum(one.keys == ("totals/operator",) for one in hangs.operations) == 1
    places = [location(tmp_path / "query"), hangs, directory(tmp_path / "state")]
    page = page_of(site_of(places, lambda _query, _home: Stored()))
    assert f"{tmp_path}/query" in shown(page)
    assert "Waiting for" not in shown(page)


@pytest.mark.slow(2)
def test_a_hanging_query_holds_up_no_view(tmp_path: Path, site_of: SiteOf, answers: threading.Event) -> None:
    """Its location lists no micro-batches: the page says so, and shows the directory and the other query."""
    places = [location(tmp_path / "hangs"), location(tmp_path / "query"), directory(tmp_path / "state")]
    plan(tmp_path / "hangs")
    places[0].faults.append(Fault("delay", action="list", times=None, wait=answers.wait))

    def join(query: object, _home: object) -> object:
        if query.place:  # type: ignore[attr-defined]
            return Stored()
        state = open_storage(str(tmp_path / "state"))
        return StoredQuery(places[0], state, ThreadPoolExecutor(2))

    page = page_of(site_of(places, join))
    for _ in range(3):
        told = shown(page)
        assert f"{tmp_path}/hangs the storage has not responded yet" in told
        assert f"{tmp_path}/query 0" in told
        assert "totals" in shown(page, "2/totals/")
    answers.set()
    wait_until(lambda: "Micro-batch 0 is running or has failed; waiting for its commit." in shown(page), list)


def test_known_queries_are_not_waited_for(tmp_path: Path, site_of: SiteOf, answers: threading.Event) -> None:
    """Whose location it is, is asked again behind the page: one that hangs costs no view anything."""
    query = location(tmp_path / "query")
    page = page_of(site_of([query, directory(tmp_path / "state")], lambda _query, _home: Stored()))
    assert f"{tmp_path}/query 0" in shown(page)
    query.faults.append(Fault("delay", action="get", key="metadata", times=None, wait=answers.wait))
    query.operations.clear()
    begun = time.monotonic()
    for _ in range(10):
        assert f"{tmp_path}/query 0" in shown(page)
    assert time.monotonic() - begun < VIEW_S  # waiting for it would take 20 s
    assert sum(one.keys == ("metadata",) for one in query.operations) == 1


@pytest.mark.slow(1)
def test_of_a_query_that_hangs_the_last_answer_stays(tmp_path: Path, site_of: SiteOf, answers: threading.Event) -> None:
    """The page says how old it is; rows of another query in that directory are found."""
    stored, other = Stored(), Stored({"sessions": "query-1"})
    state = directory(tmp_path / "state")
    put_record(state, "sessions")
    places = [location(tmp_path / "one"), location(tmp_path / "two"), state]
    site = site_of(places, lambda query, _home: (stored, other)[query.place])
    page = page_of(site)
    assert "no response since" not in shown(page)
    stored.answers.clear()
    try:
        for _ in range(3):
            told = shown(page)
            assert f"{tmp_path}/one as of" in told
            assert f"{tmp_path}/two 0" in told
        begun = time.monotonic()
        found = site.directory(2).query_of("sessions", inquiry.Patience.of_a_view())
        assert time.monotonic() - begun < VIEW_S
        assert found is not None
        assert found[0].location.endswith("two")
    finally:
        stored.answers.set()
    wait_until(lambda: "no response since" not in shown(page), list)


@pytest.mark.slow(1)
def test_decisions_that_hang_hold_up_no_view(tmp_path: Path, site_of: SiteOf, answers: threading.Event) -> None:
    """What was read with the listing before is shown."""
    state = directory(tmp_path / "state")
    sink_logs.decide(state, "invoices", "query-1", 7, {"gid": "a"}, rows=1_000)
    page = page_of(site_of([state], lambda _query, _home: Stored()))
    assert "invoices micro-batch 7 1,000" in shown(page)
    state.faults.append(Fault("delay", action="get", times=None, wait=answers.wait))
    for _ in range(3):
        assert "invoices micro-batch 7 1,000" in shown(page)
    assert state.faults[0].hits


@pytest.mark.slow(2)
def test_a_hanging_place_leaves_the_others_time(tmp_path: Path, site_of: SiteOf, answers: threading.Event) -> None:
    """What is asked after it is answered in the same view."""
    empty = FaultyStorage(open_storage(str(tmp_path / "empty")))
    state = directory(tmp_path / "state")
    page = page_of(site_of([empty, state, location(tmp_path / "query")], lambda _query, _home: Stored()))
    empty.faults.append(Fault("delay", times=None, wait=answers.wait))
    put_record(state, "sessions")
    told = shown(page)
    assert "sessions" in told
    assert f"{tmp_path}/query 0" in told
    assert empty.faults[0].hits


FIRST = f"/{TOKEN}/"


def begin(location: Path) -> Path:
    """Make a query's checkpoint location, as Spark does before the first micro-batch."""
    location.mkdir(parents=True, exist_ok=True)
    (location / "metadata").write_text(json.dumps({"id": QUERY}))
    return location


def plan(location: Path, batch_id: int = 0) -> None:
    (location / "offsets").mkdir(exist_ok=True)
    planned = {"batchWatermarkMs": 0, "batchTimestampMs": 1_700_000_000_000, "conf": {}}
    (location / f"offsets/{batch_id}").write_text(f'v1\n{json.dumps(planned)}\n{{"logOffset":0}}')


def test_what_is_empty_may_become_anything(tmp_path: Path) -> None:
    """Two empty places: the page says so, follows by itself, and knows each as soon as it is something."""
    state, location = tmp_path / "state", tmp_path / "query"
    with opened(location, state) as page:
        assert text(page).count("Empty, or it does not exist") == 2
        assert 'data-follow="5"' in page.get(FIRST).text
        assert 'data-follow="0"' in page.get(f"{FIRST}?follow=0").text
        begin(location)
        assert "The query has not planned a micro-batch yet; waiting for its first commit." in text(page)
        plan(location)
        assert "Micro-batch 0 is running or has failed; waiting for its commit." in text(page)
        directory(state)
        assert "Empty" not in text(page)
        assert ">totals</a>" in page.get(FIRST).text
        assert page.get(f"{FIRST}1/totals/").status_code == 200
        assert page.get(f"{FIRST}0/totals/").status_code == 404


def test_a_query_alone_is_shown_with_its_directory(tmp_path: Path) -> None:
    """A place that becomes a query's needs a directory: the one that was given for queries, or the page says so."""
    with opened(tmp_path / "query") as page:
        assert "Empty" in page.get(FIRST).text
        begin(tmp_path / "query")
        assert "restart `holdfast ui` with the state directory, too" in text(page)
    (tmp_path / "query/metadata").unlink()
    with opened(tmp_path / "query", state_dir=tmp_path / "state") as page:
        assert text(page).count("Empty, or it does not exist") == 2
        begin(tmp_path / "query")
        assert "waiting for its first commit" in text(page)
        directory(tmp_path / "state")
        assert ">totals</a>" in page.get(FIRST).text


def test_a_directory_that_is_a_query(tmp_path: Path) -> None:
    """Of two locations of queries none is the other's state directory."""
    one, other = begin(tmp_path / "one"), begin(tmp_path / "other")
    with pytest.raises(NotFoundError, match="holds only pointers"), opened(one, state_dir=other):
        pass


def test_a_place_that_is_named_twice(tmp_path: Path) -> None:
    directory(tmp_path / "state")
    with opened(tmp_path / "state", tmp_path / "state/../state") as page:
        assert ">Operators</h2>" in page.get(FIRST).text  # else each has its place for a heading


def test_what_a_query_stores_first_is_no_foreign_file(tmp_path: Path) -> None:
    """Before its record an operator has probes and claims: the directory is awaited, not refused."""
    with open_storage(str(tmp_path / "state")) as storage:
        storage.put("totals/probes/0123", b"probe")
        storage.put("_queries/0f1e2d3c", b"origin")
    with opened(tmp_path / "state") as page:
        assert "Nothing to show yet" in page.get(FIRST).text
        directory(tmp_path / "state", "sessions")
        assert ">sessions</a>" in page.get(FIRST).text
        assert "not holdfast's" not in page.get(FIRST).text


def test_a_record_that_was_deleted(tmp_path: Path) -> None:
    """Of an operator that lost its record the page says that its state cannot be used, and shows the others."""
    with open_storage(str(tmp_path / "state")) as storage:
        put_record(storage)
        storage.put("sessions/shard-0000/commits/1-0123456789abcdef", b"commit")
    with opened(tmp_path / "state") as page:
        assert "without an operator record: sessions. Their state cannot be used." in text(page)
        assert "Is anything failing? Yes The record of sessions is gone" in text(page)
        assert "not holdfast's" not in page.get(FIRST).text
        (tmp_path / "state/totals/operator").unlink()
        (tmp_path / "state/totals").rmdir()
        assert "without an operator record: sessions. Their state cannot be used." in text(page)


def test_a_directory_that_is_emptied(tmp_path: Path, sample: Path) -> None:
    directory(tmp_path / "state", "mine")
    with opened(tmp_path / "state", sample) as page:
        assert ">mine</a>" in page.get(FIRST).text
        (tmp_path / "state/mine/operator").unlink()
        told = text(page)
        assert "Waiting for" in told
        assert "mine" not in told
        assert page.get(f"{FIRST}0/mine/").status_code == 404


def test_a_damaged_log_is_told_at_the_start(tmp_path: Path) -> None:
    """Waiting does not help there, so the command ends with it."""
    directory(tmp_path / "state")
    plan(begin(tmp_path / "query"))
    (tmp_path / "query/commits").mkdir()
    (tmp_path / "query/commits/0").write_text("no log")
    with pytest.raises(NotFoundError, match="commits/0 is cut off"), opened(tmp_path / "state", tmp_path / "query"):
        pass


def test_the_directory_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
