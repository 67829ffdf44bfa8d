"""Entries of maps are looked up for many keys at once where a processor asks the map of each key for the same ones."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import LongType, Row

from holdfast.mvcc import Transaction
from holdfast.spark_integration.keyed import slabs
from holdfast.spark_integration.processor.state import states
from tests.tiers import repetitions
from tests.unit.spark_integration.processor.processor_shard import ProcessorShard, Scripted, columns

ENTRIES, KEYS = 20, [f"k{i}" for i in range(100)]
N = columns(n=LongType())


@pytest.fixture
def shard(tmp_path: Path) -> ProcessorShard:
    shard = ProcessorShard(tmp_path / "shard", Scripted(lambda handle: handle.getMapState("map", N, N)))

    def fill(entries: Any, key: Any, _: Any) -> None:
        for n in range(ENTRIES):
            entries.updateValue((n,), (n + 100 * int(key[0][1:]),))

    shard.each(KEYS, fill)
    return shard


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what is read: calls, and whole keys that are looked up."""
    counts: Counter[str] = Counter()
    get, scan_prefix = Transaction.get, Transaction.scan_prefix

    def counted_get(self: Any, table: str, keys: Any) -> Any:
        counts.update({"get": 1, "rows": len(keys)})
        return get(self, table, keys)

    def counted_scan(self: Any, table: str, keys: Any) -> Any:
        counts.update({"scan": 1})
        return scan_prefix(self, table, keys)

    monkeypatch.setattr(Transaction, "get", counted_get)
    monkeypatch.setattr(Transaction, "scan_prefix", counted_scan)
    return counts


def test_one_of_twenty_entries_costs_one_row_a_key(shard: ProcessorShard, read: Counter[str]) -> None:
    """Not the twenty of its map, and not a look-up for each key."""
    seen = shard.each(KEYS, lambda entries, *_: (entries.getValue((7,)), entries.containsKey((99,))))
    assert seen == {key: repr((Row(n=7 + 100 * i), False)) for i, key in enumerate(KEYS)}
    assert read["scan"] == 0
    assert read["rows"] == 2 * len(KEYS)
    assert read["get"] < 10


def test_entries_that_differ_from_key_to_key_are_fetched_with_their_maps(
    shard: ProcessorShard, read: Counter[str]
) -> None:
    """A few are looked up in vain, for a few keys each."""
    seen = shard.each(KEYS, lambda entries, key, _: entries.getValue((int(key[0][1:]) % ENTRIES,)))
    assert seen == {key: repr(Row(n=i % ENTRIES + 100 * i)) for i, key in enumerate(KEYS)}
    assert (read["get"], read["rows"]) == (4, 64)
    assert 0 < read["scan"] < 5


def test_maps_that_are_iterated_over_are_fetched_whole(shard: ProcessorShard, read: Counter[str]) -> None:
    """Nothing is looked up beside what comes with them."""
    shard.each(KEYS, lambda entries, *_: (len(list(entries.keys())), entries.getValue((7,)), entries.getValue((8,))))
    assert read["get"] == 0


@pytest.mark.parametrize("seed", repetitions(1, 100))
@pytest.mark.parametrize("slab_keys", [7, 20_000])
def test_whatever_a_processor_asks_it_gets_what_its_map_holds(
    shard: ProcessorShard, monkeypatch: pytest.MonkeyPatch, seed: int, slab_keys: int
) -> None:
    """Entries are read, written, removed, cleared and iterated over in any order, in keys that timers call again."""
    monkeypatch.setattr(slabs, "SLAB_KEYS", slab_keys)
    monkeypatch.setattr(states, "_FIRST_KEYS", 2)
    monkeypatch.setattr(states, "_GROWTH", 3)
    held = {key: {n: n + 100 * i for n in range(ENTRIES)} for i, key in enumerate(KEYS)}
    chance = random.Random(seed)
    # Most processors ask for few entries; each micro-batch is of another one.
    for _ in range(4):
        popular = chance.sample(range(ENTRIES + 2), chance.choice((1, 3, 4, 5, 20)))
        acts = ["get"] * chance.choice((3, 20)) + ["contains", "put", "remove", "clear", "iterate"]

        def act(entries: Any, key: Any, _: Any, popular: list[int] = popular, acts: list[str] = acts) -> None:
            mine = held[key[0]]
            for _ in range(chance.randrange(5)):
                n, what = chance.choice(popular), chance.choice(acts)
                if what == "get":
                    assert entries.getValue((n,)) == (None if n not in mine else Row(n=mine[n]))
                elif what == "contains":
                    assert entries.containsKey((n,)) == (n in mine)
                elif what == "put":
                    mine[n] = chance.randrange(1000)
                    entries.updateValue((n,), (mine[n],))
                elif what == "remove":
                    mine.pop(n, None)
                    entries.removeKey((n,))
                elif what == "clear":
                    mine.clear()
                    entries.clear()
                else:
                    assert {key[0]: value[0] for key, value in entries.iterator()} == mine

        shard.each(chance.choices(KEYS, k=60), act)
    seen = shard.each(KEYS, lambda entries, *_: sorted((key[0], value[0]) for key, value in entries.iterator()))
    assert seen == {key: repr(sorted(mine.items())) for key, mine in held.items()}
