"""Which query belongs to which directory, while stores fail, are slow, and locations become something else."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest

from holdfast.errors import CorruptionError, NotFoundError, UnavailableError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from holdfast.ui import inquiry
from holdfast.ui.directory import Directory
from holdfast.ui.inquiry import Patience
from holdfast.ui.views.overview import overview
from tests.servers.programs import wait_until
from tests.unit.holdfast.commands.state_dir import put_record
from tests.unit.holdfast.ui.places import SiteOf, Stored, directory, location

pytestmark = pytest.mark.usefixtures("at_once")


def test_a_directory_that_does_not_answer_hides_no_other(tmp_path: Path, site_of: SiteOf) -> None:
    """A query belongs where its state is, whatever another directory says; where none has it, the page says why."""
    gone = directory(tmp_path / "other", "other")
    places = [location(tmp_path / "query"), gone, directory(tmp_path / "state")]
    stored = Stored()
    site = site_of(places, lambda _query, _home: stored)
    gone.faults.append(Fault("fail", action="get", key="totals/operator", times=None))
    assert [len(one.queries) for one in site.look()[0]] == [0, 1]
    assert site.awaited() == []
    alone = site_of([places[0], gone], lambda _query, _home: stored)
    assert [one.what for one in alone.awaited()] == [str(UnavailableError("injected fault"))]
    assert alone.directory(1).queries == ()
    gone.faults.clear()
    assert "has the operator totals" in alone.awaited()[0].what


def test_a_query_that_cannot_be_read_hides_no_other(tmp_path: Path, site_of: SiteOf) -> None:
    """Of two queries in one directory one is damaged: rows of the other's operators are still found."""
    state = directory(tmp_path / "state")
    put_record(state, "sessions")
    broken, whole = Stored(), Stored({"sessions": "query-1"})
    queries = [broken, whole]
    places = [location(tmp_path / "one"), location(tmp_path / "two"), state]
    site = site_of(places, lambda query, _home: queries[query.place])
    home = site.directory(2)
    broken.error, broken.batch_id = CorruptionError("its log is damaged"), 1
    found = home.query_of("sessions", Patience.of_a_view())
    assert found is not None
    with found[0].reading() as stored:
        assert (stored, found[1]) == (whole, "sessions")
    found = home.query_of("totals", Patience.of_a_view())  # as its pointers said last; whoever reads it sees the error
    assert found is not None
    with found[0].reading() as stored:
        assert stored is broken
    with pytest.raises(CorruptionError):
        home.query_of("unknown", Patience.of_a_view())


def test_a_location_that_is_begun_again(tmp_path: Path, site_of: SiteOf) -> None:
    """A checkpoint location that was deleted is empty; the next query there is read anew, and the one before closed."""
    opened: list[Stored] = []

    def join(_query: Directory, _home: Directory) -> Stored:
        opened.append(Stored())
        return opened[-1]

    site = site_of([location(tmp_path / "query"), directory(tmp_path / "state")], join)
    first = site.directory(1).queries[0]
    assert site.directory(1).queries[0] is first
    with first.reading():
        (tmp_path / "query/metadata").unlink()
        wait_until(lambda: ["Empty" in one.what for one in site.awaited()] == [True], list)
        assert not opened[0].is_closed.is_set()
    assert opened[0].is_closed.wait(10)
    with pytest.raises(NotFoundError, match="was deleted"), first.reading():
        pass
    location(tmp_path / "query", "query-2")
    second = site.directory(1).queries[0]
    location(tmp_path / "query", "query-3")
    wait_until(lambda: site.directory(1).queries[0] is not second, list)
    assert opened[1].is_closed.wait(10)
    assert len(opened) == 3
    assert not opened[2].is_closed.is_set()
    site.close()
    assert opened[2].is_closed.wait(10)


def test_a_directory_may_become_a_query(tmp_path: Path, site_of: SiteOf) -> None:
    """What was a directory when it was listed last is what it is now."""
    site = site_of([directory(tmp_path / "a", "a"), directory(tmp_path / "state")], lambda _query, _home: Stored())
    assert len(overview(site, 0).directories) == 2
    shutil.rmtree(tmp_path / "a")
    location(tmp_path / "a")
    overview(site, 0)  # lists it
    assert [one.place for one in overview(site, 0).directories] == [1]
    assert [len(one.queries) for one in site.look()[0]] == [1]


def test_what_a_view_costs(tmp_path: Path, site_of: SiteOf) -> None:
    """No directory is listed but the one that is looked at; pointers are read once a micro-batch, for all of them."""
    homes = [directory(tmp_path / f"state-{n}", f"operator-{n}") for n in range(4)]
    stored = Stored()
    site = site_of([location(tmp_path / "query"), *homes], lambda _query, _home: stored)
    for home in homes:
        home.operations.clear()
    site.directory(1).surveyor.latest()
    listed = [sum(one.action == "list" for one in home.operations) for home in homes]
    assert listed == [1, 0, 0, 0]
    overview(site, 0)
    assert stored.reads == 1
    stored.batch_id = 1
    overview(site, 0)
    assert stored.reads == 2


@pytest.mark.slow(1)
def test_empty_places_that_are_slow_are_waited_for_together(
    tmp_path: Path, site_of: SiteOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that hangs holds each view up for a moment, however many empty places lie there."""
    monkeypatch.setattr(inquiry, "PATIENCE_S", 1)
    answered = threading.Event()
    slow = [FaultyStorage(open_storage(str(tmp_path / f"empty-{n}"))) for n in range(8)]
    site = site_of([*slow, directory(tmp_path / "state")], lambda _query, _home: Stored())
    for one in slow:
        one.faults.append(Fault("delay", times=None, wait=answered.wait))
    begun = time.monotonic()
    try:
        assert site.directory(8).place == 8
        assert time.monotonic() - begun < 5
        for one in slow:
            one.assert_all_hit()
    finally:
        answered.set()
