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
    is_filling,
)
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.shard.pointer_row import OPERATOR_NAME, operator_of
from holdfast.spark_integration.shard_call.claiming import require_restored
from holdfast.testing.faulty_storage import Fault, FaultyStorage
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
    forget_origin(storage, ORIGIN)
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


def test_a_state_directory_takes_one_clone_of_a_query(storage: ObjectStorage) -> None:
    """Both would write under its id, each pass for a newer run of the other, and clear what the other one filled."""
    first, other = (replace(ORIGIN, query_id=name) for name in ("q-3", "q-4"))
    declare_origin(storage, first)
    declare_origin(storage, first)  # the same request again, of which the reply was lost
    with pytest.raises(ConflictError, match=r"choose another directory.*delete _queries/q-1\.fills"):
        declare_origin(storage, other)
    assert is_filling(storage, first)
    assert not is_filling(storage, other), "which is told apart though it has declared what it begins with"
    declare_origin(storage, replace(other, query_id="q-5", state_id="q-6"))
    restored = replace(ORIGIN, query_id="q-7", state_id="q-7", directories={"totals@q-7": "q-7"})
    declare_origin(storage, restored)
    assert is_filling(storage, restored), "nobody else writes records that name it"
    forget_origin(storage, other)
    assert is_filling(storage, first)
    forget_origin(storage, first)
    assert not is_filling(storage, first)
    declare_origin(storage, other)
    assert is_filling(storage, other)


@pytest.mark.parametrize("nth", range(1, 4))
def test_of_two_clones_at_once_one_is_told(storage: ObjectStorage, nth: int) -> None:
    """Wherever the one stands still while the other one begins; what it declared it can still forget."""
    one, other = (replace(ORIGIN, query_id=name) for name in ("q-3", "q-4"))
    told = []

    def begun(whose: QueryOrigin, asked: ObjectStorage) -> None:
        try:
            declare_origin(asked, whose)
        except ConflictError:
            forget_origin(storage, whose)
            told.append(whose.query_id)

    begun(one, FaultyStorage(storage, [Fault("delay", nth=nth, wait=lambda: begun(other, storage))]))
    if nth == 3:  # it makes two requests
        begun(other, storage)
    assert len(told) == 1
    assert {info.key for info in storage.list("")} == {
        "_queries/q-1.fills",
        f"_queries/{'q-4' if one.query_id in told else 'q-3'}",
    }
