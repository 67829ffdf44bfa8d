"""Peers in their own environments, and engines on Spark, on files of a few rows: each verifies its own result.

Installs some 2.6 GB from PyPI on the first run, so all of it is long and asked for by HOLDFAST_TEST_PEERS;
tests/unit/benches/test_peers.py covers the same code with a program that needs no peer, and
tests/spark/programs/test_bench_runs.py the engines on Spark.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.benches.peers.engines import ENGINES
from holdfast.benches.peers.job import FromFiles
from holdfast.benches.runs.paired import Entry, run_engine
from holdfast.benches.suites.measurement import Profile
from holdfast.benches.suites.suites import peers

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.all,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not os.environ.get("HOLDFAST_TEST_PEERS"),
        reason="installs 2.6 GB of other stream processors: HOLDFAST_TEST_PEERS=1",
    ),
]


ASKED = sorted({entry.engine for one in peers(Profile()) for entry in one.entries.values()} - {"floor"})


@pytest.mark.parametrize("engine", ASKED)
def test_counts_and_sums_are_those_of_the_rows(java_home: Path, tmp_path: Path, engine: str) -> None:
    """Each engine compares its own with pyarrow's, and fails if they differ."""
    if engine in ENGINES:
        ENGINES[engine].program.environment.install()
    run = run_engine(Entry(engine, FromFiles(rows=2000, keys=500, batches=3, warmup=1)), disk=str(tmp_path))
    assert run["equality"]["equal"]
    assert run["equality"]["rows"] == 500 if engine in ENGINES else run["equality"]["rows"] > 450
    assert run["rows_per_second"] > 0
