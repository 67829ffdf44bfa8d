"""The page of a sample directory, in process and without a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from holdfast.snapshotter.storage.opening import open_storage
from holdfast.ui.app import make_app
from holdfast.ui.site import Directory, Site
from holdfast.ui.views.live import Live
from tests.unit.holdfast.ui import sample_state

TOKEN = "0123456789abcdef"


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_state.make(tmp_path_factory.mktemp("page") / "state")


@pytest.fixture
def open_page() -> Iterator[Callable[..., FlaskClient]]:
    """Return what opens the page of some directories."""
    with ExitStack() as stack:

        def opened(*roots: Path) -> FlaskClient:
            requests = stack.enter_context(ThreadPoolExecutor(4))
            surveys = stack.enter_context(ThreadPoolExecutor(2))
            storages = [stack.enter_context(open_storage(str(root))) for root in roots]
            site = Site(tuple(Directory.of(n, one, requests, surveys) for n, one in enumerate(storages)), Live(list))
            return make_app(site, TOKEN, ["localhost"]).test_client()

        yield opened


@pytest.fixture
def page(open_page: Callable[..., FlaskClient], sample: Path) -> FlaskClient:
    return open_page(sample)
