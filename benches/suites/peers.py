"""Other stream processors on the same files: Flink, Pathway, Bytewax and Quix Streams beside holdfast and Spark.

What is measured, what is not, and what a licence or an API rules out: ``benches/PEERS.md``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from holdfast.benches.peers.engines import ENVIRONMENTS, PEERS, from_files
from holdfast.benches.peers.job import FromFiles
from holdfast.benches.peers.kills import survive
from holdfast.benches.runs.paired import Entry
from holdfast.benches.suites.measurement import Measurement, Profile

_BACKENDS = ("memory", "filesystem", "rocksdb")
_FLINK = "flink-sql-rocksdb-mini-batch"
_QUERIES = (
    _FLINK,
    "flink-sql-rocksdb",
    "flink-sql-heap-mini-batch",
    "pathway",
    "pathway-backlog",
    "flink-sql-rocksdb-mini-batch-volatile",
    "flink-sql-heap-mini-batch-volatile",
    "pathway-volatile",
)
_FUNCTIONS = (
    "flink-process-rocksdb",
    "bytewax",
    "quixstreams",
    "flink-process-rocksdb-volatile",
    "bytewax-volatile",
    "quixstreams-volatile",
)
#: One of each kind that survives by other means than the rest.
KILLED_QUERIES = ("flink-sql-rocksdb", "flink-sql-heap", "pathway-backlog")
KILLED_FUNCTIONS = ("flink-process-rocksdb", "bytewax", "quixstreams")

_INSTALLS = "The first run installs the peers from PyPI, each in an environment of its own: 2.6 GB in the cache."
_QUERIES_NOTE = (
    f"{_INSTALLS} Left out: Pathway's persistence of operators, which asks for a licence key; it persists its input. "
    "Pathway takes all files as one piece and writes one result a key; with a backlog it works in pieces."
)
_FUNCTIONS_NOTE = (
    f"{_INSTALLS} Of Quix Streams the state store alone is measured, in process: no Kafka, so no consumer, no producer "
    "and no changelog; what survives there is the kill of the process, not the loss of its disk."
)


def measurements(profile: Profile) -> list[Measurement]:
    """Return the questions of this suite; none where the run is to be quick."""
    if profile.quick:
        return []
    queries = FromFiles()
    ours = [f"holdfast-{backend}" for backend in _BACKENDS]
    functions = FromFiles(rows=100_000, keys=100_000, batches=6, warmup=2)
    by_key = [f"{kind}-{backend}{api}" for kind, api in (("holdfast", "-row"), ("pandas", "")) for backend in _BACKENDS]
    return [
        Measurement(
            suite="peers",
            name="from-files",
            question="How fast is a running count and sum beside other stream processors, from the same files?",
            entries={
                **_entries(queries, [*ours, "spark-agg-rocksdb"], from_files),
                **_entries(queries, _QUERIES),
                **_entries(queries, ["floor"]),
            },
            minutes=9,
            baseline=_FLINK,
            note=_QUERIES_NOTE,
            check=partial(_check, KILLED_QUERIES),
        ),
        Measurement(
            suite="peers",
            name="from-files-by-key",
            question="The same by a Python function for each key, with a tenth of the rows and keys?",
            entries={**_entries(functions, by_key, from_files), **_entries(functions, _FUNCTIONS)},
            minutes=7,
            baseline="flink-process-rocksdb",
            note=_FUNCTIONS_NOTE,
            check=partial(_check, KILLED_FUNCTIONS),
        ),
    ]


def _entries(job: FromFiles, labels: Iterable[str], engine_of: Any = str) -> dict[str, Entry]:
    return {label: Entry(engine_of(label), job) for label in labels}


def _check(killed: Iterable[str]) -> dict[str, Any]:
    """Install every peer, so that no run has to, make the files, and compare what comes of runs that are killed."""
    for environment in ENVIRONMENTS:
        environment.install()
    return survive(PEERS[name] for name in killed)
