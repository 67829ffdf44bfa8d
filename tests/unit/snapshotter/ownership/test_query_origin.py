"""What a query began with that was restored: read back as it was written, and refused where it is not that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from holdfast.backends import stored_file
from holdfast.errors import ConflictError, CorruptionError, SchemaMismatchError
from holdfast.snapshotter.ownership.query_origin import (
    FOLDER,
    KIND,
    QueryOrigin,
    declare_origin,
    find_origin,
    forget_origin,
    may_clear,
    take_directories,
)
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.shard.operator_directory import OPERATOR_NAME, operator_of, require_restored
from tests.storage_in_ram import storage_in_ram

ORIGIN = QueryOrigin("q-2", "q-1", "q-1", 7, {"totals": "q-1", "pairs@q-1": "q-1"}, ("fresh",))


@pytest.fixture
def storage() -> Iterator[ObjectStorage]:
    with storage_in_ram() as opened:
        yield opened


def test_what_is_written_is_read(storage: ObjectStorage) -> None:
    """Of this query; others have none, and no operator has its folder's name."""
    declare_origin(storage, ORIGIN)
    assert find_origin(storage, "q-2") == ORIGIN
    assert find_origin(storage, "q-1") is None
    assert ORIGIN.operators == {"totals", "pairs"}
    assert not OPERATOR_NAME.fullmatch(FOLDER)
    assert operator_of(FOLDER) is None
    forget_origin(storage, "q-2")
    assert find_origin(storage, "q-2") is None


@pytest.mark.parametrize(
    "change",
    [
        {"query_id": "q-3"},
        {"state_id": "../q"},
        {"of_query": 7},
        {"batch_id": -1},
        {"directories": {"../totals": "q"}},
        {"directories": {"_queries": "q"}},
        {"directories": {"totals/shard-0001": "q"}},
        {"directories": ["totals"]},
        {"directories": {"totals": 1}},
        {"empty": ["a/b"]},
        {"empty": "totals"},
        {"unnamed": None},
        {"surplus": 1},
    ],
)
def test_what_cannot_be_is_refused(storage: ObjectStorage, change: dict[str, Any]) -> None:
    """A restore deletes the directories that an object of a killed one names: so they are names of operators."""
    values = {**asdict(ORIGIN), "empty": list(ORIGIN.empty), **change}
    storage.put(f"{FOLDER}/q-2", stored_file.encode(KIND, values)[0])
    with pytest.raises(CorruptionError, match="_queries/q-2"):
        find_origin(storage, "q-2")


@pytest.mark.parametrize("name", ["totals", "pairs", "fresh", "new"])
def test_operators_that_may_begin(name: str) -> None:
    """Restored ones, whose other shards have state; those that were reset; those that the session names."""
    require_restored(ORIGIN, name, ("new",))
    require_restored(replace(ORIGIN, unnamed=1), "anything", ())


def test_the_error_names_the_operator_and_the_restored_ones() -> None:
    with pytest.raises(SchemaMismatchError, match=r"allowNew to its name.*operator=total restored='pairs, totals'"):
        require_restored(ORIGIN, "total", ("tota",))


def test_only_the_clone_that_has_taken_directories_may_clear_them(storage: ObjectStorage) -> None:
    """The records of all clones of a query name the same one: a killed clone must not clear what another one filled."""
    killed, other = (replace(ORIGIN, query_id=name) for name in ("q-3", "q-4"))
    declare_origin(storage, killed)
    declare_origin(storage, other)
    for one in (killed, other):
        with pytest.raises(ConflictError, match=r"delete _queries/q-.*operators='pairs@q-1, totals'"):
            take_directories(storage, one)
        assert not may_clear(storage, one, "totals")
    forget_origin(storage, "q-3")
    take_directories(storage, other)
    declare_origin(storage, killed)
    assert may_clear(storage, other, "totals")
    assert not may_clear(storage, killed, "totals")
    forget_origin(storage, "q-4")
    assert not may_clear(storage, other, "totals")
    restored = replace(ORIGIN, query_id="q-5", state_id="q-5", directories={"totals@q-5": "q-5"})
    assert may_clear(storage, restored, "totals@q-5"), "nobody else writes records that name it"
    declare_origin(storage, replace(killed, query_id="q-6", directories={"else": "q-1"}))
    forget_origin(storage, "q-3")
    take_directories(storage, restored)


def test_two_clones_of_a_query_without_rows_take_no_directory_together(storage: ObjectStorage) -> None:
    """Both would begin their operators under the id of the original, and each pass for a newer run of the other."""
    one, other = (replace(ORIGIN, query_id=name, directories={}, unnamed=1) for name in ("q-3", "q-4"))
    declare_origin(storage, one)
    take_directories(storage, one)
    declare_origin(storage, other)
    with pytest.raises(ConflictError, match=r"choose another directory.*query=q-3"):
        take_directories(storage, other)
    with pytest.raises(ConflictError, match=r"operators='' query=q-3"):
        take_directories(storage, replace(other, directories={"totals": "q-1"}, unnamed=0))
    take_directories(storage, replace(other, state_id="q-5"))
    forget_origin(storage, "q-3")
    declare_origin(storage, replace(one, unnamed=0))  # without an operator of holdfast's
    take_directories(storage, replace(other, unnamed=0))
