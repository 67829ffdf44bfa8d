"""An object store that is as far away as one likes: a real S3 server behind a proxy that delays and counts requests.

::

    client ──▶ RequestCounts(latency_ms) ──▶ ObjectStore, or a server that runs already

    with DelayedStore(20) as store:
        subprocess.run(…, env={**os.environ, **store.environment})     # finds s3://bucket
        store.so_far()                                                 # {"PUT commits": 12, …}
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self

from holdfast.benches.instruments.object_store import BUCKET, ObjectStore
from holdfast.benches.instruments.request_counts import RequestCounts


class DelayedStore:
    """See the module; a context manager, which serves until its end.

    Parameters
    ----------
    latency_ms : float
        How much longer each request takes; those of different connections wait side by side.
    server : str
        URL of a server without TLS that runs already, for which the environment has credentials; by default one is
        started.

    Attributes
    ----------
    url : str
        What clients are to talk to.
    bucket : str
        One that the server started here has.
    environment : dict
        The variables that lead a client there; of a server that runs already, the endpoint alone.
    """

    def __init__(self, latency_ms: float = 0.0, server: str = "") -> None:
        self._latency_ms, self._server = latency_ms, server
        self._end = ExitStack()
        self._proxy: RequestCounts
        self.bucket = BUCKET
        self.url: str
        self.environment: dict[str, str]

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            credentials, server = {}, self._server
            if not server:
                own = undo.enter_context(ObjectStore())
                credentials, server = own.environment, own.url
            self._proxy = undo.enter_context(RequestCounts(server, self._latency_ms))
            self.url = self._proxy.url
            # The service's own variable wins over the general one: the user's would lead past the proxy.
            self.environment = {**credentials, "AWS_ENDPOINT_URL": self.url, "AWS_ENDPOINT_URL_S3": self.url}
            self._end = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.__exit__(kind, exc, trace)

    def so_far(self) -> dict[str, float]:
        """Return requests by method and kind of object, and the bytes of all bodies each way."""
        return self._proxy.so_far()
