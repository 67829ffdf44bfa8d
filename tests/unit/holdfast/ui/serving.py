"""The page of some directories: in process, or served on a free port of this machine."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flask.testing import FlaskClient

from holdfast.ui.app import make_app
from holdfast.ui.command import make_server
from holdfast.ui.site import Site, looks_at_once, open_site

TOKEN = "00112233445566778899aabbccddeeff"


def _site(stack: ExitStack, locations: Iterable[Path], **places: str | None) -> Site:
    given = [str(one) for one in locations]
    surveys = stack.enter_context(ThreadPoolExecutor(looks_at_once(len(given) + 1)))
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
