"""Locks of folders, and what errors of the operating system mean."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.backends import local_files
from holdfast.backends.local.folder_locks import lock_shared, try_lock_alone
from holdfast.errors import NotFoundError

FOR_EVER = 2**63 - 1
#: Stages a folder, says so, and waits to be killed.
STAGES = """
import sys
from pathlib import Path
from holdfast.backends import local_files
with local_files.staged_folder(Path(sys.argv[1]), "made", fsync=False):
    print("staged", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    return tmp_path / "shard-0003" / "staging"


def test_what_is_being_made_is_no_leftover_however_old_it_is(staging: Path) -> None:
    with local_files.staged_folder(staging, "made", fsync=False) as staged:
        os.utime(staged.path, (0, 0))
        assert local_files.remove_stale_folders(staging, FOR_EVER) == 0
        assert staged.path.is_dir()
        assert not _is_free(staging.parent), "nor does anybody remove the shard"
    assert _is_free(staging.parent)


def test_what_is_taken_over_is_held_in_its_new_place(staging: Path, tmp_path: Path) -> None:
    """A server moves what a worker has restored, and the worker may be killed meanwhile."""
    folder = tmp_path / "shard-0003" / "restoring" / "1"
    folder.mkdir(parents=True)
    with local_files.taken_folder(folder, staging, "taken", fsync=False) as staged:
        assert not folder.exists()
        assert local_files.remove_stale_folders(staging, FOR_EVER) == 0
        assert staged.path.is_dir()


@pytest.mark.slow(0.5)
def test_what_a_killed_process_left_goes(staging: Path) -> None:
    """Its lock ended with it; until then another process sees that it is at work."""
    process = subprocess.Popen(
        [sys.executable, "-c", STAGES, staging], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "staged\n"
        assert local_files.remove_stale_folders(staging, FOR_EVER) == 0
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert local_files.remove_stale_folders(staging, 0) == 0, "a while is left to look at it"
    assert local_files.remove_stale_folders(staging, FOR_EVER) == 1
    assert os.listdir(staging) == []


def test_a_folder_that_was_taken_away_cannot_be_held(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    held = lock_shared(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "other")
    with pytest.raises(NotFoundError):
        lock_shared(tmp_path / "one")
    assert not _is_free(tmp_path / "other"), "the lock is the folder's, not the name's"
    held.close()
    held.close()
    assert _is_free(tmp_path / "other")


def test_a_folder_that_is_let_go_of_is_free(tmp_path: Path) -> None:
    """A view that nobody closes must not keep a shard for ever."""
    held = lock_shared(tmp_path)
    assert not _is_free(tmp_path)
    del held
    assert _is_free(tmp_path)


def test_a_plain_file_is_nobodys_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not _is_free(tmp_path / "file")
    assert not _is_free(tmp_path / "absent")


def _is_free(folder: Path) -> bool:
    with try_lock_alone(folder) as is_free:
        return is_free


MAPPED_UNDER_A_LIMIT = """
import resource, sys
from pathlib import Path
import pyarrow as pa
from holdfast.backends.local.errors import reading
from holdfast.errors import UnavailableError

path = Path(sys.argv[1])
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
try:
    with reading(path):
        pa.memory_map(str(path))
except UnavailableError as exc:
    print(exc)
"""


def test_a_limit_on_a_worker_s_memory_is_named_when_state_cannot_be_mapped(tmp_path: Path) -> None:
    """Spark limits the address space of workers, where mapped state counts: "cannot allocate memory" tells no one."""
    path = tmp_path / "run.arrow"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    done = subprocess.run(
        [sys.executable, "-c", MAPPED_UNDER_A_LIMIT, path], capture_output=True, text=True, check=True
    )
    assert f"local state at {path} cannot be mapped into memory: unset spark.executor.pyspark.memory" in done.stdout
    assert "limit_bytes=" in done.stdout
