"""Where the Spark of a command runs, and in which Python its tasks do."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
from click.testing import CliRunner

from holdfast.cli import group
from holdfast.commands.own_spark import log_errors_only, use_own_python


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


def test_spark_logs_errors_alone_unless_it_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its warnings of host names and native code hide what a command says; options of the user's come later and win."""
    monkeypatch.delenv("SPARK_CONF_DIR", raising=False)
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "-Dlog4j2.configurationFile=theirs")
    log_errors_only()
    ours, theirs = os.environ["SPARK_SUBMIT_OPTS"].split()
    assert theirs == "-Dlog4j2.configurationFile=theirs"
    _, _, url = ours.partition("-Dlog4j2.configurationFile=")
    assert "rootLogger.level = error" in Path(url2pathname(urlsplit(url).path)).read_text()
    monkeypatch.setenv("SPARK_CONF_DIR", "/etc/spark")
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "")
    log_errors_only()
    assert os.environ["SPARK_SUBMIT_OPTS"] == ""


@pytest.mark.parametrize("command", ["export", "rescale", "clone", "savepoint create", "savepoint restore"])
def test_help_says_where_spark_runs(command: str) -> None:
    """A master in spark-defaults.conf does not count, so who has one there must learn what does."""
    told = CliRunner().invoke(group, [*command.split(), "--help"], env={"COLUMNS": "200"}).output
    assert "Default for spark.master: local[*,4]." in " ".join(told.split())
