"""What only local disks can get wrong: crashes between system calls, modes, links, full and read-only disks."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConflictError, InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from tests.faults.elsewhere import run_python


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "made" / "root"


@pytest.fixture
def storage(root: Path) -> Iterator[ObjectStorage]:
    with open_storage(f"file://{root}") as storage:
        yield storage


CRASHING = """
import os, sys
from holdfast.snapshotter.storage.opening import open_storage
root, data = sys.argv[1], b"0123456789" * 1000

def crash_at(nth):
    # Every system call of a put, counted; the nth ends the process, half way where there is a half.
    state = {"count": 0}
    def wrap(name):
        call = getattr(os, name)
        def counted(*args, **kwargs):
            state["count"] += 1
            if state["count"] == nth:
                if name == "pwrite":
                    call(args[0], args[1][:len(args[1]) // 2], args[2])
                os._exit(9)
            return call(*args, **kwargs)
        setattr(os, name, counted)
    for name in ("open", "mkdir", "chmod", "fchmod", "pwrite", "fsync", "close", "replace"):
        wrap(name)
    open_storage(f"{root}/{nth}/made").put("folder/below/key", data)
    os._exit(0)

nth = 0
while True:
    nth += 1
    child = os.fork()
    if not child:
        crash_at(nth)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open_storage(f"{root}/{nth}/made") as storage:
        found = [(info.key, info.size_bytes) for info in storage.list("")]
        whole = [("folder/below/key", len(data))]
        assert found in ([], whole), (nth, found)
        if found:
            assert storage.get("folder/below/key") == data
        storage.put("folder/below/key", data)
        assert storage.get("folder/below/key") == data
        assert [(info.key, info.size_bytes) for info in storage.list("")] == whole
        storage.delete(["folder/below/key"])
    print(code, len(found))
    if code == 0:
        break
    assert code == 9
"""


@pytest.mark.slow(1)
def test_crash_at_every_system_call(tmp_path: Path) -> None:
    done = run_python("-c", CRASHING, tmp_path, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    outcomes = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert outcomes[-1] == (0, 1)
    assert len(outcomes) > 20
    found = [count for _, count in outcomes]
    assert found == sorted(found), "once the object is there it stays"
    assert sum(found[:-1]) > 0, "some crashes come after the rename"


class Calls:
    """Records the order of system calls, and fails one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self.failing: dict[str, int] = {}
        for name in ("open", "mkdir", "pwrite", "fsync", "replace", "link"):
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, call: Any) -> Any:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.made.append(name)
            if name in self.failing:
                number = self.failing[name]
                raise OSError(number, os.strerror(number))
            return call(*args, **kwargs)

        return recorded


def test_file_and_folder_are_synced_around_the_rename(storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.put("a/first", b"1")
    calls = Calls(monkeypatch)
    storage.put("a/b", b"1")
    assert calls.made[-4:] == ["pwrite", "fsync", "replace", "fsync"]
    assert calls.made.count("fsync") == 2


def test_a_taken_key_is_synced_before_that_is_said(storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever took it may have died before the sync of the folder: "it is there" must hold after a crash, too."""
    storage.put("a/first", b"1")
    calls = Calls(monkeypatch)
    for _ in range(2):
        storage.put_if_absent("a/b", b"1")
        made = [call for call in calls.made if call != "open"]
        assert made == ["pwrite", "fsync", "link", "fsync"]
        calls.made.clear()


def test_a_temporary_name_that_is_free_again_may_be_another_process_s(
    storage: ObjectStorage, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers give their processes the same numbers: one took away what the other was about to rename."""
    replace = os.replace

    def replace_and_take(temporary: str, name: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        replace(temporary, name, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        (root / "a" / temporary).write_bytes(b"another's")

    monkeypatch.setattr(os, "replace", replace_and_take)
    storage.put("a/b", b"1")
    left = [path.read_bytes() for path in (root / "a").glob(".tmp-*")]
    assert left == [b"another's"]


@pytest.mark.parametrize("call", ["replace", "link"])
def test_a_put_whose_file_is_taken_away_may_be_tried_again(
    storage: ObjectStorage, root: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """As by a clean-up without a grace period. It was "no such object", which says that a version was dropped."""
    real = getattr(os, call)

    def after_a_clean_up(*args: Any, **kwargs: Any) -> None:
        with open_storage(str(root)) as other:
            assert other.abort_unfinished_uploads("", before_ms=1 << 52) == 1
        real(*args, **kwargs)

    put = storage.put if call == "replace" else storage.put_if_absent
    with monkeypatch.context() as patched:
        patched.setattr(os, call, after_a_clean_up)
        with pytest.raises(UnavailableError, match="the object vanished while it was written"):
            put("a/b", b"1")
    assert storage.list("") == []
    put("a/b", b"1")
    assert storage.get("a/b") == b"1"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EACCES, 524], ids=str)
def test_a_disk_without_links(storage: ObjectStorage, root: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """It is refused, and nothing is left: two drivers could overwrite each other's decisions.

    Gateways from NFS to object stores answer 524, which no header names.
    """

    def link(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(InvalidArgumentError, match=r"no conditional put.*hard links"):
        storage.put_if_absent("a/k", b"mine")
    assert os.listdir(root / "a") == []
    storage.put("a/k", b"mine")
    with pytest.raises(ConflictError):
        storage.put_if_absent("a/k", b"your")
    storage.put("f/g/h", b"1")
    with pytest.raises(InvalidArgumentError, match="collides"):
        storage.put_if_absent("f/g", b"1")


def test_a_taken_key_is_deleted_at_once(storage: ObjectStorage, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it was the same is not known any more: try again."""
    link = os.link

    def deleted_at_once(*arguments: Any, **options: Any) -> None:
        try:
            link(*arguments, **options)
        finally:
            (root / "k").unlink()

    storage.put("k", b"mine")
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", deleted_at_once)
        with pytest.raises(UnavailableError, match="deleted meanwhile"):
            storage.put_if_absent("k", b"mine")
    storage.put_if_absent("k", b"mine")
    assert storage.get("k") == b"mine"


def test_a_folder_new_to_this_instance_is_synced_whoever_made_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "a" / "b").mkdir(parents=True)
    calls = Calls(monkeypatch)
    with open_storage(str(root)) as storage:
        storage.put("a/b/c", b"1")
    assert calls.made.count("fsync") == 4  # root, a, the file, b


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace"])
def test_bad_disk(storage: ObjectStorage, root: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    storage.put("a/kept", b"1")
    with monkeypatch.context() as patch:
        Calls(patch).failing[call] = number
        with pytest.raises(UnavailableError, match=f"action=put key=a/b storage=file://{root}") as raised:
            storage.put("a/b", b"1" * 10_000)
    assert ("no space left" in str(raised.value)) == (number != errno.EIO)
    assert isinstance(raised.value.__cause__, OSError)
    assert [path.name for path in (root / "a").iterdir()] == ["kept"]
    storage.put("a/b", b"2")
    assert storage.get("a/b") == b"2"


@pytest.mark.slow(0.5)
def test_full_device(tmp_path: Path) -> None:
    """A real one: the limit on a file's size acts as the end of the disk."""
    code = """
import resource, signal, sys
from holdfast.errors import UnavailableError
from holdfast.snapshotter.storage.opening import open_storage
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
with open_storage(sys.argv[1]) as storage:
    try:
        storage.put("a", bytes(10_000))
    except UnavailableError as error:
        print(error.retryable, list(storage.list("")))
"""
    done = run_python("-c", code, tmp_path / "root", folder=tmp_path)
    assert done.stdout == "True []\n", done.stderr
    assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_read_only_folder(storage: ObjectStorage, root: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    calls = Calls(monkeypatch)
    calls.failing["mkdir"] = number
    with pytest.raises(InvalidArgumentError, match=f"make the folder writable.* storage=file://{root}"):
        storage.put("a/b", b"1")
    calls.failing = {"open": number}
    with pytest.raises(InvalidArgumentError, match=f"make the folder writable.*action=get .* storage=file://{root}"):
        storage.get("a/b")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="has no /proc")
@pytest.mark.parametrize("folder", ["/proc", "/proc/holdfast", "/dev/fd/holdfast"])
def test_a_file_system_that_takes_no_folders(folder: str) -> None:
    """It says "no such file", which is not said of what somebody has deleted."""
    with (
        open_storage(folder) as storage,
        pytest.raises(InvalidArgumentError, match="access denied: make the folder writable"),
    ):
        storage.put("a/b", b"1")


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_read_only_folder_of_this_machine(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with open_storage(f"{tmp_path}/root") as storage, pytest.raises(InvalidArgumentError, match="make the folder"):
        storage.put("a", b"1")


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_private_whatever_the_umask(storage: ObjectStorage, root: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        storage.put("a/b/c", b"1")
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (root.parent, root, root / "a", root / "a/b")}
    assert set(modes.values()) == {0o700}
    assert stat.S_IMODE((root / "a/b/c").stat().st_mode) == 0o600


def test_links_inside_the_root_lead_nowhere(storage: ObjectStorage, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    storage.put("a/real", b"1")
    (root / "folder-link").symlink_to(outside)
    (root / "a" / "file-link").symlink_to(outside / "secret")
    os.mkfifo(root / "a" / "pipe")
    assert [info.key for info in storage.list("")] == ["a/real"]
    for key in ("folder-link/secret", "a/pipe"):
        with pytest.raises(NotFoundError):
            storage.get(key)
    with pytest.raises(InvalidArgumentError):
        storage.get("a/file-link")
    for put, key in ((storage.put, "folder-link/new"), (storage.put_if_absent, "a/file-link")):
        with pytest.raises(InvalidArgumentError):
            put(key, b"1")
    storage.delete(["folder-link/secret", "a/file-link"])
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"


def test_a_folder_that_is_replaced_while_it_is_listed_hides_no_other(
    storage: ObjectStorage, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came after it was left out, and clean-ups take for gone what is not listed."""
    for name in "abcdef":
        storage.put(f"shard/{name}/object", b"1")
        (root / "shard" / name / ".tmp-1-1").write_bytes(b"half")
    first = os.listdir(root / "shard")[0]
    real = os.open

    def open_replaced(path: str, *args: Any, **kwargs: Any) -> int:
        if path == first and (root / "shard" / first).is_dir():
            (root / "shard" / first).rename(root.parent / "away")
            (root / "shard" / first).touch()
        return real(path, *args, **kwargs)

    wanted = [f"shard/{name}/object" for name in "abcdef" if name != first]
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_replaced)
        assert [info.key for info in storage.list("")] == wanted
    (root / "shard" / first).unlink()
    (root.parent / "away").rename(root / "shard" / first)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_replaced)
        assert storage.abort_unfinished_uploads("", before_ms=1 << 52) == len(wanted)


def test_a_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with open_storage(str(tmp_path / "link")) as storage:
        storage.put("a", b"1")
    assert (tmp_path / "real" / "a").read_bytes() == b"1"


def test_object_and_folder_of_one_name(storage: ObjectStorage) -> None:
    storage.put("a/b", b"1")
    for key in ("a", "a/b/c"):
        for put in (storage.put, storage.put_if_absent):
            with pytest.raises(InvalidArgumentError, match="collides"):
                put(key, b"1")
    assert [info.key for info in storage.list("")] == ["a/b"]


def test_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    with (
        open_storage(str(tmp_path / "file")) as storage,
        pytest.raises(InvalidArgumentError, match="this is a file: give a directory"),
    ):
        storage.put("a", b"1")


def test_folder_removed_behind_our_back(storage: ObjectStorage, root: Path) -> None:
    storage.put("a/b/c", b"1")
    for path in (root / "a/b/c", root / "a/b", root / "a"):
        path.rmdir() if path.is_dir() else path.unlink()
    storage.put("a/b/c", b"2")
    assert storage.get("a/b/c") == b"2"


def test_leftovers_of_the_dead_are_no_objects(storage: ObjectStorage, root: Path) -> None:
    storage.put("a", b"1")
    (root / f".tmp-{os.getpid()}-1").write_bytes(b"half")  # also the next name this process would take
    storage.put("b", b"2")
    assert [info.key for info in storage.list("")] == ["a", "b"]
    assert storage.get("b") == b"2"


def test_leftovers_are_removed_by_age_and_folder(storage: ObjectStorage, root: Path) -> None:
    for key in ("s-1/a/object", "s-10/object"):
        storage.put(key, b"1")
    outside = root.parent / ".tmp-9-9"
    for path in (root / "s-1/.tmp-1-0", root / "s-1/a/.tmp-1-1", root / "s-10/.tmp-1-2", root / ".tmp-1-3", outside):
        path.write_bytes(b"half")
        os.utime(path, (1000, 1000))
    (root / "s-1/a/.tmp-1-4").write_bytes(b"at work")
    (root / "s-1/link").symlink_to(root.parent)
    assert storage.abort_unfinished_uploads("s-1/", before_ms=1_000_000) == 0
    assert storage.abort_unfinished_uploads("s-1/", before_ms=1_000_001) == 2
    assert storage.abort_unfinished_uploads("", before_ms=1_000_001) == 2
    left = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    assert left == ["s-1/a/.tmp-1-4", "s-1/a/object", "s-10/object"]
    assert outside.exists()


def test_no_descriptor_is_left_open(storage: ObjectStorage) -> None:
    def work() -> None:
        storage.put("a/b/c", b"1")
        storage.list("")
        storage.get("a/b/c")
        for key in ("a/x", "x/y", "a"):
            with pytest.raises(NotFoundError):
                storage.get(key)
        storage.delete(["a/b/c", "a"])

    work()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        work()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
