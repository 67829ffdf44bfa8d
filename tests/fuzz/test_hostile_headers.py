"""Headers that lie: well-formed JSON, rightly framed, with right digests, and linked by whoever names the object.

Each header of a real shard is changed where it hurts: types, signs, sizes, cycles, pointers of other shards, depth.
Restoring, clean-ups, verification and the log then answer, or name the object in a `CorruptionError`: never another
exception, and never with more memory than a few times what is stored.
"""

from __future__ import annotations

import copy
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.commands.log import describe
from holdfast.errors import CorruptionError
from holdfast.snapshotter.ownership.claims import retained_versions
from holdfast.snapshotter.ownership.operator_record import read_operator
from holdfast.snapshotter.ownership.stored_tables import stored_tables
from holdfast.snapshotter.snapshots.manifest import PART_BYTES_MAX, Part, SnapshotFile
from holdfast.snapshotter.snapshots.snapshots import download_files
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import Headers, list_shard
from holdfast.snapshotter.upkeep.retention import History, needed_in_storage, plan
from holdfast.snapshotter.upkeep.troubles import Troubles, read_trouble
from holdfast.snapshotter.upkeep.verification import verify_shard
from tests.fuzz.forge import ODD, put_together, take_apart
from tests.fuzz.hostile_files import SHARD, Shard
from tests.unit.snapshotter.ownership.runs import claimant, take, take_after

#: Restoring the whole shard takes less than 2 MB; a believed claim asks for far more.
PEAK_BYTES_MAX = 32 << 20
Path_ = tuple[Any, ...]
Change = Callable[[dict[str, Any], dict[str, Any]], None]


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shard]:
    with ThreadPoolExecutor(2) as threads:
        made = Shard(tmp_path_factory.mktemp("hostile-headers"), threads)
        take(made.storage, claimant("query"))
        take_after(made.storage, "r2", "r1", query="query")
        Troubles(PrefixedStorage(made.storage, SHARD)).tell("snapshot", CorruptionError("it"), 1, "host", 1)
        made.objects = {info.key: bytes(made.storage.get(info.key)) for info in made.storage.list("totals/")}
        yield made


# What is changed.


def places(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Yield the path of each value inside a header."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def at(value: Any, path: Path_) -> Any:
    for key in path:
        value = value[key]
    return value


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
def changes(draw: st.DrawFn, header: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """Return what changes a header in one to three places."""
    steps: list[tuple[str, Path_, Any]] = []
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


def changed_object(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    body, footer = take_apart(data)
    change(footer["header"])
    return put_together(body, footer)


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_hostile_header_is_damage_and_nothing_else(shard: Shard, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(shard.objects)))
    change = data.draw(changes(take_apart(shard.objects[key])[1]["header"]))
    hostile = changed_object(shard.objects[key], change)
    tracemalloc.start()
    try:
        read_everything(shard, key, hostile)
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES_MAX
    finally:
        tracemalloc.stop()


# Lies that chance would seldom find, each with what must be said of it.


def own(header: dict[str, Any]) -> dict[str, Any]:
    """Return a chain entry for the commit itself."""
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


LIES = (circle, follow_itself, later, twice, not_its_own, elsewhere, all_bytes, no_bytes)


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_a_commit_that_lies_is_named_by_whoever_reads_it(shard: Shard, lie: Change) -> None:
    """Restoring, the clean-up, the verification and the log agree, since they read commits in one place."""
    hostile = changed_object(shard.objects[shard.newest], lie)  # type: ignore[arg-type]
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
