"""The `filesystem` backend: run files on a local disk, which every worker of the machine maps."""

from __future__ import annotations

from holdfast.backends.run_files.backend import RunFilesBackend


class FilesystemBackend(RunFilesBackend):
    """Run files on a local disk, synced before a version appears.

    State may be larger than the machine's memory: look-ups touch only the pages they need, merges and scans
    read it in stretches, and the page cache keeps what is used. The files outlive the executor, and the
    next one on the machine takes them over: see `holdfast.spark_integration.executor.takeover`.
    """

    contract_version = 1
    fsync = True
