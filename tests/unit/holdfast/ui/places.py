"""Locations for tests of which query belongs where: storages that fail or hang, and queries as their pointers name."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from flask.testing import FlaskClient

from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.spark_state.query_location import LoggedTimes
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from holdfast.ui.app import make_app
from holdfast.ui.command import make_server
from holdfast.ui.site import Site, open_site, survey_threads
from tests.unit.holdfast.commands.conftest import put_record

SiteOf = Callable[..., Site]


def _answered() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass
class Stored:
    """A query as its pointers name one operator's directory; `reads` counts, and waits for `answers`."""

    named: dict[str, str] = field(default_factory=lambda: {"totals": "query-1"})
    error: Exception | None = None
    reads: int = 0
    batch_id: int = 0
    query_id: str = "query-1"
    log: list[LoggedTimes] | None = None
    answers: threading.Event = field(default_factory=_answered)
    is_closed: threading.Event = field(default_factory=threading.Event)

    def times(self) -> list[LoggedTimes]:
        self.answers.wait()
        return self.log or [LoggedTimes(self.batch_id, 1_000, 2_000)]

    def directories(self) -> dict[str, str]:
        self.reads += 1
        self.answers.wait()
        if self.error:
            raise self.error
        return self.named

    def close(self) -> None:
        self.is_closed.set()


def directory(root: Path, operator: str = "totals", *faults: Fault) -> FaultyStorage:
    """Return a state directory with an operator of the query that `Stored` is."""
    storage = FaultyStorage(open_storage(str(root)))
    put_record(storage, operator)
    storage.faults += faults
    return storage


def location(root: Path, query_id: str = "query-1") -> FaultyStorage:
    root.mkdir(exist_ok=True)
    (root / "metadata").write_text(json.dumps({"id": query_id}))
    return FaultyStorage(open_storage(str(root)))


TOKEN = "00112233445566778899aabbccddeeff"


def _site(stack: ExitStack, locations: Iterable[Path], **places: str | None) -> Site:
    given = [str(one) for one in locations]
    surveys = stack.enter_context(ThreadPoolExecutor(survey_threads(len(given) + 1)))
    return open_site(given, {}, stack.enter_context(ThreadPoolExecutor(8)), surveys, stack, **places)


@contextmanager
def opened(*locations: Path, local_dir: str | None = None, state_dir: Path | None = None) -> Iterator[FlaskClient]:
    """Open the page of some directories and queries; yields what asks for it, below `TOKEN`."""
    with ExitStack() as stack:
        of_queries = str(state_dir) if state_dir else None
        site = _site(stack, locations, local_dir=local_dir, state_dir=of_queries)
        yield make_app(site, TOKEN, ["localhost"]).test_client()


@contextmanager
def served(*locations: Path, local_dir: str | None = None) -> Iterator[str]:
    """Serve the page of some directories; yields its address."""
    with ExitStack() as stack:
        site = _site(stack, locations, local_dir=local_dir)
        server = make_server(site, TOKEN, "127.0.0.1", 0)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.effective_port}/{TOKEN}/"
        finally:
            server.task_dispatcher.shutdown()
            # By the thread that serves: it may be waiting for these descriptors.
            server.trigger.pull_trigger(lambda: server.asyncore.close_all(server._map))
            thread.join()
