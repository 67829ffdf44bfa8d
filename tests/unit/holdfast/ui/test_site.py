"""Which query belongs to which directory, while stores fail, are slow, and locations become something else."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import CorruptionError, UnavailableError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from holdfast.ui import survey
from holdfast.ui.site import Directory, Site
from holdfast.ui.views.live import Live
from holdfast.ui.views.overview import overview
from tests.unit.holdfast.commands.checkpoint import put_record

SiteOf = Callable[..., Site]


@dataclass
class Stored:
    """A query as its pointers name one operator's directory; `reads` counts."""

    named: dict[str, str] = field(default_factory=lambda: {"totals": "query-1"})
    error: Exception | None = None
    reads: int = 0
    query_id: str = "query-1"

    def newest_planned(self) -> int:
        return 0

    def batches(self) -> list[int]:
        return [0]

    def directories(self) -> dict[str, str]:
        self.reads += 1
        if self.error:
            raise self.error
        return self.named

    def operators(self) -> list[Any]:
        return []


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request looks again."""
    monkeypatch.setattr(survey, "SHOWN_MS", 0)
    monkeypatch.setattr(survey, "_REST", 0)


@pytest.fixture
def site_of() -> Iterator[SiteOf]:
    """Return what makes a site of storages, and of the query that each location has."""
    with ExitStack() as stack:
        requests, surveys = (stack.enter_context(ThreadPoolExecutor(8)) for _ in range(2))

        def made(storages: list[ObjectStorage], join: Callable[[Directory, Directory], Any]) -> Site:
            named = [Directory.of(place, one, requests, surveys) for place, one in enumerate(storages)]
            for one in named:
                one.surveyor.latest()
            return Site(named, Live(list), join)

        yield made


def directory(root: Path, operator: str = "totals", *faults: Fault) -> FaultyStorage:
    storage = FaultyStorage(open_storage(str(root)))
    put_record(storage, operator)
    storage.faults += faults
    return storage


def location(root: Path, query_id: str = "query-1") -> FaultyStorage:
    root.mkdir(exist_ok=True)
    (root / "metadata").write_text(json.dumps({"id": query_id}))
    return FaultyStorage(open_storage(str(root)))


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
    broken.error = CorruptionError("its log is damaged")
    assert home.query_of("sessions") == (whole, "sessions")
    with pytest.raises(CorruptionError):
        home.query_of("totals")


def test_a_location_that_is_begun_again(tmp_path: Path, site_of: SiteOf) -> None:
    """A checkpoint location that was deleted is empty; the next query there is read anew, not as the one before."""
    opened: list[Stored] = []

    def join(_query: Directory, _home: Directory) -> Stored:
        opened.append(Stored())
        return opened[-1]

    site = site_of([location(tmp_path / "query"), directory(tmp_path / "state")], join)
    first = site.directory(1).queries[0].stored
    assert site.directory(1).queries[0].stored is first
    (tmp_path / "query/metadata").unlink()
    assert ["Empty" in one.what for one in site.awaited()] == [True]
    location(tmp_path / "query", "query-2")
    assert site.directory(1).queries[0].stored is not first
    assert len(opened) == 2


def test_a_directory_may_become_a_query(tmp_path: Path, site_of: SiteOf) -> None:
    """What was a directory when it was listed last is what it is now."""
    site = site_of([directory(tmp_path / "a", "a"), directory(tmp_path / "state")], lambda _query, _home: Stored())
    assert len(overview(site).directories) == 2
    shutil.rmtree(tmp_path / "a")
    location(tmp_path / "a")
    overview(site)  # lists it
    assert [one.place for one in overview(site).directories] == [1]
    assert [len(one.queries) for one in site.look()[0]] == [1]


def test_what_a_view_costs(tmp_path: Path, site_of: SiteOf) -> None:
    """No directory is listed but the one that is looked at; pointers are read once, not for each directory."""
    homes = [directory(tmp_path / f"state-{n}", f"operator-{n}") for n in range(4)]
    stored = Stored()
    site = site_of([location(tmp_path / "query"), *homes], lambda _query, _home: stored)
    for home in homes:
        home.operations.clear()
    site.directory(1).surveyor.latest()
    listed = [sum(one.action == "list" for one in home.operations) for home in homes]
    assert listed == [1, 0, 0, 0]
    stored.reads = 0
    overview(site)
    assert stored.reads == 1


def test_empty_places_that_are_slow_are_waited_for_together(
    tmp_path: Path, site_of: SiteOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that hangs holds each view up for a moment, however many empty places lie there."""
    monkeypatch.setattr("holdfast.ui.site.PATIENCE_S", 0.5)
    answered = threading.Event()
    slow = [FaultyStorage(open_storage(str(tmp_path / f"empty-{n}"))) for n in range(4)]
    site = site_of([*slow, directory(tmp_path / "state")], lambda _query, _home: Stored())
    for one in slow:
        one.faults.append(Fault("delay", times=None, wait=answered.wait))
    begun = time.monotonic()
    try:
        assert site.directory(4).place == 4
        assert time.monotonic() - begun < 1.5
    finally:
        answered.set()
