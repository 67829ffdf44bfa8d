"""Pathway: groupby and reduce over a followed folder, as in its guides.

By default it persists its input and recomputes the state after a restart. Persisting the state of operators needs a
licence key.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def run(order: dict[str, Any]) -> None:
    """Follow the files until the process is killed."""
    os.environ["PATHWAY_THREADS"] = str(order["parallelism"])  # pathway reads it on import
    import pathway as pw

    class InputRow(pw.Schema):
        key: int = pw.column_definition(name="#key")
        v: int

    def tell(key: Any, row: dict[str, int], time: int, is_addition: bool) -> None:
        if is_addition:
            sys.stdout.write(f"+U[{row['key']}, {row['n']}, {row['s']}]\n")
            sys.stdout.flush()

    every = order["every"]
    found = pw.io.csv.read(
        order["rows"],
        schema=InputRow,
        autocommit_duration_ms=order["commit_ms"],
        max_backlog_size=order["commit_rows"] if order["backlog"] else None,
        name="rows",
    )
    rows = found.select(key=found["#key"], v=found.v)
    totals = rows.groupby(rows.key).reduce(rows.key, n=pw.reducers.count(), s=pw.reducers.sum(rows.v))
    pw.io.null.write(totals)
    pw.io.subscribe(totals.filter(totals.key % every == 0), tell)
    persistence = None
    if order["durable"]:
        backend = pw.persistence.Backend.filesystem(order["durable"])
        persistence = pw.persistence.Config(backend, snapshot_interval_ms=order["commit_ms"])
    print("ready", flush=True)
    pw.run(persistence_config=persistence, monitoring_level=pw.MonitoringLevel.NONE)


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
