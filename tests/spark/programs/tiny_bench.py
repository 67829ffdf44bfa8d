"""``holdfast`` with one more suite, ``tiny``: the store alone, without Spark, four runs of a second or two."""

from __future__ import annotations

from holdfast import cli
from holdfast.benches.jobs.store.commits import Commits
from holdfast.benches.runs.paired import Entry
from holdfast.benches.suites import by_name
from holdfast.benches.suites.measurement import Measurement

TINY = Measurement(
    suite="tiny",
    name="stalls",
    question="How long is a commit held back?",
    entries={
        name: Entry(name, Commits(rows=100, keys=2000, batches=30)) for name in ("store-memory", "store-filesystem")
    },
    minutes=0.1,
    repeats=2,
    memory_gb=0.5,
    disk_gb=0.5,
)

if __name__ == "__main__":
    by_name.SUITES["tiny"] = lambda _: [TINY]  # type: ignore[index]
    cli.main()
