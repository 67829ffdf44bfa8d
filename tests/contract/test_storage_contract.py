"""The storages that holdfast ships pass the suite that it ships."""

from __future__ import annotations

import itertools
from collections.abc import Callable, ItemsView, Iterator
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from holdfast.errors import InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import Bandwidth, LimitedStorage, PrefixedStorage
from holdfast.testing.faulty_storage import FaultyStorage
from holdfast.testing.storage_contract import StorageContract
from tests.servers.hdfs import Hdfs
from tests.servers.s3 import BUCKET, Moto, S3Server, Versitygw

_PLACES = itertools.count()


class TestLocalStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Iterator[ObjectStorage]:
        with open_storage(f"file://{tmp_path}/made/by/put") as storage:
            yield storage

    @pytest.fixture
    def other(self, tmp_path: Path) -> Iterator[ObjectStorage]:
        with open_storage(f"{tmp_path}/made/by/../by/put/") as storage:
            yield storage


class _Store(dict[str, object]):
    """A dict that other threads may change while its items are looked at."""

    def items(self) -> ItemsView[str, object]:
        return self.copy().items()


class TestMemoryStorage(StorageContract):
    @pytest.fixture(autouse=True)
    def _for_threads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # fsspec takes a tuple of the items, in which the garbage collector may let another thread run.
        monkeypatch.setattr(MemoryFileSystem, "store", _Store())

    @pytest.fixture
    def url(self) -> str:
        return f"memory://storage-contract/{next(_PLACES)}"

    @pytest.fixture
    def storage(self, url: str) -> Iterator[ObjectStorage]:
        with open_storage(url) as storage:
            yield storage

    @pytest.fixture
    def other(self, url: str) -> Iterator[ObjectStorage]:
        with open_storage(url) as storage:
            yield storage


class TestStorageOfFilesByFsspec(StorageContract):
    """Files of which reading allocates what is asked for, as on several file systems."""

    # Such a file system is refused as a state directory.
    test_a_key_that_is_taken_keeps_its_bytes = None
    test_a_large_object_if_absent = None
    test_one_of_many_is_first = None
    test_a_reader_sees_all_or_nothing = None

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Iterator[ObjectStorage]:
        with open_storage(f"local://{tmp_path}/files", {"auto_mkdir": True}) as storage:
            yield storage

    @pytest.mark.parametrize(
        ("error", "is_gone"),
        [(ConnectionResetError("reset"), False), (PermissionError("denied"), False), (FileNotFoundError("gone"), True)],
    )
    def test_a_folder_that_cannot_be_listed(
        self, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch, error: OSError, is_gone: bool
    ) -> None:
        """fsspec leaves it out: sinks had decided nothing then, and tables had the columns of the first run."""
        storage.put("run/a/1", b"1")
        storage.put("run/b/2", b"1")
        listed = LocalFileSystem.ls

        def ls(self: LocalFileSystem, path: str, **how: object) -> object:
            if path.endswith("/a"):
                raise error
            return listed(self, path, **how)

        monkeypatch.setattr(LocalFileSystem, "ls", ls)
        if is_gone:
            assert [info.key for info in storage.list("")] == ["run/b/2"]
            assert storage.list("run/a/") == []
            return
        for prefix in ("", "run/a/"):
            with pytest.raises((UnavailableError, InvalidArgumentError)):
                storage.list(prefix)
        assert [info.key for info in storage.list("run/b/")] == ["run/b/2"]

    def test_times_as_webhdfs_has_them(self, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
        """In ms; asked once more, it answered in local time, or that a file had been deleted since it was listed."""
        storage.put("run/a", b"1")
        listed = LocalFileSystem.ls

        def ls(self: LocalFileSystem, path: str, detail: bool = False) -> object:
            facts = ("name", "type", "size")
            return [
                {fact: info[fact] for fact in facts} | {"modificationTime": 1_700_000_000_123}
                for info in listed(self, path, detail=True)
            ]

        def modified(self: LocalFileSystem, path: str) -> object:
            raise FileNotFoundError(path)

        monkeypatch.setattr(LocalFileSystem, "ls", ls)
        monkeypatch.setattr(LocalFileSystem, "modified", modified)
        assert [info.modified_ms for info in storage.list("run/")] == [1_700_000_000_123]

    def test_a_file_that_goes_during_a_listing(self, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
        """SMB's list asks about each file: where a put gave one its name meanwhile, the folder was taken for empty."""
        storage.put("run/a/1", b"1")
        storage.put("run/a/2", b"22")
        listed = LocalFileSystem.ls

        def ls(self: LocalFileSystem, path: str, detail: bool = False) -> object:
            names = [*listed(self, path), f"{path}/.tmp-1"]
            return [self.info(name) for name in names] if detail else names

        monkeypatch.setattr(LocalFileSystem, "ls", ls)
        assert [(info.key, info.size_bytes) for info in storage.list("run/")] == [("run/a/1", 1), ("run/a/2", 2)]
        assert storage.list("absent/") == []

    def test_absence_that_only_a_number_tells(self, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
        """As of SMB, whose error is no FileNotFoundError: a query found the storage unavailable when it began."""

        def numbered(call: Callable[..., object]) -> Callable[..., object]:
            def called(*args: object, **how: object) -> object:
                try:
                    return call(*args, **how)
                except FileNotFoundError as exc:
                    raise _NumberedError(exc.errno, "no such name") from None

            return called

        for name in ("ls", "cat_file", "rm_file"):
            monkeypatch.setattr(LocalFileSystem, name, numbered(getattr(LocalFileSystem, name)))
        with pytest.raises(NotFoundError):
            storage.get("a/b")
        assert storage.list("a/") == []
        storage.delete(["a/b"])
        storage.put("a/b", b"1")
        assert storage.get("a/b") == b"1"


class _NumberedError(OSError):
    """Python makes a FileNotFoundError of OSError by the number, but not of a class that somebody else has derived."""


@pytest.mark.all
class TestStorageWithoutFaults(TestMemoryStorage):
    @pytest.fixture
    def storage(self, url: str) -> Iterator[ObjectStorage]:
        with FaultyStorage(open_storage(url)) as storage:
            yield storage


class TestPrefixedStorage(TestMemoryStorage):
    """A folder of a storage that holds others: nothing of them shows, and nothing of them goes."""

    @pytest.fixture
    def storage(self, url: str) -> Iterator[ObjectStorage]:
        with open_storage(url) as neighbours:
            for key in ("shard-0", "shard-10/a", "other/shard-1/a"):
                neighbours.put(key, b"1")
            with PrefixedStorage(open_storage(url), "shard-1") as storage:
                yield storage
            assert {info.key for info in neighbours.list("")} >= {"shard-0", "shard-10/a", "other/shard-1/a"}

    @pytest.fixture
    def other(self, url: str) -> Iterator[ObjectStorage]:
        with open_storage(f"{url}/shard-1") as storage:
            yield storage


@pytest.mark.all
class TestLimitedStorage(TestMemoryStorage):
    @pytest.fixture
    def storage(self, url: str) -> Iterator[ObjectStorage]:
        with LimitedStorage(open_storage(url), Bandwidth(1 << 40)) as storage:
            yield storage


class _OnAServer(StorageContract):
    large_bytes = 11 << 20

    @pytest.fixture
    def storage(self, place: tuple[str, dict[str, object]]) -> Iterator[ObjectStorage]:
        with open_storage(*place) as storage:
            yield storage

    @pytest.fixture
    def other(self, place: tuple[str, dict[str, object]]) -> Iterator[ObjectStorage]:
        with open_storage(*place) as storage:
            yield storage


def s3_place(server: S3Server) -> tuple[str, dict[str, object]]:
    return f"s3://{BUCKET}/contract/{next(_PLACES)}", server.options(part_size_bytes=5 << 20)


# What versitygw shows, which checks all that S3 checks.
@pytest.mark.all
@pytest.mark.s3
class TestS3StorageOnMoto(_OnAServer):
    @pytest.fixture
    def place(self, moto: Moto) -> tuple[str, dict[str, object]]:
        return s3_place(moto)

    # moto holds its objects in this process, so this is shown with versitygw.
    test_what_is_too_large_takes_no_memory = None
    # moto looks for an object before it puts one, in several threads, so that two may be first.
    test_one_of_many_is_first = None


@pytest.mark.s3
class TestS3StorageOnVersitygw(_OnAServer):
    @pytest.fixture
    def place(self, versitygw: Versitygw) -> tuple[str, dict[str, object]]:
        return s3_place(versitygw)


@pytest.mark.hdfs
class TestHdfsStorage(_OnAServer):
    @pytest.fixture
    def place(self, hdfs: Hdfs) -> tuple[str, dict[str, object]]:
        return f"{hdfs.url}/contract/{next(_PLACES)}", hdfs.options()

    def test_a_file_is_no_empty_directory(self, storage: ObjectStorage, hdfs: Hdfs) -> None:
        storage.put("one", b"object")
        with (
            open_storage(f"{storage.url}/one", hdfs.options()) as inside,
            pytest.raises(InvalidArgumentError, match="this is a file"),
        ):
            inside.list("")
        assert storage.list("one/") == []
