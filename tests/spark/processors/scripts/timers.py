"""Timers of both modes: items TM, O3 to O5, W1 and K2."""

from __future__ import annotations

from tests.spark.processors.scripts.script import Case, Script

_ONCE = "handle.registerTimer(5000) if due > 5000 else None"

PROCESSING_TIME = Script(
    "processing-time",
    "ProcessingTime",
    (
        Case("tm3 a timer is due at its time", {0: "handle.registerTimer(12000)"}, ["0 rows", "2 timer 12000"]),
        Case("tm3 a ms later it is not", {0: "handle.registerTimer(12001)"}, ["0 rows", "3 timer 12001"]),
        Case("tm3 the batch's own time is due", {1: "handle.registerTimer(now())"}, ["1 rows", "1 timer 11000"]),
        Case(
            "tm2 past, zero and negative times are due at once, earliest first",
            {1: "handle.registerTimer(10999); handle.registerTimer(0); handle.registerTimer(-5)"},
            ["1 rows", "1 timer -5", "1 timer 0", "1 timer 10999"],
        ),
        Case("tm2 none is zero", {1: "handle.registerTimer(None)"}, ["1 rows", "1 timer 0"]),
        Case("tm2 numpy integers", {0: "handle.registerTimer(np.int64(11000))"}, ["0 rows", "1 timer 11000"]),
        Case(
            "tm2 floats and texts are type errors",
            {
                0: "?'TypeError' in repr(attempt(handle.registerTimer, 1.5));"
                "?'TypeError' in repr(attempt(handle.registerTimer, '5'));"
                "?'TypeError' in repr(attempt(handle.deleteTimer, 'x'))"
            },
            ["0 rows True, True, True"],
        ),
        Case(
            "tm1 registered twice it fires once",
            {0: "handle.registerTimer(11000); handle.registerTimer(11000); ?list(handle.listTimers())"},
            ["0 rows [11000]", "1 timer 11000"],
        ),
        Case(
            "tm1 deleting an absent one does nothing",
            {0: "handle.deleteTimer(5); handle.registerTimer(11000); handle.deleteTimer(11001)"},
            ["0 rows", "1 timer 11000"],
        ),
        Case(
            "tm1 deleted and registered in one call",
            {0: "handle.registerTimer(11000); handle.deleteTimer(11000); handle.registerTimer(11000)"},
            ["0 rows", "1 timer 11000"],
        ),
        Case("tm1 deleted in the same call", {0: "handle.registerTimer(11000); handle.deleteTimer(11000)"}, ["0 rows"]),
        Case(
            "o3 a row deletes a timer that is due",
            {0: "handle.registerTimer(12000)", 2: "handle.deleteTimer(12000)"},
            ["0 rows", "2 rows"],
        ),
        Case(
            "o3 a row moves a timer that is due",
            {0: "handle.registerTimer(12000)", 2: "handle.deleteTimer(12000); handle.registerTimer(14000)"},
            ["0 rows", "2 rows", "4 timer 14000"],
        ),
        Case(
            "o3 rows come before timers",
            {0: "handle.registerTimer(11000); value.update((1,))", 1: "value.update((2,))"},
            ["0 rows", "1 rows", "1 timer 11000 (2,)"],
            on_timer="?value.get()",
        ),
        Case(
            "tm4 the firing timer is listed",
            {0: "handle.registerTimer(11000); handle.registerTimer(13500)"},
            ["0 rows", "1 timer 11000 [11000, 13500]", "4 timer 13500 [13500]"],
            on_timer="?sorted(handle.listTimers())",
        ),
        Case(
            "tm5 one registered while timers fire waits for the next batch",
            {0: "handle.registerTimer(now())"},
            ["0 rows", "0 timer 10000", "1 timer 5000"],
            on_timer=_ONCE,
        ),
        Case(
            "tm5 and in the next batch without data",
            {0: "handle.registerTimer(14000)"},
            ["0 rows", "4 timer 14000", "5 timer 5000"],
            on_timer=_ONCE,
        ),
        Case(
            "tm6 the firing timer cannot be registered again",
            {0: "handle.registerTimer(11000)"},
            ["0 rows", "1 timer 11000"],
            on_timer="handle.deleteTimer(due); handle.registerTimer(due)",
        ),
        Case(
            "tm9 a timer registers the next",
            {0: "handle.registerTimer(11000)"},
            ["0 rows", *(f"{n} timer {10_000 + 1000 * n}" for n in range(1, 7))],
            on_timer="handle.registerTimer(due + 1000)",
        ),
        Case(
            "tm9 timers read and write all state",
            {
                0: "value.update((1,)); items.appendValue((1,)); entries.updateValue((1,), (1,));"
                "handle.registerTimer(11000)",
                2: "?value.get(); ?list(items.get()); ?list(entries.iterator())",
            },
            ["0 rows", "1 timer 11000", "2 rows (2,), [(1,), (2,)], [((2,), (2,))]"],
            on_timer="value.update((value.get()[0] + 1,)); items.appendValue((2,));"
            "entries.removeKey((1,)); entries.updateValue((2,), (2,))",
        ),
        Case(
            "tm10 each timer of a key sees what the one before left",
            {0: "[handle.registerTimer(t) for t in (11000, 10900, 10950)]"},
            ["0 rows", "1 timer 10900 None", "1 timer 10950 (10900,)", "1 timer 11000 (10950,)"],
            on_timer="?value.get(); value.update((due,))",
        ),
        Case(
            "k2 the key of a timer is a row with names",
            {0: "?type(key).__name__; ?key; handle.registerTimer(11000)"},
            [
                "0 rows 'tuple', ('k2 the key of a timer is a row with names',)",
                "1 timer 11000 'Row', 'k2 the key of a timer is a row with names', True",
            ],
            on_timer="?type(key).__name__; ?key.key; ?isinstance(key, tuple)",
        ),
        Case(
            "w1 processing time is the batch's and the watermark 0",
            {0: "?now(); ?watermark(); handle.registerTimer(10500)", 3: "?now(); ?watermark()"},
            ["0 rows 10000, 0", "1 timer 10500 11000, 0", "3 rows 13000, 0"],
            on_timer="?now(); ?watermark()",
        ),
        Case(
            "tm1 many timers of one key",
            {0: "[handle.registerTimer(11000 + 500 * n) for n in range(8)]", 1: "?len(list(handle.listTimers()))"},
            ["0 rows", "1 rows 8", *(f"{1 + (n + 1) // 2} timer {11000 + 500 * n}" for n in range(8))],
        ),
        Case(
            "tm5 a due timer fires though another deletes it while timers fire",
            {0: "handle.registerTimer(10900); handle.registerTimer(11000)"},
            ["0 rows", "1 timer 10900 [10900]", "1 timer 11000 []"],
            on_timer="handle.deleteTimer(11000); ?list(handle.listTimers())",
        ),
        Case(
            "tm4 timers are listed in order",
            {
                0: "[handle.registerTimer(t) for t in (1_000_000, 90_000, 60_000, 95_000, 65_536)];"
                "?list(handle.listTimers())"
            },
            ["0 rows [60000, 65536, 90000, 95000, 1000000]"],
            on_spark=["0 rows [65536, 95000, 1000000, 60000, 90000]"],
        ),
    ),
    micro_batches=7,
)

EVENT_TIME = Script(
    "event-time",
    "EventTime",
    (
        Case("tm3 a timer is due at the watermark", {0: "handle.registerTimer(2000)"}, ["0 rows", "2 timer 2000"]),
        Case("tm3 a ms later it is not", {0: "handle.registerTimer(2001)"}, ["0 rows", "3 timer 2001"]),
        Case("tm3 zero is due at the first watermark", {0: "handle.registerTimer(0)"}, ["0 rows", "0 timer 0"]),
        Case("tm3 one is not", {0: "handle.registerTimer(1)"}, ["0 rows", "1 timer 1"]),
        Case(
            "tm2 past and negative times are due at once",
            {2: "handle.registerTimer(1999); handle.registerTimer(-7)"},
            ["2 rows", "2 timer -7", "2 timer 1999"],
        ),
        Case("w5 without data", {0: "handle.registerTimer(5000)"}, ["0 rows", "5 timer 5000"]),
        Case(
            "w1 both clocks",
            {0: "?now(); ?watermark(); handle.registerTimer(1500)", 2: "?now(); ?watermark()"},
            ["0 rows 10000, 0", "2 rows 12000, 2000", "2 timer 1500 12000, 2000"],
            on_timer="?now(); ?watermark()",
        ),
        Case(
            "o3 a row deletes a timer that is due",
            {0: "handle.registerTimer(2000)", 2: "handle.deleteTimer(2000)"},
            ["0 rows", "2 rows"],
        ),
        Case(
            "tm5 one registered while timers fire waits for the next batch",
            {0: "handle.registerTimer(1000)"},
            ["0 rows", "1 timer 1000", "2 timer -3"],
            on_timer="handle.registerTimer(-3) if due > 0 else None",
        ),
        Case(
            "tm9 a timer registers the next",
            {0: "handle.registerTimer(500)"},
            ["0 rows", "1 timer 500", "2 timer 1500", "3 timer 2500", "4 timer 3500", "5 timer 4500"],
            on_timer="handle.registerTimer(due + 1000)",
        ),
        Case(
            "tm9 state that a timer leaves is there after a restart",
            {0: "handle.registerTimer(500)", 4: "?value.get(); ?list(items.get())"},
            ["0 rows", "1 timer 500", "4 rows (500,), [(500,)]"],
            on_timer="value.update((due,)); items.appendValue((due,))",
        ),
        Case(
            "tm6 the firing timer cannot be registered again",
            {0: "handle.registerTimer(500)"},
            ["0 rows", "1 timer 500"],
            on_timer="handle.registerTimer(due)",
        ),
        Case(
            "tm1 timers outlive a clear of all state",
            {0: "value.update((1,)); handle.registerTimer(1500)", 1: "value.clear()"},
            ["0 rows", "1 rows", "2 timer 1500 None"],
            on_timer="?value.get()",
        ),
    ),
    micro_batches=6,
    watermark=True,
)

NO_TIME = Script(
    "no-time",
    "None",
    (
        Case(
            "l2 state is there in the next batch",
            dict.fromkeys(range(4), "?value.get(); value.update(((value.get() or (0,))[0] + 1,))"),
            ["0 rows None", "1 rows (1,)", "2 rows (2,)", "3 rows (3,)"],
        ),
        Case(
            "s1 a list grows over batches",
            {n: f"items.appendList([({n},), ({n + 10},)]); ?list(items.get())" for n in range(3)},
            [
                "0 rows [(0,), (10,)]",
                "1 rows [(0,), (10,), (1,), (11,)]",
                "2 rows [(0,), (10,), (1,), (11,), (2,), (12,)]",
            ],
        ),
        Case(
            "s1 a list is put anew, appended to and cleared",
            {
                0: "items.appendList([(1,), (2,), (3,)])",
                1: "items.put([(4,)]); items.appendValue((5,))",
                2: "?list(items.get()); items.clear(); items.appendValue((6,))",
                3: "?list(items.get())",
            },
            ["0 rows", "1 rows", "2 rows [(4,), (5,)]", "3 rows [(6,)]"],
        ),
        Case(
            "m1 entries come and go over batches",
            {
                0: "[entries.updateValue((n,), (n,)) for n in range(4)]",
                1: "entries.removeKey((1,)); entries.updateValue((2,), (20,))",
                2: "?sorted(entries.iterator()); ?entries.getValue((1,)); ?entries.containsKey((3,))",
                3: "entries.clear(); entries.updateValue((9,), (9,)); ?list(entries.keys())",
            },
            ["0 rows", "1 rows", "2 rows [((0,), (0,)), ((2,), (20,)), ((3,), (3,))], None, True", "3 rows [(9,)]"],
        ),
        Case(
            "v4 cleared in one batch, absent in the next",
            {0: "value.update((1,))", 1: "value.clear()", 2: "?value.exists(); ?value.get()"},
            ["0 rows", "1 rows", "2 rows False, None"],
        ),
        Case(
            "m6 an iterator over a stored map while it changes",
            {
                0: "[entries.updateValue((n,), (n,)) for n in range(3)]",
                1: "?sorted((k, entries.removeKey(k)) for k, _ in entries.iterator()); ?entries.exists()",
            },
            ["0 rows", "1 rows [((0,), None), ((1,), None), ((2,), None)], False"],
        ),
        Case(
            "s4 an iterator over a stored list while it changes",
            {
                0: "items.appendList([(1,), (2,)])",
                1: "?[(n, items.appendValue((n + 10,))) for (n,) in items.get()]; ?list(items.get())",
            },
            ["0 rows", "1 rows [(1, None), (2, None)], [(1,), (2,), (11,), (12,)]"],
        ),
    ),
    micro_batches=4,
)
