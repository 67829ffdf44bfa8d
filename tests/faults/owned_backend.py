"""A backend with one owner, for tests of what such a backend needs; `executor_process` registers it."""

from __future__ import annotations

from holdfast.backends.run_files.memory import MemoryBackend


class OwnedBackend(MemoryBackend):
    """The memory backend, if only one process could open it."""

    contract_version = 1
    has_one_owner = True
