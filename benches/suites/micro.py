"""Single operations of a backend, and single steps of a shard call, by pytest-benchmark (``benches/micro``)."""

from __future__ import annotations

from holdfast.benches.suites.measurement import Measurement, Profile

# Module, what it answers, minutes.
_MODULES = (
    ("backend", "What does an operation of the store cost, by size, width, hit rate and batch size?", 2.5),
    ("timers", "What do timers cost that fire, on each backend?", 0.5),
    ("run", "What do the steps of a vectorised shard call cost?", 0.3),
    ("keyed", "What do the steps of a loop over keys cost?", 0.3),
    ("run_files", "What does a commit cost beside many shards, and a freeze?", 0.4),
    ("state_table", "How fast does Spark read state as a table, beside Parquet?", 1.5),
)


def measurements(profile: Profile) -> list[Measurement]:
    """Return the questions of this suite; none is quick."""
    if profile.quick:
        return []
    return [
        Measurement(suite="micro", name=name, question=question, entries={}, minutes=minutes, micro=name, memory_gb=2)
        for name, question, minutes in _MODULES
    ]
