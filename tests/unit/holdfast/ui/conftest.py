"""The page of a sample directory, in process and without a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.ui import inquiry
from holdfast.ui.app import make_app
from holdfast.ui.site import Directory, Live, Site, looks_at_once
from tests.unit.holdfast.ui import sample_state
from tests.unit.holdfast.ui.places import SiteOf

TOKEN = "0123456789abcdef"


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_state.make(tmp_path_factory.mktemp("page") / "state")


@pytest.fixture
def open_page() -> Iterator[Callable[..., FlaskClient]]:
    with ExitStack() as stack:

        def opened(*roots: Path) -> FlaskClient:
            requests = stack.enter_context(ThreadPoolExecutor(4))
            surveys = stack.enter_context(ThreadPoolExecutor(looks_at_once(len(roots))))
            storages = [stack.enter_context(open_storage(str(root))) for root in roots]
            site = Site(tuple(Directory.of(n, one, requests, surveys) for n, one in enumerate(storages)), Live(list))
            return make_app(site, TOKEN, ["localhost"]).test_client()

        yield opened


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each request look again."""
    monkeypatch.setattr(inquiry, "SHOWN_MS", 0)
    monkeypatch.setattr(inquiry, "_REST", 0)


@pytest.fixture
def page(open_page: Callable[..., FlaskClient], sample: Path) -> FlaskClient:
    return open_page(sample)


@pytest.fixture
def site_of() -> Iterator[SiteOf]:
    """Return what makes a site of storages, and of the query that each location has."""
    with ExitStack() as stack:
        requests, surveys = (stack.enter_context(ThreadPoolExecutor(32)) for _ in range(2))

        def made(storages: list[ObjectStorage], join: Callable[[Directory, Directory], Any]) -> Site:
            named = [Directory.of(place, one, requests, surveys) for place, one in enumerate(storages)]
            for one in named:
                one.surveyor.latest()
            site = Site(named, Live(list), join)
            stack.callback(site.close)
            return site

        yield made
