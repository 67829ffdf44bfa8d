"""Time to live: items TL, and Q2. All variables live 3 seconds: what is written in micro-batch 0 is gone in 3."""

from __future__ import annotations

from tests.spark.processors.scripts.script import Case, Script

_KEYS = "?sorted(k for k, in entries.keys())"
_ITEMS = "?[n for n, in items.get()]"

TTL = Script(
    "ttl",
    "ProcessingTime",
    (
        Case(
            "tl2 a value is gone at its expiry, inclusive",
            {
                0: "value.update((1,)); ?value.get()",
                2: "?value.get(); ?value.exists()",
                3: "?value.get(); ?value.exists()",
            },
            ["0 rows (1,)", "2 rows (1,), True", "3 rows None, False"],
        ),
        Case(
            "tl4 an equal value is written anew",
            {0: "value.update((1,))", 2: "value.update((1,))", 4: "?value.get()", 5: "?value.get()"},
            ["0 rows", "2 rows", "4 rows (1,)", "5 rows None"],
        ),
        Case(
            "tl4 reads do not refresh",
            {0: "value.update((1,))", 1: "?value.get()", 2: "?value.exists()", 3: "?value.get()"},
            ["0 rows", "1 rows (1,)", "2 rows True", "3 rows None"],
        ),
        Case(
            "tl2 a value that was gone may be set again",
            {0: "value.update((1,))", 3: "?value.get(); value.update((2,))", 5: "?value.get()", 6: "?value.get()"},
            ["0 rows", "3 rows None", "5 rows (2,)", "6 rows None"],
        ),
        Case(
            "tl4 cleared and set again lives from then on",
            {
                0: "value.update((1,))",
                1: "value.clear()",
                2: "value.update((2,))",
                4: "?value.get()",
                5: "?value.get()",
            },
            ["0 rows", "1 rows", "2 rows", "4 rows (2,)", "5 rows None"],
        ),
        Case(
            "tl3 each element has its own time",
            {
                0: "items.appendValue((0,))",
                1: "items.appendList([(1,), (11,)])",
                **dict.fromkeys((2, 3, 4), f"{_ITEMS}; ?items.exists()"),
            },
            ["0 rows", "1 rows", "2 rows [0, 1, 11], True", "3 rows [1, 11], True", "4 rows [], False"],
        ),
        Case(
            "tl4 appending does not refresh what is there",
            {n: f"items.appendValue(({n},)); {_ITEMS}" for n in range(6)},
            [
                "0 rows [0]",
                "1 rows [0, 1]",
                "2 rows [0, 1, 2]",
                "3 rows [1, 2, 3]",
                "4 rows [2, 3, 4]",
                "5 rows [3, 4, 5]",
            ],
        ),
        Case(
            "tl4 put writes all elements anew",
            {0: "items.appendValue((0,))", 2: "items.put([(0,), (2,)])", 4: _ITEMS, 5: f"{_ITEMS}; ?items.exists()"},
            ["0 rows", "2 rows", "4 rows [0, 2]", "5 rows [], False"],
        ),
        Case(
            "tl5 an expired list may be appended to",
            {0: "items.appendList([(0,), (1,)])", 3: f"items.appendValue((3,)); {_ITEMS}", 5: _ITEMS, 6: _ITEMS},
            ["0 rows", "3 rows [3]", "5 rows [3]", "6 rows []"],
        ),
        Case(
            "tl4 a list cleared and filled again lives from then on",
            {
                0: "items.appendList([(0,), (1,)])",
                1: "items.clear()",
                2: "items.appendValue((2,))",
                4: _ITEMS,
                5: _ITEMS,
            },
            ["0 rows", "1 rows", "2 rows", "4 rows [2]", "5 rows []"],
        ),
        Case(
            "tl3 each entry has its own time",
            {
                0: "entries.updateValue((0,), (0,))",
                1: "entries.updateValue((1,), (1,))",
                2: _KEYS,
                3: f"{_KEYS}; ?entries.getValue((0,)); ?entries.containsKey((0,)); ?entries.exists()",
                4: f"{_KEYS}; ?list(entries.iterator()); ?list(entries.values()); ?entries.exists()",
            },
            ["0 rows", "1 rows", "2 rows [0, 1]", "3 rows [1], None, False, True", "4 rows [], [], [], False"],
        ),
        Case(
            "tl4 updating an entry refreshes it alone",
            {
                0: "entries.updateValue((0,), (0,)); entries.updateValue((1,), (1,))",
                2: "entries.updateValue((0,), (0,)); ?entries.getValue((1,))[0]",
                **dict.fromkeys((3, 4, 5), _KEYS),
            },
            ["0 rows", "2 rows 1", "3 rows [0]", "4 rows [0]", "5 rows []"],
        ),
        Case(
            "tl6 an entry removed and put again lives from then on",
            {
                0: "entries.updateValue((8,), (8,)); entries.updateValue((9,), (9,))",
                1: "entries.removeKey((9,))",
                2: "entries.updateValue((8,), (8,)); entries.updateValue((9,), (9,))",
                **dict.fromkeys((3, 4, 5), _KEYS),
            },
            ["0 rows", "1 rows", "2 rows", "3 rows [8, 9]", "4 rows [8, 9]", "5 rows []"],
            # Q2: it is evicted at the end of 3, when the removed one would have been.
            on_spark=["0 rows", "1 rows", "2 rows", "3 rows [8, 9]", "4 rows [8]", "5 rows []"],
        ),
        Case(
            "tl6 a map cleared and filled again lives from then on",
            {
                0: "entries.updateValue((9,), (9,))",
                1: "entries.clear()",
                2: "entries.updateValue((9,), (9,))",
                **dict.fromkeys((3, 4, 5), _KEYS),
            },
            ["0 rows", "1 rows", "2 rows", "3 rows [9]", "4 rows [9]", "5 rows []"],
        ),
        Case(
            "tl6 removed and put again in one call",
            {
                0: "entries.updateValue((9,), (9,))",
                2: "entries.removeKey((9,)); entries.updateValue((9,), (99,))",
                **dict.fromkeys((3, 4, 5), "?entries.getValue((9,))"),
            },
            ["0 rows", "2 rows", "3 rows Row(n=99)", "4 rows Row(n=99)", "5 rows None"],
            on_spark=["0 rows", "2 rows", "3 rows Row(n=99)", "4 rows None", "5 rows None"],
        ),
        Case(
            "tl5 a timer sees no expired state",
            {
                0: "value.update((1,)); items.appendValue((1,)); entries.updateValue((1,), (1,));"
                "handle.registerTimer(12000); handle.registerTimer(13000)"
            },
            ["0 rows", "2 timer 12000 (1,), [1], [1]", "3 timer 13000 None, [], []"],
            on_timer=f"?value.get(); {_ITEMS}; {_KEYS}",
        ),
        Case(
            "tl4 what a timer writes lives from then on",
            {0: "handle.registerTimer(12000)", 4: "?value.get()", 5: "?value.get()"},
            ["0 rows", "2 timer 12000", "4 rows (7,)", "5 rows None"],
            on_timer="value.update((7,))",
        ),
        Case(
            "tl5 only what has expired goes",
            {0: "value.update((1,))", 1: "items.appendValue((1,))", 3: f"?value.get(); {_ITEMS}", 4: _ITEMS},
            ["0 rows", "1 rows", "3 rows None, [1]", "4 rows []"],
        ),
        Case(
            "tl4 nulls too",
            {
                0: "value.update((None,)); entries.updateValue((None,), (None,))",
                2: "?value.get(); ?entries.containsKey((None,))",
                3: "?value.get(); ?entries.containsKey((None,))",
            },
            ["0 rows", "2 rows (None,), True", "3 rows None, False"],
        ),
        Case(
            "tl3 many elements and entries",
            {
                0: "items.appendList([(n,) for n in range(300)]);[entries.updateValue((n,), (n,)) for n in range(50)]",
                1: "items.appendList([(1,), (2,)]); entries.updateValue((7,), (8,))",
                2: "?len(list(items.get())); ?len(list(entries.keys()))",
                3: f"{_ITEMS}; ?list(entries.iterator())",
                4: f"{_ITEMS}; ?list(entries.iterator())",
            },
            ["0 rows", "1 rows", "2 rows 302, 50", "3 rows [1, 2], [((7,), (8,))]", "4 rows [], []"],
        ),
        Case(
            "tl5 an iterator skips what has expired",
            {
                0: "entries.updateValue((5,), (5,))",
                1: "[entries.updateValue((n,), (n,)) for n in (1, 9)]",
                3: "?sorted(entries.iterator()); ?sorted(entries.values())",
            },
            ["0 rows", "1 rows", "3 rows [((1,), (1,)), ((9,), (9,))], [(1,), (9,)]"],
        ),
    ),
    micro_batches=8,
    ttl_ms=3000,
)
