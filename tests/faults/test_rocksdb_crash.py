"""Processes and disks that fail under the rocksdb backend; for kills see test_crash_at_every_write.py."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.errors import ClosedError, NotFoundError, UnavailableError
from holdfast.testing.state_rows import P1, P2, P3, TABLES, contents, counts, users

ROWS = 20_000

KEEP_OPEN = """
import sys, time
from pathlib import Path
from holdfast import clock
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.testing.state_rows import P1, TABLES, counts
backend = RocksDBBackend(Path(sys.argv[1]), TABLES, clock.new_id)
if P1 not in backend.versions():
    backend.apply(None, P1, counts(("ann", 1)), {})
print("open", flush=True)
time.sleep(60)
"""


def open_shard(directory: Path) -> RocksDBBackend:
    return RocksDBBackend(directory, TABLES, clock.new_id)


@contextmanager
def another_process(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the shard open."""
    command = [sys.executable, "-c", KEEP_OPEN, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == b"open\n", process.stderr.read()
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_a_shard_has_one_owner_at_a_time(tmp_path: Path) -> None:
    """The second process is told which one to stop; when that one is killed it can go on at once."""
    with another_process(tmp_path / "shard") as process, open_shard(tmp_path / "shard") as backend:
        for use in (backend.versions, lambda: backend.view(P1), lambda: backend.apply(None, P2, {}, {})):
            with pytest.raises(UnavailableError, match=f"stop process {process.pid},"):
                use()
        process.send_signal(signal.SIGKILL)
        process.wait()
        with backend.view(P1) as view:
            assert users(view, "ann") == [(1,)]


def test_two_backends_of_one_process_are_two_owners(tmp_path: Path) -> None:
    """A mistake that would otherwise be found much later."""
    with open_shard(tmp_path / "shard") as first:
        first.apply(None, P1, counts(("ann", 1)), {})
        with open_shard(tmp_path / "shard") as second, pytest.raises(UnavailableError, match=f"process {os.getpid()},"):
            second.versions()
        assert first.versions() == [P1]
    with open_shard(tmp_path / "shard") as third:
        assert third.versions() == [P1]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_says_so_at_once(tmp_path: Path) -> None:
    """Spark's daemon forks its workers: a database that was opened before hangs there, so it is not touched."""
    backend = open_shard(tmp_path / "shard")
    backend.apply(None, P1, counts(("ann", 1)), {})
    view = backend.view(P1)
    child = os.fork()
    if not child:
        signal.alarm(10)
        refused = 0
        for use in (
            backend.versions,
            lambda: backend.apply(P1, P2, counts(("ann", 2)), {}),
            lambda: users(view, "ann"),
            lambda: backend.freeze(P1),
        ):
            try:
                use()
            except ClosedError:
                refused += 1
        view.close()
        backend.close()
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 4
    assert users(view, "ann") == [(1,)]
    view.close()
    backend.close()


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond a few blocks: the kernel refuses writes as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def many(version: int) -> list[tuple[str, int]]:
    return [(f"user {os.urandom(8).hex()}", version) for _ in range(ROWS)]


def test_a_full_disk_loses_nothing_that_was_on_it(tmp_path: Path) -> None:
    """Each kind of write fails whole, with the reason; when there is space, the same backend goes on."""
    old, new = many(1), many(2)
    with open_shard(tmp_path / "shard") as backend:
        backend.apply(None, P1, counts(*old), {})
        backend.apply(P1, P2, counts(*new), {})
        with full_disk():
            with pytest.raises(UnavailableError, match=r"no space left.*free space") as failure:
                backend.freeze(P2)
            # What was not on disk yet is restored from its commits; what was is there.
            assert backend.versions() == [P1]
            with pytest.raises(NotFoundError):
                backend.view(P2)
            with backend.view(P1) as view:
                assert len(contents(view, "counts")) == ROWS
            with pytest.raises(UnavailableError, match="no space left"):
                backend.apply(None, P3, counts(*many(3)), {})
            with pytest.raises(UnavailableError, match="no space left"):
                backend.load(P3, counts(*many(3)), {})
        assert failure.value.retryable
        assert backend.versions() == [P1]
        assert os.listdir(tmp_path / "shard" / "staging") == []
        backend.apply(P1, P2, counts(*new), {})
        assert backend.freeze(P2)
        with backend.view(P2) as view:
            assert len(contents(view, "counts")) == 2 * ROWS
        backend.apply(P2, P3, counts(*many(3)), {})
        with full_disk(), pytest.raises(UnavailableError, match="no space left"):
            backend.close()
    with open_shard(tmp_path / "shard") as backend:
        assert backend.versions() == [P2]
        backend.apply(P2, P3, counts(("ann", 3)), {})
        with backend.view(P3) as view:
            assert users(view, "ann", old[0][0], new[0][0]) == [(3,), (1,), (2,)]


def test_a_disk_that_fills_in_the_background_is_told_by_a_later_commit(tmp_path: Path) -> None:
    """RocksDB flushes when it likes: the failure comes out at the next write, and no version is half there."""
    with RocksDBBackend(tmp_path / "shard", TABLES, clock.new_id, {"memory": "320m", "writeBufferRatio": "0.05"}) as b:
        b.apply(None, P1, counts(*many(1)), {})
        base = P1
        with full_disk(), pytest.raises(UnavailableError, match="no space left"):  # noqa: PT012
            for version in range(2, 200):
                b.apply(base, Pointer(version, "a"), counts(*many(version)), {})
                base = Pointer(version, "a")
        (held,) = b.versions()
        with b.view(held) as view:
            assert len(contents(view, "counts")) == held.version * ROWS
        b.apply(held, Pointer(999, "a"), counts(("ann", 1)), {})


def test_a_vanished_directory_is_an_error_and_not_an_empty_state(tmp_path: Path) -> None:
    """Somebody cleans the disk under a running executor."""
    with open_shard(tmp_path / "shard") as backend:
        backend.apply(None, P1, counts(*many(1)), {})
        backend.apply(P1, P2, counts(("ann", 1)), {})
        os.rename(tmp_path / "shard", tmp_path / "elsewhere")
        with pytest.raises(UnavailableError, match=r"cannot be used.*check that the directory exists"):
            backend.freeze(P2)
        with pytest.raises(NotFoundError):
            backend.view(P2)
        backend.load(P2, counts(("ann", 1)), {})
        with backend.view(P2) as view:
            assert contents(view, "counts") == {("ann",): (1,)}
