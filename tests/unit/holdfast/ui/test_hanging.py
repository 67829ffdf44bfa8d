"""Stores that hang rather than fail: each view answers all the same, shows the rest, and leaves no threads behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.lookup.stored_query import StoredQuery
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from holdfast.ui import inquiry
from holdfast.ui.app import make_app
from holdfast.ui.site import Site
from tests import sink_logs
from tests.servers.programs import wait_until
from tests.unit.holdfast.commands.state_dir import put_record
from tests.unit.holdfast.ui.conftest import TOKEN
from tests.unit.holdfast.ui.places import SiteOf, Stored, directory, location
from tests.unit.holdfast.ui.test_awaited import plan, said

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
    answer = page.get(f"/{TOKEN}/{view}")
    assert time.monotonic() - begun < VIEW_S, view
    assert answer.status_code == 200, answer.text
    return said(answer.text)


@pytest.mark.slow(3)
def test_a_directory_that_hangs_holds_up_no_awaited_query(
    tmp_path: Path, site_of: SiteOf, answers: threading.Event
) -> None:
    """It is found in the directory that answers; the one that does not is asked once, however many look."""
    hangs = directory(tmp_path / "other", "other")
    hangs.faults.append(Fault("delay", action="get", key="totals/operator", times=None, wait=answers.wait))
    site = site_of([location(tmp_path / "query"), hangs], lambda _query, _home: Stored())
    page = page_of(site)
    for _ in range(3):
        text = shown(page)
        assert "the storage has not answered yet" in text
        assert "other" in shown(page, "1/other/")
    assert sum(one.keys == ("totals/operator",) for one in hangs.operations) == 1
    places = [location(tmp_path / "query"), hangs, directory(tmp_path / "state")]
    page = page_of(site_of(places, lambda _query, _home: Stored()))
    assert f"{tmp_path}/query" in shown(page)
    assert "Waiting for" not in shown(page)


@pytest.mark.slow(2)
def test_an_awaited_query_that_hangs_holds_up_no_view(
    tmp_path: Path, site_of: SiteOf, answers: threading.Event
) -> None:
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
        text = shown(page)
        assert f"{tmp_path}/hangs the storage has not answered yet" in text
        assert f"{tmp_path}/query 0" in text
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
    assert "it has not answered since" not in shown(page)
    stored.answers.clear()
    try:
        for _ in range(3):
            text = shown(page)
            assert f"{tmp_path}/one as of" in text
            assert f"{tmp_path}/two 0" in text
        begun = time.monotonic()
        found = site.directory(2).query_of("sessions", inquiry.Patience.of_a_view())
        assert time.monotonic() - begun < VIEW_S
        assert found is not None
        assert found[0].location.endswith("two")
    finally:
        stored.answers.set()
    wait_until(lambda: "it has not answered since" not in shown(page), list)


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
def test_an_empty_place_that_hangs_leaves_the_others_time(
    tmp_path: Path, site_of: SiteOf, answers: threading.Event
) -> None:
    """What is asked after it is answered in the same view."""
    empty = FaultyStorage(open_storage(str(tmp_path / "empty")))
    state = directory(tmp_path / "state")
    page = page_of(site_of([empty, state, location(tmp_path / "query")], lambda _query, _home: Stored()))
    empty.faults.append(Fault("delay", times=None, wait=answers.wait))
    put_record(state, "sessions")
    text = shown(page)
    assert "sessions" in text
    assert f"{tmp_path}/query 0" in text
    assert empty.faults[0].hits
