"""The page of a sample directory, in process and without a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.client.messages import RecentBatch
from holdfast.ui import inquiry
from holdfast.ui.inquiry import Inquiry
from holdfast.ui.site import Directory, Site
from tests.unit.holdfast.ui import sample_state
from tests.unit.holdfast.ui.places import SiteOf, opened


def no_batches(surveys: Executor) -> Inquiry[list[RecentBatch]]:
    """Return what a machine without state servers answers."""
    return Inquiry(list, surveys, "this machine")


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_state.make(tmp_path_factory.mktemp("page") / "state")


@pytest.fixture
def open_page() -> Iterator[Callable[..., FlaskClient]]:
    with ExitStack() as stack:
        yield lambda *roots: stack.enter_context(opened(*roots))


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
            site = Site(named, no_batches(surveys), join)
            stack.callback(site.close)
            return site

        yield made
