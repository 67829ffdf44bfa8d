"""Commits of gigabytes, as a restore or a rescale stores them: many of them are looked at in little memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor

import pytest

from holdfast.backends import stored_file
from holdfast.backends.base import Pointer
from holdfast.backends.stored_file import BLOCK_BYTES, END_BYTES_MAX, NOTICE_BYTES_MAX
from holdfast.errors import CorruptionError
from holdfast.snapshotter.commit_objects import read_commit
from holdfast.snapshotter.storage.wrappers import PrefixedStorage, WrappedStorage
from holdfast.snapshotter.upkeep import catalogue
from holdfast.snapshotter.upkeep.catalogue import Headers, StoredObject, list_shard
from holdfast.snapshotter.upkeep.retention import GRACE_MS, run_retention
from holdfast.snapshotter.upkeep.verification import verify_shard
from tests.fuzz.forge import put_together, take_apart
from tests.model.shard_history import PREFIX, ShardHistory, TimedStorage

FIRST = Pointer(1, "aa")
KEY = f"{PREFIX}/commits/{FIRST}"
ROWS_BYTES = 2 * BLOCK_BYTES + 17


class Watched(WrappedStorage):
    """Remembers the sizes of what was read."""

    def __init__(self) -> None:
        super().__init__(TimedStorage())
        self.read: list[int] = []

    def get(self, key: str, limit_bytes: int = NOTICE_BYTES_MAX) -> memoryview:
        data = super().get(key, limit_bytes)
        self.read.append(len(data))
        return data

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        data = super().get_range(key, start, end)
        self.read.append(len(data))
        return data


def large_commit(note: str = "") -> bytes:
    """Return a commit with rows of three blocks; `note` makes its footer larger."""
    tables = {"totals": 7, note or "others": 0}
    header = {"pointer": str(FIRST), "shard": PREFIX, "rows": tables, "plain_bytes": tables}
    header |= {"chain": [], "since": [str(FIRST)], "last": None}
    sections: dict[str, stored_file.SectionWriter] = {
        "totals": lambda file: file.write(bytes(ROWS_BYTES)),
        note or "others": lambda file: file.write(b""),
    }
    return stored_file.encode("commit", header, sections)[0].to_pybytes()


@pytest.fixture
def storage() -> Watched:
    return Watched()


def listed(storage: Watched) -> tuple[PrefixedStorage, StoredObject]:
    shard = PrefixedStorage(storage, PREFIX)
    return shard, list_shard(shard).objects[f"commits/{FIRST}"]


@pytest.mark.parametrize("footer_bytes", [0, 2 * END_BYTES_MAX])
def test_of_a_large_commit_only_the_end_is_read(storage: Watched, footer_bytes: int) -> None:
    """It says what the whole commit says."""
    data = large_commit("x" * footer_bytes)
    storage.put(KEY, data)
    shard, stored = listed(storage)
    found = Headers(shard).commit(stored)
    assert found == read_commit(data, PREFIX, FIRST, found.source).without_rows()
    assert sum(storage.read) <= 2 * END_BYTES_MAX + 4 * footer_bytes
    assert len(storage.read) == (2 if footer_bytes else 1)


def test_verification_reads_all_of_it_a_block_at_a_time(storage: Watched, executor: Executor) -> None:
    data = large_commit()
    storage.put(KEY, data)
    shard, _ = listed(storage)
    report = verify_shard(shard, executor, 100)
    assert (report.damages, report.versions, report.size_bytes) == ((), 1, len(data))
    assert sum(storage.read) >= len(data) - 24
    assert max(storage.read) <= BLOCK_BYTES


@pytest.mark.parametrize("at", [0, BLOCK_BYTES, ROWS_BYTES - 1])
def test_verification_finds_a_byte_that_was_altered(storage: Watched, executor: Executor, at: int) -> None:
    data = bytearray(large_commit())
    data[at] ^= 1
    storage.put(KEY, data)
    (damage,) = verify_shard(listed(storage)[0], executor, 100).damages
    assert (damage.key, "checksum" in damage.problem) == (KEY, True)


def another_kind(data: bytes) -> bytes:
    body, footer = take_apart(data)
    return put_together(body, footer | {"kind": "snapshot"})


def rows_beyond_the_end(data: bytes) -> bytes:
    body, footer = take_apart(data)
    footer["sections"][0] |= {"size_bytes": 1 << 40, "plain_bytes": 1 << 40}
    return put_together(body, footer)


HARMS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "cut": ("its end is missing", lambda data: data[:-1]),
    "a footer larger than any": ("footer of an impossible size", lambda d: d[:-32] + b"\xff" * 4 + d[-28:]),
    "no footer": ("unreadable footer", lambda d: d[: -32 - 100] + b"?" * 100 + d[-32:]),
    "another kind": ("not what was asked for", another_kind),
    "rows beyond the end": ("outside its bytes", rows_beyond_the_end),
    "another version": ("belongs elsewhere", lambda data: data.replace(b'"1-aa","shard', b'"1-ab","shard')),
}


@pytest.mark.parametrize("harm", HARMS)
def test_an_end_is_believed_only_as_far_as_it_can_be_true(storage: Watched, harm: str) -> None:
    problem, do = HARMS[harm]
    storage.put(KEY, do(large_commit()))
    with pytest.raises(CorruptionError, match=problem) as raised:
        Headers(listed(storage)[0]).commit(listed(storage)[1])
    assert KEY in str(raised.value)
    assert sum(storage.read) <= END_BYTES_MAX


def test_a_commit_larger_than_any_is_not_read(storage: Watched) -> None:
    shard, stored = PrefixedStorage(storage, PREFIX), StoredObject(f"commits/{FIRST}", "commit", FIRST, 1 << 33, 0)
    with pytest.raises(CorruptionError, match="larger than any commit"):
        Headers(shard).commit(stored)
    assert storage.read == []


def test_a_damaged_end_makes_nothing_go_that_a_restore_may_fall_back_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """No checksum proves the end of a large commit: the snapshot that it names must be there, as all others must."""
    storage = TimedStorage()
    shard = ShardHistory(storage)
    made = shard.grow(None, 30, snapshot_every=10)
    storage.now_ms += 2 * GRACE_MS
    key = f"{PREFIX}/commits/{made[19].pointer}"  # the last one before the snapshot on which the anchor builds
    fallback = next(entry for entry in shard.manifests if entry.version == 10)
    data, stored_ms = storage.objects[key]
    name = str(fallback.pointer).encode()
    storage.objects[key] = (data.replace(name, b"11" + name[2:]), stored_ms)
    monkeypatch.setattr(catalogue, "NOTICE_BYTES_MAX", 0)
    with pytest.raises(CorruptionError, match="an object that others build on is missing"):
        run_retention(PrefixedStorage(storage, PREFIX), made[-1].pointer, made[-1].chain, retained=5)
    assert any(key.startswith(f"{PREFIX}/{fallback.key}") for key in storage.objects)
