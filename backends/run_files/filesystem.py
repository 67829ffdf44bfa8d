"""The `filesystem` backend: run files on a local disk, which every worker of the machine maps."""

from __future__ import annotations

import os

from holdfast.backends.local_files import DURABLE
from holdfast.backends.run_files.backend import RunFilesBackend


class FilesystemBackend(RunFilesBackend):
    """Run files on a local disk.

    State may be larger than the machine's memory: look-ups touch only the pages they need, merges and scans
    read it in stretches, and the page cache keeps what is used. The files outlive the executor, and the
    next one on the machine takes them over: see `holdfast.spark_integration.executor.takeover`.

    They are synced before a version appears, unless the shard's directory is marked as durable elsewhere
    (`holdfast.backends.local_files.DURABLE`): then a power cut may damage them, and who takes the directory over
    verifies every byte, and restores what was lost.
    """

    contract_version = 2

    def _must_sync(self) -> bool:
        return not os.path.exists(self.directory / DURABLE)
