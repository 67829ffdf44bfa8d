"""The commit logs of an executor's shards, for the state server: storages are opened once and shared."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

from holdfast.snapshotter.bandwidth import Bandwidth
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.snapshots import send_at_once
from holdfast.snapshotter.storage import ObjectStorage, open_storage, parse_storage_options
from holdfast.spark_integration.state_messages import Committed

STORAGES_KEPT = 8


class DurableLogs:
    """Makes commit logs.

    Parameters
    ----------
    executor : concurrent.futures.Executor
        Runs uploads.

    Notes
    -----
    Threads: any.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = threading.Lock()
        self._bandwidth: tuple[int, Bandwidth] | None = None
        self._storages: dict[tuple[str, tuple[tuple[str, str], ...]], ObjectStorage] = {}

    def log_of(self, message: Committed) -> ObjectCommitLog | None:
        """Return the log of the shard that a commit was made in; None where nothing is durable.

        Raises
        ------
        InvalidArgumentError
            The URL or an option of the storage is not good.
        """
        if message.checkpoint_dir is None:
            return None
        storage = self._storage(message.checkpoint_dir, message)
        return ObjectCommitLog(
            storage,
            message.prefix,
            message.shard.schemas(),
            self._executor,
            Path(message.shard.directory),
            message.shard.backend,
            before_part=self._pace(message.upload_bandwidth_bytes),
        )

    def _pace(self, bytes_per_second: int | None) -> Callable[[int], None]:
        if bytes_per_second is None:
            return send_at_once
        with self._lock:
            if self._bandwidth is None or self._bandwidth[0] != bytes_per_second:
                self._bandwidth = bytes_per_second, Bandwidth(bytes_per_second)
            return self._bandwidth[1].take

    def requests(self) -> dict[str, dict[str, int]]:
        """Return by URL how many requests and bytes went to and came from each storage."""
        with self._lock:
            return {storage.url: dict(storage.requests) for storage in self._storages.values()}

    def _storage(self, url: str, message: Committed) -> ObjectStorage:
        key = (url, tuple(sorted(message.storage_options.items())))
        with self._lock:
            if key not in self._storages:
                if len(self._storages) >= STORAGES_KEPT:  # such as those of credentials that were replaced
                    self._storages.pop(next(iter(self._storages))).close()
                self._storages[key] = open_storage(url, parse_storage_options(dict(message.storage_options)))
            return self._storages[key]
