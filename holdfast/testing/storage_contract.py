"""What every object storage must do, as tests that a subclass runs on its own storage.

::

    class TestMyStorage(StorageContract):
        @pytest.fixture
        def storage(self):
            with open_storage("my://place/of/this/test", options) as storage:
                yield storage  # empty at the start of each test

        @pytest.fixture
        def other(self):  # optional: a second client of the same place
            with open_storage("my://place/of/this/test", options) as storage:
                yield storage

pytest collects the subclass; write one for each storage. No test is skipped: holdfast cannot use a storage
that fails one.
"""

from __future__ import annotations

import copy
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from holdfast.backends.stored_file import NOTICE_BYTES_MAX
from holdfast.errors import ClosedError, ConflictError, CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

__all__ = ["INVALID_KEYS", "INVALID_PREFIXES", "UNUSUAL_KEYS", "StorageContract"]

INVALID_KEYS = (
    "",
    "/",
    "/absolute",
    "a/",
    "a//b",
    ".",
    "..",
    "a/../b",
    "../outside",
    "a/.",
    "nul\x00",
    "line\nfeed",
    "\x7f",
    "surrogate\ud800",
    "colon:inside",
    "a/.snapshot",
    ".tmp-1",
    "a/.tmp-1/b",
    "s" * 256,
    "ä" * 128,
    "/".join(["s" * 99] * 11),
)
"""Keys that must be refused before any I/O."""

INVALID_PREFIXES = ("a", "/", "/a/", "a//", "../", "a/../", "a/b", "\x00/", ".tmp-1/")
"""What `ObjectStorage.list` must refuse."""

UNUSUAL_KEYS = (
    "space in name",
    "plus+and%2Fpercent",
    "?versionId=1&a=b#c",
    "star*[a]{b}",
    "quote'\"<&>",
    "back\\slash",
    ".hidden",
    "..two-dots",
    "at@tilde~",
    "NFC-\u00e9",
    "NFD-e\u0301",
    "emoji-\U0001f33f",
    "s" * 255,
    "/".join(["d" * 50] * 15),
)
"""Keys that must work and stay distinct, however a file system or protocol spells them."""

_BUFFERS: tuple[tuple[str, Callable[[bytes], Buffer]], ...] = (
    ("bytes", bytes),
    ("bytearray", bytearray),
    ("memoryview", memoryview),
    ("slice", lambda data: memoryview(b"--" + data + b"--")[2:-2]),
    ("wide", lambda data: memoryview(data).cast("I")),
    ("arrow", pa.py_buffer),
)


class StorageContract:
    """The suite; see the module.

    Attributes
    ----------
    large_bytes : int
        A size from which the storage handles objects differently, if any.
    """

    large_bytes = 1 << 20

    @pytest.fixture
    def storage(self) -> ObjectStorage:
        """Return an empty storage; to be supplied by the subclass."""
        raise NotImplementedError

    @pytest.fixture
    def other(self, storage: ObjectStorage) -> ObjectStorage:
        """Return a second client of the same place."""
        return storage

    def test_what_was_put_is_got(self, storage: ObjectStorage, other: ObjectStorage) -> None:
        """Bytes come back unchanged, as a flat read-only view, from any client."""
        storage.put("a/b", b"\x00\xffbytes")
        for client in (storage, other):
            got = client.get("a/b")
            assert isinstance(got, memoryview)
            assert (got.format, got.readonly, got.ndim) == ("B", True, 1)
            assert bytes(got) == b"\x00\xffbytes"

    @pytest.mark.parametrize("size", [0, 1, 4096])
    def test_sizes(self, storage: ObjectStorage, size: int) -> None:
        """An empty object is an object."""
        storage.put("o", bytes(size))
        assert bytes(storage.get("o")) == bytes(size)
        assert [info.size_bytes for info in storage.list("")] == [size]

    def test_large(self, storage: ObjectStorage) -> None:
        """A large object of an odd size, put from a buffer other than bytes, comes back whole."""
        data = memoryview(bytes(range(251)) * (self.large_bytes // 251 + 1))
        storage.put("large", data)
        assert bytes(storage.get("large")) == data
        assert [info.size_bytes for info in storage.list("")] == [len(data)]

    @pytest.mark.parametrize("make", [make for _, make in _BUFFERS], ids=[name for name, _ in _BUFFERS])
    def test_any_buffer(self, storage: ObjectStorage, make: Callable[[bytes], Buffer]) -> None:
        """Any contiguous buffer is stored as its bytes."""
        storage.put("o", make(b"01234567"))
        assert bytes(storage.get("o")) == b"01234567"

    def test_later_changes_to_the_buffer_do_not_matter(self, storage: ObjectStorage) -> None:
        """A storage keeps bytes, not the caller's buffer."""
        data = bytearray(b"before")
        storage.put("o", data)
        data[:] = b"after!"
        assert bytes(storage.get("o")) == b"before"

    def test_scattered_buffer_is_refused(self, storage: ObjectStorage) -> None:
        """A buffer that is not contiguous is the caller's error."""
        with pytest.raises(InvalidArgumentError, match="contiguous"):
            storage.put("o", memoryview(b"0123")[::2])
        assert not storage.list("")

    def test_absent_object(self, storage: ObjectStorage) -> None:
        """A missing object raises an error that names its storage and key."""
        storage.put("a/b", b"1")
        for key in ("x", "a", "a/x", "a/b/c", "x/y/z"):
            with pytest.raises(NotFoundError) as caught:
                storage.get(key)
            facts = caught.value.facts
            assert f"{facts['storage']}/{facts['key']}" == f"{storage.url}/{key}"

    def test_more_than_is_wanted(self, storage: ObjectStorage) -> None:
        """An object larger than its reader accepts is refused, naming its size and the limit."""
        storage.put("a/b", b"12345678")
        assert bytes(storage.get("a/b", 8)) == b"12345678"
        with pytest.raises(CorruptionError) as caught:
            storage.get("a/b", 7)
        facts = caught.value.facts
        assert f"{facts['storage']}/{facts['key']}" == f"{storage.url}/a/b"
        assert (facts["size_bytes"], facts["limit_bytes"]) == (8, 7)
        with pytest.raises(NotFoundError):
            storage.get("absent", 0)

    def test_ranges(self, storage: ObjectStorage) -> None:
        """Any range of an object can be read alone; a range beyond its end is an error."""
        data = bytes(range(256)) * 4096
        storage.put("a/b", data)
        for start, end in ((0, 1), (255, 258), (len(data) - 1, len(data)), (0, len(data)), (70_000, 900_000)):
            assert bytes(storage.get_range("a/b", start, end)) == data[start:end]
        for start, end in ((len(data) - 1, len(data) + 1), (len(data), len(data) + 1), (len(data) + 9, len(data) + 99)):
            with pytest.raises(CorruptionError):
                storage.get_range("a/b", start, end)
        for start, end in ((-1, 1), (1, 1), (2, 1)):
            with pytest.raises(InvalidArgumentError):
                storage.get_range("a/b", start, end)
        with pytest.raises(NotFoundError):
            storage.get_range("a/c", 0, 1)

    def test_what_is_too_large_takes_no_memory(self, storage: ObjectStorage) -> None:
        """An object over the limit is refused before it fills memory: a planted object cannot exhaust a worker."""
        size_bytes = 48 << 20
        storage.put("o", bytes(size_bytes))
        storage.put("small", bytes(1_000))
        storage.get("small")  # so that one-time allocations are not measured
        for limit_bytes in (1_000, 1 << 20):
            tracemalloc.start()
            try:
                with pytest.raises(CorruptionError, match=f"size_bytes={size_bytes}"):
                    storage.get("o", limit_bytes)
                peak_bytes = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert peak_bytes < limit_bytes + (4 << 20)
        with pytest.raises(CorruptionError, match=f"limit_bytes={NOTICE_BYTES_MAX}"):
            storage.get("o")
        assert storage.get("o", size_bytes) == bytes(size_bytes), "a sufficient limit"

    def test_what_is_small_takes_little_memory(self, storage: ObjectStorage) -> None:
        """A high limit reserves no memory: a worker's address space may be limited."""
        storage.put("o", b"1234")
        storage.get("o")
        tracemalloc.start()
        try:
            assert bytes(storage.get("o", 4 << 30)) == b"1234"
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak_bytes < 64 << 20

    def test_put_again(self, storage: ObjectStorage) -> None:
        """A second put of the same key, as after a lost reply, leaves one whole object."""
        storage.put("k", b"x" * 10_000)
        storage.put("k", b"x" * 10_000)
        assert bytes(storage.get("k")) == b"x" * 10_000
        assert [info.key for info in storage.list("")] == ["k"]

    def test_a_key_that_is_taken_keeps_its_bytes(self, storage: ObjectStorage, other: ObjectStorage) -> None:
        """`put_if_absent` stores under a free key, accepts the same bytes again, and refuses others of any size."""
        storage.put_if_absent("f/k", b"mine")
        other.put_if_absent("f/k", b"mine")
        for data in (b"your", b"longer than mine", b""):
            with pytest.raises(ConflictError) as caught:
                other.put_if_absent("f/k", data)
            facts = caught.value.facts
            assert f"{facts['storage']}/{facts['key']}" == f"{storage.url}/f/k"
        assert bytes(storage.get("f/k")) == b"mine"
        assert [info.key for info in storage.list("")] == ["f/k"]
        storage.delete(["f/k"])
        storage.put_if_absent("f/k", memoryview(b"next"))
        assert bytes(storage.get("f/k")) == b"next"

    def test_a_large_object_if_absent(self, storage: ObjectStorage) -> None:
        """`put_if_absent` also stores objects that `put` would upload in parts."""
        data = bytes(range(251)) * (self.large_bytes // 251 + 1)
        storage.put_if_absent("large", data)
        storage.put_if_absent("large", data)
        with pytest.raises(ConflictError):
            storage.put_if_absent("large", data[:-1] + b"\xff")
        assert bytes(storage.get("large", len(data))) == data

    def test_one_of_many_is_first(self, storage: ObjectStorage, other: ObjectStorage) -> None:
        """If threads put different bytes under the same key at once, exactly one succeeds, and its bytes stay.

        Set it to None for a storage whose check and put are not atomic.
        """

        def put(number: int) -> bool:
            start.wait()
            try:
                (storage, other)[number % 2].put_if_absent(key, bytes([number]) * 1000)
            except ConflictError:
                return False
            return True

        with ThreadPoolExecutor(4) as pool:
            for turn in range(10):
                key, start = f"t/{turn}", threading.Barrier(4)
                (first,) = (number for number, stored in enumerate(pool.map(put, range(4))) if stored)
                assert bytes(storage.get(key)) == bytes([first]) * 1000

    def test_invalid_keys(self, storage: ObjectStorage) -> None:
        """An invalid key is refused by every operation, and changes nothing."""
        storage.put("kept", b"1")
        for key in INVALID_KEYS:
            for call in (
                storage.get,
                lambda key: storage.get_range(key, 0, 1),
                lambda key: storage.put(key, b"1"),
                lambda key: storage.put_if_absent(key, b"1"),
                lambda key: storage.delete(["kept", key]),
            ):
                with pytest.raises(InvalidArgumentError):
                    call(key)
        assert [info.key for info in storage.list("")] == ["kept"]

    def test_invalid_prefixes(self, storage: ObjectStorage) -> None:
        """A prefix is a folder: no neighbour counts as its content."""
        for prefix in INVALID_PREFIXES:
            with pytest.raises(InvalidArgumentError):
                storage.list(prefix)

    def test_unusual_keys(self, storage: ObjectStorage) -> None:
        """No character of a key has a special meaning."""
        for number, key in enumerate(UNUSUAL_KEYS):
            storage.put(f"u/{key}", str(number).encode())
        for number, key in enumerate(UNUSUAL_KEYS):
            assert bytes(storage.get(f"u/{key}")) == str(number).encode()
        assert {info.key for info in storage.list("u/")} == {f"u/{key}" for key in UNUSUAL_KEYS}
        storage.delete(["u/star*[a]{b}", "u/?versionId=1&a=b#c"])
        assert len(storage.list("u/")) == len(UNUSUAL_KEYS) - 2
        storage.delete(f"u/{key}" for key in UNUSUAL_KEYS)
        assert not storage.list("")

    def test_list_shows_a_folder_at_any_depth(self, storage: ObjectStorage) -> None:
        """A list is recursive, ordered, and limited to the folder."""
        for key in ("s-1/z", "s-1/a/b/c", "s-1/a/a", "s-10/a", "s-1.x", "t"):
            storage.put(key, key.encode())
        assert [info.key for info in storage.list("s-1/")] == ["s-1/a/a", "s-1/a/b/c", "s-1/z"]
        assert [info.key for info in storage.list("s-1/a/b/")] == ["s-1/a/b/c"]
        everything = ["s-1.x", "s-1/a/a", "s-1/a/b/c", "s-1/z", "s-10/a", "t"]
        assert [info.key for info in storage.list("")] == everything
        assert [info.size_bytes for info in storage.list("")] == [len(key) for key in everything]

    def test_list_of_nothing(self, storage: ObjectStorage) -> None:
        """An absent folder, an empty root and the name of an object hold nothing."""
        assert list(storage.list("")) == []
        storage.put("object", b"1")
        assert list(storage.list("absent/")) == []
        assert list(storage.list("object/")) == []

    def test_list_tells_when(self, storage: ObjectStorage) -> None:
        """Times are in ms since 1970, and later than this code."""
        storage.put("o", b"1")
        (info,) = storage.list("")
        assert isinstance(info, ObjectInfo)
        assert 1_700_000_000_000 < info.modified_ms < 10_000_000_000_000

    def test_list_is_fresh(self, storage: ObjectStorage, other: ObjectStorage) -> None:
        """A list shows another client's writes and deletes at once."""
        assert not storage.list("f/")
        other.put("f/1", b"1")
        assert [info.key for info in storage.list("f/")] == ["f/1"]
        other.delete(["f/1"])
        assert not storage.list("f/")
        with pytest.raises(NotFoundError):
            storage.get("f/1")

    def test_delete(self, storage: ObjectStorage) -> None:
        """Deleting takes any iterable, leaves neighbours alone, and ignores absent objects."""
        for key in ("d/1", "d/10", "d/2", "d/folder/x"):
            storage.put(key, b"1")
        storage.delete(iter(["d/1", "d/absent", "absent/at/all", "d/folder", "d/1", "d/2/below"]))
        assert [info.key for info in storage.list("")] == ["d/10", "d/2", "d/folder/x"]
        storage.delete([])
        storage.delete(["d/10", "d/2", "d/folder/x"])
        assert not storage.list("")

    def test_threads(self, storage: ObjectStorage) -> None:
        """Many threads put, get, list and delete at once."""

        def work(number: int) -> None:
            for turn in range(3):
                key, data = f"t/{number}/{turn}", bytes([number]) * 1000
                storage.put(key, data)
                assert bytes(storage.get(key)) == data
                assert key in {info.key for info in storage.list(f"t/{number}/")}
            storage.delete([f"t/{number}/0"])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(16)))
        assert len(storage.list("t/")) == 32

    def test_a_reader_sees_all_or_nothing(self, storage: ObjectStorage, other: ObjectStorage) -> None:
        """While a put runs, the object is absent or whole."""
        data = b"w" * self.large_bytes
        done = threading.Event()
        seen: set[int] = set()

        def read() -> None:
            has_ended = False
            while not has_ended:  # once more afterwards, so that `seen` is never empty
                has_ended = done.is_set()
                seen.update(info.size_bytes for info in other.list("w/"))

        with ThreadPoolExecutor(1) as pool:
            reader = pool.submit(read)
            try:
                for number in range(3):
                    storage.put(f"w/{number}", data)
            finally:
                done.set()
            reader.result()
        assert seen == {len(data)}

    def test_requests_are_counted(self, storage: ObjectStorage) -> None:
        """Requests are counted by action, over all threads; bytes count once the object is stored or returned."""
        before = storage.requests
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda number: storage.put(f"n/{number}", bytes(100)), range(8)))
        storage.get("n/1")
        with pytest.raises(NotFoundError):
            storage.get("absent")
        storage.list("n/")
        storage.delete(["n/1"])
        counted = {name: number - before[name] for name, number in storage.requests.items()}
        assert counted == {"put": 8, "get": 2, "list": 1, "delete": 1, "put_bytes": 800, "get_bytes": 100}

    def test_what_is_finished_is_no_unfinished_upload(self, storage: ObjectStorage) -> None:
        """Complete objects are never removed, whatever the time; a prefix must be a folder, which may be absent."""
        storage.put("a/1", b"1")
        storage.put("a/large", bytes(self.large_bytes))
        for prefix in ("", "a/", "absent/"):
            assert storage.abort_unfinished_uploads(prefix, 1 << 52) == 0
        for prefix in INVALID_PREFIXES:
            with pytest.raises(InvalidArgumentError):
                storage.abort_unfinished_uploads(prefix, 0)
        assert [info.key for info in storage.list("")] == ["a/1", "a/large"]

    def test_closed(self, storage: ObjectStorage) -> None:
        """Each operation on a closed storage raises an error; closing again is allowed."""
        storage.put("o", b"1")
        data = storage.get("o")
        storage.close()
        storage.close()
        for call in (
            lambda: storage.put("p", b"1"),
            lambda: storage.put_if_absent("p", b"1"),
            lambda: storage.get("o"),
            lambda: storage.get_range("o", 0, 1),
            lambda: storage.list(""),
            lambda: storage.delete(["o"]),
        ):
            with pytest.raises(ClosedError):
                call()
        assert bytes(data) == b"1"

    def test_neither_pickled_nor_copied(self, storage: ObjectStorage) -> None:
        """A pickle would carry credentials; the error says what to do instead."""
        for call in (copy.copy, copy.deepcopy, type(storage).__reduce__):
            with pytest.raises(TypeError, match="open_storage"):
                call(storage)

    def test_it_names_itself(self, storage: ObjectStorage) -> None:
        """The representation contains the URL, which has no trailing slash."""
        assert storage.url in repr(storage)
        assert not storage.url.endswith("/")
