"""What keys do, micro-batch by micro-batch, in queries that all engines run: the items of Spark's contract as data.

Keys know nothing of each other, so many cases share one query. All queries go by the same clock::

    micro-batch             0       1       2       3       4 (without data)
    event times of rows   1000    2000    3000    4000      -
    watermark                0    1000    2000    3000    4000
    rows dropped up to       -       0    1000    2000    3000

`Case.calls` says which calls Spark makes, ``"0 3t"``: in micro-batch 0 with data, in 3 for a timeout. `Case.state` is
what it stores at the end. Both are asserted of Spark itself, so that a case cannot pass because nothing happened;
what the calls saw is compared between the engines, word by word.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.spark.parity.engines import Row

Stored = tuple[tuple[int | None, ...] | None, int | None]
"""Value, and when it times out in ms; with processing time 1 for any time."""

_END: Stored | None = None


@dataclass(frozen=True)
class Case:
    """One key of a script."""

    #: Number in the list of Spark's promises.
    item: str
    #: What the key shows.
    what: str
    #: Commands for `program.interpret`, by micro-batch. A row more for each ``&``.
    do: dict[int, str]
    #: Micro-batches in which Spark calls the function.
    calls: str
    #: What Spark stores at the end.
    state: Stored | None = None
    #: Commands for calls without data.
    on_timeout: str = ""
    #: Calls and state with the documented timeouts, where Spark's differ from its documentation.
    documented: tuple[str, Stored | None] | None = None

    @property
    def key(self) -> str:
        return f"{self.item} {self.what}@{self.on_timeout}"


@dataclass(frozen=True)
class Script:
    """A query: its timeouts, and what its keys do."""

    name: str
    timeout: str
    cases: tuple[Case, ...]
    micro_batches: int = 4

    def rows(self, number: int) -> list[Row]:
        """Return the rows of one micro-batch."""
        now_ms = 1000 * (number + 1)
        own = [(c.key, now_ms, do) for c in self.cases if number in c.do for do in c.do[number].split("&")]
        return [("clock", now_ms, "watermark"), *own]


# Scala's FlatMapGroupsWithStateSuite, "InputProcessor - process new data", without timeouts.
NO_TIMEOUT = Script(
    "NoTimeout",
    "NoTimeout",
    (
        Case("P1", "no prior state, no update", {1: ""}, "1"),
        Case("P1", "no prior state, state updated", {1: "update 5"}, "1", ((5,), None)),
        Case("P1", "no prior state, state removed", {1: "remove"}, "1"),
        Case("P1", "prior state, no update", {0: "update 3", 1: "get"}, "0 1", ((3,), None)),
        Case("P1", "prior state, state updated", {0: "update 3", 1: "update 5"}, "0 1", ((5,), None)),
        Case("P1", "prior state, state removed", {0: "update 3", 1: "remove", 2: "get"}, "0 1 2"),
        Case("C2", "all rows of a key in one call", {0: "increase&increase&increase"}, "0", ((3,), None)),
        Case("C6", "updated in every micro-batch", dict.fromkeys(range(4), "increase"), "0 1 2 3", ((4,), None)),
        Case("G1", "get without state", {0: "get;str;timed-out"}, "0"),
        Case("G1", "get with state", {0: "update 1", 1: "get;str;timed-out;old-timeout"}, "0 1", ((1,), None)),
        Case("G2", "update with None", {0: "update-none;get"}, "0"),
        Case("G2", "an update of the wrong arity that is put right", {0: "update 1,2;update 3"}, "0", ((3,), None)),
        Case("G3", "update, then remove", {0: "update 1", 1: "update 2;remove;get;str", 2: "get"}, "0 1 2"),
        Case("G3", "remove, then update", {0: "update 1", 1: "remove;update 2;get"}, "0 1", ((2,), None)),
        Case("G3", "removed twice", {0: "update 1", 1: "remove;remove;get", 2: "get"}, "0 1 2"),
        Case("G3", "removed without state", {0: "remove;str;get"}, "0"),
        Case("G4", "duration refused", {0: "duration 5;duration 0;duration-text 5"}, "0"),
        Case("G5", "timestamp refused", {0: "timestamp 5;timestamp 0;at 2001-01-01 00:00:00"}, "0"),
        Case("G7", "watermark and old timeout", dict.fromkeys(range(4), "watermark;old-timeout"), "0 1 2 3"),
        Case("P1", "removed and made again", {0: "update 1", 1: "remove", 2: "update 4"}, "0 1 2", ((4,), None)),
    ),
)

_SET = "update 1;timestamp 2500"

EVENT_TIME = Script(
    "EventTimeTimeout",
    "EventTimeTimeout",
    (
        # "process new data - EventTimeTimeout - no prior state - …"
        Case("P1", "no prior state, no update", {1: ""}, "1"),
        Case("P1", "no prior state, state updated", {1: "update 5"}, "1", ((5,), None)),
        Case("P1", "no prior state, state removed", {1: "remove"}, "1"),
        Case(
            "G6",
            "no prior state, timeout without state",
            {1: "timestamp 2500"},
            "1 3t 4t",
            (None, 2500),
            "",
            ("1 3t", None),
        ),
        Case("P1", "no prior state, state and timeout", {1: "update 5;timestamp 9000"}, "1", ((5,), 9000)),
        # "… - prior state set, no prior timeout - …"
        Case("P1", "prior state, no update", {0: "update 3", 1: "get"}, "0 1", ((3,), None)),
        Case("P1", "prior state, state updated", {0: "update 3", 1: "update 5"}, "0 1", ((5,), None)),
        Case("P1", "prior state, state removed", {0: "update 3", 1: "remove"}, "0 1"),
        Case(
            "P1", "prior state, state and timeout", {0: "update 3", 1: "update 5;timestamp 9000"}, "0 1", ((5,), 9000)
        ),
        Case("P1", "prior state, timeout only", {0: "update 3", 1: "timestamp 9000"}, "0 1", ((3,), 9000)),
        Case("G6", "timeout after remove", {0: "update 3", 1: "remove;timestamp 9000"}, "0 1", (None, 9000)),
        # "… - prior state and timeout set - …"
        Case("P7", "prior timeout, no update", {0: _SET, 1: ""}, "0 1 3t 4t", ((1,), 2500), "", ("0 1", ((1,), None))),
        Case("P7", "prior timeout, state updated", {0: _SET, 1: "update 5"}, "0 1", ((5,), None)),
        Case("P1", "prior timeout, state removed", {0: _SET, 1: "remove"}, "0 1"),
        Case("P1", "prior timeout, moved later", {0: _SET, 1: "timestamp 9000"}, "0 1", ((1,), 9000)),
        Case("P1", "prior timeout, moved earlier", {0: _SET, 1: "timestamp 1500"}, "0 1 2t", None, "remove"),
        Case("P1", "prior timeout, the same again", {0: _SET, 1: "timestamp 2500"}, "0 1 3t", None, "remove"),
        Case("P1", "prior timeout, state and timeout", {0: _SET, 1: "update 5;timestamp 9000"}, "0 1", ((5,), 9000)),
        Case(
            "G6", "prior timeout, timeout after remove", {0: _SET, 1: "remove;timestamp 2600"}, "0 1 3t", None, "remove"
        ),
        Case(
            "G5",
            "before the watermark",
            {0: "update 1", 1: "timestamp 999;timestamp 0;timestamp -4"},
            "0 1",
            ((1,), None),
        ),
        Case("G5", "at the watermark", {1: "timestamp 1000"}, "1 2t", None, "remove"),
        Case("G5", "a datetime", {1: "at 1970-01-01 00:00:09"}, "1", (None, 9000)),
        Case("G5", "a datetime before the watermark", {1: "at 1970-01-01 00:00:00.5"}, "1"),
        Case("G4", "duration refused", {0: "duration 5;duration-text 5"}, "0"),
        Case("G7", "watermark and old timeout", {0: "watermark;old-timeout", 1: "watermark"}, "0 1"),
        # "process timed out state - EventTimeTimeout - …": strictly before the watermark
        Case("P2", "due before the watermark", {0: "timestamp 1999"}, "0 2t", None, "remove"),
        Case("P2", "due at the watermark", {0: "timestamp 2000"}, "0 3t", None, "remove"),
        Case("P2", "due after the watermark", {0: "timestamp 2001"}, "0 3t", None, "remove"),
        Case("P2", "due in the last micro-batch, which has no data", {0: "timestamp 3999"}, "0 4t", None, "remove"),
        Case("P2", "not due yet", {0: "timestamp 4000"}, "0", (None, 4000)),
        Case("P7", "fired, does nothing", {0: _SET}, "0 3t 4t", ((1,), 2500), "", ("0 3t", ((1,), None))),
        Case(
            "P7",
            "fired, does nothing, without state",
            {0: "timestamp 1500"},
            "0 2t 3t 4t",
            (None, 1500),
            "",
            ("0 2t", None),
        ),
        Case("P1", "fired, updates", {0: _SET}, "0 3t", ((7,), None), "update 7"),
        Case("P1", "fired, removes", {0: _SET}, "0 3t", None, "get;remove"),
        Case("P1", "fired, sets another timeout", {0: _SET}, "0 3t 4t", ((1,), 4500), "watermark;after 500"),
        Case(
            "P1", "fired, updates and sets another timeout", {0: _SET}, "0 3t", ((2,), 9000), "increase;timestamp 9000"
        ),
        Case("G6", "fired, removes and sets another timeout", {0: _SET}, "0 3t", (None, 9000), "remove;timestamp 9000"),
        Case("G5", "fired, sets what has passed", {0: _SET}, "0 3t", ((2,), None), "timestamp 2999;increase"),
        Case("G1", "fired, looks at its state", {0: _SET}, "0 3t", None, "get;str;timed-out;old-timeout;remove"),
        Case("C4", "due, but called with data", {0: _SET, 3: "timestamp 9000"}, "0 3", ((1,), 9000)),
        Case("C4", "due, removed with data", {0: _SET, 3: "remove"}, "0 3"),
        Case(
            "P7",
            "due, called with data, does nothing",
            {0: _SET, 3: ""},
            "0 3 3t 4t",
            ((1,), 2500),
            "",
            ("0 3", ((1,), None)),
        ),
        Case("P7", "due, updated with data", {0: _SET, 3: "update 8"}, "0 3", ((8,), None)),
        Case("C4", "due at once", {3: "timestamp 3000"}, "3 4t", None, "remove"),
        Case("C5", "called without rows", {0: "timestamp 1500"}, "0 2t", None, "remove"),
        Case(
            "P2",
            "fires, is set with data, fires again",
            {0: "timestamp 1500", 2: "timestamp 2500"},
            "0 2 3t",
            None,
            "remove",
        ),
    ),
)

_SOON = "update 1;duration 1"
_FAR = 3_600_000

PROCESSING_TIME = Script(
    "ProcessingTimeTimeout",
    "ProcessingTimeTimeout",
    (
        Case("P1", "no prior state, no update", {1: ""}, "1"),
        Case("P1", "no prior state, state updated", {1: "update 5"}, "1", ((5,), None)),
        Case("P1", "no prior state, state removed", {1: "remove"}, "1"),
        Case("G6", "timeout without state", {1: "duration 1"}, "1 2t", None, "remove"),
        Case("G6", "timeout after remove", {0: "update 3", 1: "remove;duration 1"}, "0 1 2t", None, "remove"),
        Case("P1", "prior state, timeout only", {0: "update 3", 1: f"duration {_FAR}"}, "0 1", ((3,), 1)),
        Case("P1", "prior timeout, state removed", {0: f"update 1;duration {_FAR}", 1: "remove"}, "0 1"),
        Case(
            "P1",
            "prior timeout, moved earlier",
            {0: f"update 1;duration {_FAR}", 1: "duration 1"},
            "0 1 2t",
            None,
            "remove",
        ),
        Case(
            "P7",
            "prior timeout, no update",
            {0: f"update 1;duration {_FAR}", 1: ""},
            "0 1",
            ((1,), 1),
            "",
            ("0 1", ((1,), None)),
        ),
        Case(
            "P7", "prior timeout, state updated", {0: f"update 1;duration {_FAR}", 1: "update 5"}, "0 1", ((5,), None)
        ),
        Case("P2", "due", {0: _SOON}, "0 1t", None, "get;remove"),
        Case("P2", "not due yet", {0: f"duration {_FAR}"}, "0", (None, 1)),
        Case("P7", "fired, does nothing", {0: _SOON}, "0 1t 2t 3t", ((1,), 1), "", ("0 1t", ((1,), None))),
        Case("P1", "fired, updates", {0: _SOON}, "0 1t", ((7,), None), "update 7"),
        Case("P1", "fired, sets another timeout", {0: _SOON}, "0 1t 2t 3t", ((4,), 1), "increase;duration 1"),
        Case("G6", "fired, removes and sets another timeout", {0: _SOON}, "0 1t", (None, 1), f"remove;duration {_FAR}"),
        Case("C4", "due, but called with data", {0: _SOON, 1: f"duration {_FAR}"}, "0 1", ((1,), 1)),
        Case("G4", "durations that are refused", {0: "duration 0;duration -1;duration-text 5 minutes"}, "0"),
        Case("G5", "timestamp refused", {0: "timestamp 5;at 2001-01-01 00:00:00"}, "0"),
        Case("G7", "watermark and old timeout", {0: "watermark;old-timeout", 1: "watermark"}, "0 1"),
    ),
)

SCRIPTS = (NO_TIMEOUT, EVENT_TIME, PROCESSING_TIME)
