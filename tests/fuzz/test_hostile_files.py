"""Stored files that somebody has made to do harm: an answer that can be read, or an error of ours, in little memory.

A digest proves that a file is whole, not who wrote it. The fuzzer is a program of its own (`hostile_files`): a crash
of the interpreter shows, and so does memory that is asked for because a file claims to be large.
"""

from __future__ import annotations

import copy
import json
import resource
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lz4.frame
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.backends import stored_file
from holdfast.backends.run import Run
from holdfast.commands.log import describe
from holdfast.errors import CorruptionError
from holdfast.snapshotter.ownership.claims import retained_versions
from holdfast.snapshotter.ownership.operator_record import read_operator
from holdfast.snapshotter.ownership.stored_tables import stored_tables
from holdfast.snapshotter.snapshots import PART_BYTES_MAX, Part, SnapshotFile, download_files
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import Headers, list_shard
from holdfast.snapshotter.upkeep.retention import History, needed_in_storage, plan
from holdfast.snapshotter.upkeep.troubles import read_trouble, report_trouble
from holdfast.snapshotter.upkeep.verification import verify_shard
from holdfast.testing.state_rows import COUNTS, counts
from tests.fuzz.forge import ODD, at, frame_that_claims, places, put_together, take_apart, with_header
from tests.fuzz.hostile_files import SHARD, Shard
from tests.tiers import LONG, repetitions
from tests.unit.snapshotter.ownership.conftest import claimant, take, take_after

FILES = 2000 if LONG else 60


@pytest.mark.slow
@pytest.mark.parametrize("seed", repetitions(1, 20))
@pytest.mark.timeout(1800)
def test_a_hostile_file_is_an_error_of_ours_or_harmless(seed: int) -> None:
    """Commits, manifests, parts, records, local notes and markers, spoiled in JSON and in bytes."""
    command = [sys.executable, "-m", "tests.fuzz.hostile_files", str(seed), str(FILES)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    tail = "\n".join([*done.stdout.splitlines()[-3:], done.stderr[-4000:]])
    assert done.returncode == 0, f"{' '.join(command)}\n{tail}"
    outcomes = json.loads(done.stdout.splitlines()[-1].replace("'", '"'))
    assert outcomes["read"] > 0
    assert outcomes["CorruptionError"] > 0


# Claims, one by one, in a process that has no room for them.


def part(section: bytes, plain_bytes: int, encoding: str = "lz4") -> bytes:
    entry = {"name": "data", "offset": 0, "size_bytes": len(section), "plain_bytes": plain_bytes}
    return put_together(section, {"kind": "part", "encoding": encoding, "header": {}, "sections": [entry]})


def decode_part(data: bytes, plain_bytes: int | None = None) -> None:
    stored_file.decode(data, source="the-part", kind="part", plain_bytes=plain_bytes)


def claims() -> dict[str, Callable[[], None]]:
    """By name what must be a `CorruptionError`, in a process with 256 MB to spare."""
    zeros = frame_of_zeros(128)
    small = lz4.frame.compress(b"x")
    twice = {"name": "data", "offset": 0, "size_bytes": len(zeros), "plain_bytes": 512 << 20}
    overlapping = put_together(
        zeros, {"kind": "part", "encoding": "lz4", "header": {}, "sections": [twice, {**twice, "name": "more"}]}
    )
    return {
        "a frame of 64 TiB": lambda: decode_part(part(frame_that_claims(b"x" * 100, 64 << 40), 100)),
        "a footer of 64 TiB": lambda: decode_part(part(small, 64 << 40)),
        "2 MB of 512 MB, where 8 MB were declared": lambda: decode_part(part(zeros, 512 << 20), 8 << 20),
        "2 MB of 512 MB that say they are 8": lambda: decode_part(part(zeros, 8 << 20), 8 << 20),
        "a negative size": lambda: decode_part(part(small, -1)),
        "two sections in the same bytes": lambda: decode_part(overlapping),
        "buffers of 64 TiB": lambda: read_run(64 << 40, None),
        "buffers of 200 times the file": lambda: read_run(None, 1000),
        "a negative buffer": lambda: read_run(-7, None),
    }


def read_run(claimed: int | None, declared: int | None) -> None:
    """Read a compressed run whose first buffer claims to have so many bytes, or where so many are declared."""
    sink = pa.BufferOutputStream()
    counts(*((f"user {i}", 0) for i in range(5000)))["counts"].write(sink, compression="lz4")
    data = bytearray(sink.getvalue().to_pybytes())
    if claimed is not None:
        at = data.index(lz4.frame.compress(b"")[:4]) - 8
        data[at : at + 8] = struct.pack("<q", claimed)
    Run.read(pa.py_buffer(bytes(data)), COUNTS, source="the-run", plain_bytes=declared)


def frame_of_zeros(blocks: int) -> bytes:
    """Return an LZ4 frame of so many times 4 MiB of zeros, 16 KiB each."""
    one = lz4.frame.compress(bytes(4 << 20), block_size=7, block_linked=False, store_size=False)
    return one[:7] + one[7:-4] * blocks + one[-4:]


@pytest.mark.slow
def test_a_claim_is_checked_before_memory_is_asked_for() -> None:
    """Two megabytes never become more than somebody has declared outside of them."""
    command = [sys.executable, "-c", "import tests.fuzz.test_hostile_files as t; t.make_claims()"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.splitlines() == [f"{name}: refused" for name in claims()]


def make_claims() -> None:
    """Make all claims in this process, which has little memory from now on."""
    made = claims()
    within(256 << 20)
    for name, claim in made.items():
        with pytest.raises(CorruptionError, match="the-"):
            claim()
        print(f"{name}: refused")


def within(more_bytes: int) -> None:
    """Give this process so much more memory and no more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more_bytes, used + more_bytes))


def test_what_is_true_is_read() -> None:
    """The forger's files are right where nothing is wrong with them, so what it spoils is what is refused."""
    content = bytes(range(256)) * 100
    assert decode_section(part(lz4.frame.compress(content), len(content))) == content
    assert decode_section(part(content, len(content), "plain")) == content
    data = stored_file.encode("part", {"a": 1}, {"data": lambda f: f.write(content)})[0].to_pybytes()
    assert put_together(*take_apart(data)) != b""
    assert decode_section(put_together(*take_apart(data))) == content


def decode_section(data: bytes) -> bytes:
    return stored_file.decode(data, source="it", kind="part").section("data", "it").to_pybytes()


#: Restoring the whole shard takes less than 2 MB; a believed claim asks for far more.
PEAK_BYTES_MAX = 32 << 20
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shard]:
    with ThreadPoolExecutor(2) as threads:
        made = Shard(tmp_path_factory.mktemp("hostile-headers"), threads)
        take(made.storage, claimant("query"))
        take_after(made.storage, "r2", "r1", query="query")
        report_trouble(PrefixedStorage(made.storage, SHARD), "snapshot", CorruptionError("it"), 1, "host", 1)
        made.objects = {info.key: bytes(made.storage.get(info.key)) for info in made.storage.list("totals/")}
        yield made


# What is changed.


def nested(depth: int) -> Any:
    value: Any = 0
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


HUGE = st.sampled_from([2**31, 2**40, 2**61, 2**62 - 1, 2**62, 2**63, 2**64, 10**400])
POINTERS = st.sampled_from(["0-a", "1-aa", "999999-aa", "9" * 19 + "-aa", "07-aa", "1-", "-1-aa", "1-../x", "1-a\n"])
VALUES = st.one_of(
    st.sampled_from(ODD),
    HUGE,
    HUGE.map(lambda number: -number),
    POINTERS,
    st.integers(1, 900).map(nested),
    st.just("totals/shard-0004"),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
)


@st.composite
def changes(draw: st.DrawFn, header: dict[str, Any]) -> Change:
    """Return what changes a header in one to three places."""
    steps: list[tuple[str, tuple[Any, ...], Any]] = []
    every = list(places(header))
    for _ in range(draw(st.integers(1, 3))):
        way = draw(st.sampled_from(["replace", "replace", "delete", "add", "copy", "repeat", "off"]))
        value = draw(VALUES) if way in ("replace", "add") else draw(st.sampled_from(every))
        steps.append((way, draw(st.sampled_from(every)), value))

    def change(changed: dict[str, Any]) -> None:
        for way, path, value in steps:
            try:
                container = at(changed, path[:-1])
                if way == "delete":
                    del container[path[-1]]
                elif way == "add" and isinstance(container, dict):
                    container["unknown"] = value
                elif way == "repeat" and isinstance(container, list):
                    container.insert(0, copy.deepcopy(container[path[-1]]))
                elif way == "off" and type(container[path[-1]]) is int:
                    container[path[-1]] += 1
                elif way in ("copy", "replace"):
                    container[path[-1]] = copy.deepcopy(at(changed, value)) if way == "copy" else value
            except (KeyError, IndexError, TypeError):
                continue  # an earlier step took the place away

    return change


# What must hold.


def read_everything(shard: Shard, key: str, data: bytes) -> None:
    """Read the shard in each way that the project knows; only a `CorruptionError` may come out of each."""
    ways = (shard.restored, clean_up, verify, log, look_at_the_rest)
    longest = 0
    for way in ways:
        try:
            if way == shard.restored:
                shard.restored(key, data)
            else:
                shard.store_with(key, data)
                way(shard)  # type: ignore[arg-type, call-arg]
        except CorruptionError as exc:
            str(exc).encode()  # can be shown
            longest = max(longest, len(str(exc)))
    assert longest < 2_000, "an error that repeats what it was given"


def clean_up(shard: Shard) -> None:
    objects = PrefixedStorage(shard.storage, SHARD)
    history = History(list_shard(objects), Headers(objects))
    plan(history, needed_in_storage(1, history), 1 << 60, 0)


def verify(shard: Shard) -> None:
    objects = PrefixedStorage(shard.storage, SHARD)
    verify_shard(objects, shard.threads, 100)


def log(shard: Shard) -> None:
    objects = PrefixedStorage(shard.storage, SHARD)
    for stored in list_shard(objects).versions:
        describe(Headers(objects), stored)


def look_at_the_rest(shard: Shard) -> None:
    record = read_operator(shard.storage, "totals")
    stored_tables(shard.storage, record)
    retained_versions(shard.storage, record)
    objects = PrefixedStorage(shard.storage, SHARD)
    for trouble in list_shard(objects).of_kind("trouble"):
        read_trouble(objects, trouble.key)


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_hostile_header_is_damage_and_nothing_else(shard: Shard, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(shard.objects)))
    change = data.draw(changes(take_apart(shard.objects[key])[1]["header"]))
    hostile = with_header(shard.objects[key], change)
    tracemalloc.start()
    try:
        read_everything(shard, key, hostile)
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES_MAX
    finally:
        tracemalloc.stop()


# Lies that chance would seldom find, each with what must be said of it.


def own(header: dict[str, Any]) -> dict[str, Any]:
    entry = copy.deepcopy(header["last"])
    entry["pointer"] = header["pointer"]
    return entry


def circle(header: dict[str, Any]) -> None:
    header["chain"].append(own(header))
    header["last"] = own(header)


def follow_itself(header: dict[str, Any]) -> None:
    header["chain"], header["last"] = [], own(header)


def later(header: dict[str, Any]) -> None:
    header["chain"][0]["pointer"] = "900-aa"


def twice(header: dict[str, Any]) -> None:
    header["chain"].insert(1, copy.deepcopy(header["chain"][0]))


def not_its_own(header: dict[str, Any]) -> None:
    header["since"] = ["1-aa"]


def elsewhere(header: dict[str, Any]) -> None:
    header["shard"] = "totals/shard-0004"


def all_bytes(header: dict[str, Any]) -> None:
    header["plain_bytes"] = dict.fromkeys(header["plain_bytes"], 1 << 61)


def no_bytes(header: dict[str, Any]) -> None:
    header["plain_bytes"] = dict.fromkeys(header["plain_bytes"], -1)


def untold_bytes(header: dict[str, Any]) -> None:
    header["plain_bytes"] = {}


LIES = (circle, follow_itself, later, twice, not_its_own, elsewhere, all_bytes, no_bytes, untold_bytes)


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_a_commit_that_lies_is_named_by_whoever_reads_it(shard: Shard, lie: Change) -> None:
    """Restoring, the clean-up, the verification and the log agree, since they read commits in one place."""
    hostile = with_header(shard.objects[shard.newest], lie)
    with pytest.raises(CorruptionError, match=shard.newest):
        shard.restored(shard.newest, hostile)
    shard._store({**shard.objects, shard.newest: hostile})
    with pytest.raises(CorruptionError, match=shard.newest):
        clean_up(shard)
    objects = PrefixedStorage(shard.storage, SHARD)
    listing = list_shard(objects)
    report = verify_shard(objects, shard.threads, 100)
    assert shard.newest in {damage.key for damage in report.damages}
    newest = listing.objects[shard.newest.removeprefix(f"{SHARD}/")]
    assert shard.newest in describe(Headers(objects), newest)["error"]


def test_a_lie_about_sizes_is_no_lack_of_space(shard: Shard, tmp_path: Path) -> None:
    """Else a query would try again and again: first it is found out that no object is as large as that."""
    key = next(key for key in shard.objects if "/files/" in key)
    parts = (Part(key.removeprefix(f"{SHARD}/"), 1 << 50, "0" * 32),) * 100_000
    huge = SnapshotFile("huge", PART_BYTES_MAX * len(parts), 0, parts)
    with pytest.raises(CorruptionError, match=key):
        download_files([huge], PART_BYTES_MAX, PrefixedStorage(shard.storage, SHARD), tmp_path, shard.threads)
    assert list(tmp_path.iterdir()) == []
