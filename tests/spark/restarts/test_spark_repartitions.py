"""Spark's own offline repartitioning of a checkpoint location: it moves pointers, and what they name stays."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

import holdfast
from holdfast import savepoints
from holdfast.commands.savepoint import savepoint
from tests.spark.conftest import Lab
from tests.spark.parity.engines import configured
from tests.spark.processors.engines import NEEDED

pytestmark = [pytest.mark.spark, pytest.mark.slow(15), pytest.mark.since("4.2")]

KEYS = [f"key {i}" for i in range(40)]


@pytest.mark.all
def test_a_query_goes_on_with_its_state_in_more_partitions(lab: Lab) -> None:
    """As many shards as before, each with its state; a savepoint of it is whole."""
    with configured(lab.spark, NEEDED):
        lab.feed([(key, 1) for key in KEYS])
        lab.run(lab.totals())
        location = lab.folder / "query"
        lab.spark._streamingCheckpointManager.repartition(str(location), 3)  # as Spark 4.2 has it
        assert len([folder for folder in (location / "state" / "0").iterdir() if folder.name.isdigit()]) == 3
        lab.feed([(key, 2) for key in KEYS])
        [*_, last] = lab.run(lab.totals())
        assert sorted((row["key"], row["n"], row["total"]) for row in last) == [(key, 2, 3) for key in sorted(KEYS)]
        assert lab.state() == dict.fromkeys(KEYS, (2, 3))
        made = savepoints.create(lab.spark, location, lab.folder / "savepoints", "after")
    assert [(operator.name, operator.shards) for operator in made.operators] == [("totals", 2)]
    with holdfast.open_query(location, lab.folder / "durable") as query:
        found = query.get("totals", [{"key": key} for key in KEYS])["state"]
    assert {row["key"]: (row["n"], row["total"]) for row in found.to_pylist()} == dict.fromkeys(KEYS, (2, 3))
    arguments = ["create", str(location), "--to", str(lab.folder / "savepoints"), "--name", "without-spark"]
    assert CliRunner().invoke(savepoint, arguments).exit_code == 0
    assert savepoints.diff(lab.folder / "savepoints", "after", "without-spark")[1][0].differs is False
