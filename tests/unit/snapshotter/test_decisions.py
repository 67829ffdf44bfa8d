"""Decisions about sinks as they are stored: round trip, what cannot be, listings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from holdfast.backends import stored_file
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.decisions import Decision, Decisions, StoredSink, damages, parse_key
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.upkeep.catalogue import list_state_dir
from tests.storage_in_ram import storage_in_ram

DECISION = Decision("totals", "q-1", 7, 30, ({"gid": "a", "at": [1, {"x": None}]}, {"gid": "b"}))
VALUES = asdict(DECISION) | {"handles": [dict(handle) for handle in DECISION.handles]}
KEY = "_sinks/totals/q-1/decided-7"


@pytest.fixture
def storage() -> Iterator[ObjectStorage]:
    with storage_in_ram() as opened:
        yield opened


@pytest.fixture
def decisions(storage: ObjectStorage) -> Decisions:
    return Decisions(storage, "totals", "q-1")


def test_a_decision_is_read_as_it_was_stored(decisions: Decisions) -> None:
    """Handles are the sink's own JSON, and come back as they were."""
    decisions.begin()
    decisions.put(DECISION)
    assert decisions.read(7) == DECISION
    assert decisions.batches() == [7]
    assert decisions.queries() == {"q-1"}
    with pytest.raises(NotFoundError):
        decisions.read(8)


def test_what_others_put_beside_decisions_is_no_query(storage: ObjectStorage, decisions: Decisions) -> None:
    """Hadoop marks folders in S3, and file managers leave notes: the query was told that another one writes there."""
    decisions.begin()
    for foreign in ("q-1_$folder$", ".DS_Store", "README", "q-2/begun.part", "q-3/decided-07", "q-4/begun/1"):
        storage.put(f"_sinks/totals/{foreign}", b"")
    storage.put("_sinks/totals/q-5/decided-0", b"")  # what a killed delete leaves last
    assert decisions.queries() == {"q-1", "q-5"}


@pytest.mark.parametrize("text", ["\ud83d", "part-\udcff.csv"])
def test_what_no_start_could_read_is_not_decided(decisions: Decisions, text: str) -> None:
    """As the name of a file that is not UTF-8, in a handle of a sink that somebody else has written."""
    with pytest.raises(InvalidArgumentError, match="lone surrogate"):
        decisions.put(replace(DECISION, handles=({"file": text},)))
    assert decisions.batches() == []
    decisions.put(replace(DECISION, handles=({"file": "\N{WAVE DASH}\N{OCTOPUS}"},)))
    assert decisions.read(7).handles == ({"file": "\N{WAVE DASH}\N{OCTOPUS}"},)


@pytest.mark.parametrize(
    "change",
    [
        {"sink": "other"},
        {"sink": "../totals"},
        {"query_id": "q-2"},
        {"query_id": None},
        {"batch_id": 8},
        {"batch_id": True},
        {"rows": -1},
        {"handles": {}},
        {"handles": ["gid"]},
        {"handles": [{}, None]},
        {"surplus": 1},
    ],
)
def test_what_cannot_be_is_refused(storage: ObjectStorage, decisions: Decisions, change: dict[str, Any]) -> None:
    """What comes from storage is hostile: a sink is handed nothing of a decision that is not this query's."""
    storage.put(KEY, stored_file.encode("decision", {**VALUES, **change})[0])
    with pytest.raises(CorruptionError, match="decided-7"):
        decisions.read(7)


def test_handles_that_no_reader_would_take_are_not_stored(storage: ObjectStorage, decisions: Decisions) -> None:
    with pytest.raises(InvalidArgumentError, match="fewer partitions"):
        decisions.put(Decision("totals", "q-1", 7, 30, ({"gid": "x" * (16 << 20)},)))
    assert storage.list("") == []


def test_the_newest_decisions_stay(storage: ObjectStorage, decisions: Decisions) -> None:
    """Old ones go many at a time, also those of runs before."""
    for batch_id in range(40):
        decisions.put(Decision("totals", "q-1", batch_id, 1, ({},)))
    again = Decisions(storage, "totals", "q-1")
    again.batches()
    again.prune(10)
    assert again.batches() == list(range(30, 40))
    again.prune(1)
    assert again.batches() == list(range(30, 40)), "not one by one"


def test_a_query_that_was_replaced_leaves_nothing(storage: ObjectStorage, decisions: Decisions) -> None:
    decisions.begin()
    decisions.put(DECISION)
    decisions.delete()
    assert storage.list("") == []


@pytest.mark.parametrize(
    ("key", "found"),
    [
        (KEY, ("totals", "q-1", 7)),
        ("_sinks/totals/q-1/begun", ("totals", "q-1", None)),
        ("_sinks/totals/q-1/decided-07", None),
        ("_sinks/totals/q-1/other", None),
        ("_sinks/a.b/q-1/decided-7", None),
        ("_sinks/totals/decided-7", None),
        ("totals/shard-0000/q-1/decided-7", None),
    ],
)
def test_only_names_that_we_would_give_are_ours(key: str, found: tuple[str, str, int | None] | None) -> None:
    assert parse_key(key) == found


def test_a_directory_lists_its_sinks(storage: ObjectStorage, decisions: Decisions) -> None:
    """Also one that holds nothing else, as of a query with Spark's own operators."""
    decisions.begin()
    decisions.put(DECISION)
    storage.put("_sinks/totals/q-1/foreign", b"")
    listing = list_state_dir(storage)
    (sink,) = listing.sinks
    assert (sink.sink, sink.query_id, sink.decided) == ("totals", "q-1", (7,))
    assert [info.key for info in listing.unknown] == ["_sinks/totals/q-1/foreign"]
    assert damages(storage, sink) == []
    storage.put(KEY, b"damaged")
    gone = StoredSink("totals", "q-1", (6, 7), 0, 0)
    assert [key for key, _ in damages(storage, gone)] == [KEY]
