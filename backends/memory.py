"""The `memory` backend: run files in RAM, which every worker of the machine maps."""

from __future__ import annotations

from holdfast.backends.run_files import RunFilesBackend


class MemoryBackend(RunFilesBackend):
    """Run files in a directory of a RAM file system.

    The state lives as long as the executor: whoever places the directory (see
    `holdfast.spark_integration.local_dirs`) puts it into ``/dev/shm`` where that is large enough, and
    says so where it is not. Nothing is synced; a version that is lost is restored from its commits.
    """

    contract_version = 1
    in_memory = True
