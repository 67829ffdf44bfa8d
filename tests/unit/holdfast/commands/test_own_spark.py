"""Where the Spark of a command runs, and in which Python its tasks do."""

from __future__ import annotations

import os
import sys

import pytest
from click.testing import CliRunner

from holdfast.cli import group
from holdfast.commands.own_spark import use_own_python


def test_tasks_on_this_machine_run_in_the_commands_own_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment need not be activated; a cluster has paths of its own, and who names a Python is asked for it."""
    monkeypatch.setenv("PYSPARK_PYTHON", "named")
    use_own_python({"spark.master": "local[2]"})
    assert os.environ["PYSPARK_PYTHON"] == "named"
    monkeypatch.delenv("PYSPARK_PYTHON")
    use_own_python({"spark.master": "spark://host:7077"})
    use_own_python({})
    assert "PYSPARK_PYTHON" not in os.environ
    use_own_python({"spark.master": "local[*,4]"})
    assert os.environ["PYSPARK_PYTHON"] == sys.executable


@pytest.mark.parametrize("command", ["export", "rescale", "clone", "savepoint create", "savepoint restore"])
def test_help_says_where_spark_runs(command: str) -> None:
    """A master in spark-defaults.conf does not count, so who has one there must learn what does."""
    told = CliRunner().invoke(group, [*command.split(), "--help"], env={"COLUMNS": "200"}).output
    assert "Default for spark.master: local[*,4]." in " ".join(told.split())
