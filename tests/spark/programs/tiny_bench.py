"""``holdfast`` with one more suite, ``tiny``: the store alone, without Spark, four runs of a second or two."""

from __future__ import annotations

from holdfast import cli
from holdfast.benches.jobs.shard import Size
from holdfast.benches.runs.paired import Entry
from holdfast.benches.suites import suites
from holdfast.benches.suites.measurement import Measurement

TINY = Measurement(
    suite="tiny",
    name="size",
    question="How fast is a small shard?",
    entries={
        name: Entry(name, Size(rows=100, keys=2000, batches=100)) for name in ("store-memory", "store-filesystem")
    },
    minutes=0.1,
    repeats=2,
    memory_gb=0.5,
    disk_gb=0.5,
)

if __name__ == "__main__":
    suites.SUITES["tiny"] = lambda _: [TINY]  # type: ignore[index]
    cli.main()
