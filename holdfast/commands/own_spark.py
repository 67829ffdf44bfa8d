"""Runs a command's work in this process, or in a Spark that the command starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from holdfast.commands.progress import items_shown, working
from holdfast.commands.target import request_threads
from holdfast.errors import InvalidArgumentError
from holdfast.settings import PREFIX, STORAGE_PREFIX

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast.spark_integration.savepoints.tasks import Tasks

CONF = click.option(
    "--conf",
    multiple=True,
    metavar="NAME=VALUE",
    help="A Spark setting, as for spark-submit; repeatable. Default for spark.master: local[*,4].",
)
_MASTER = "spark.master"
_T = TypeVar("_T")


def in_process_or_spark(
    state_dir: str, options: dict[str, str], conf: tuple[str, ...], work: Callable[[Tasks], _T]
) -> _T:
    """Do some work in this process, or in Spark if `conf` is set or only Spark can write the state."""
    from holdfast.spark_integration.savepoints.tasks import OwnProcess, SparkTasks
    from holdfast.spark_integration.spark_state.pointers import NeedsSparkError

    if not conf:
        try:
            with request_threads() as executor, items_shown("shards", None) as on_shard:
                return work(OwnProcess(state_dir, options, executor, os.cpu_count() or 1, on_shard))
        except NeedsSparkError as exc:
            click.echo(f"starting Spark, which this query's state needs: {exc}", err=True)
    with started_spark(state_dir, options, conf) as spark:
        return work(SparkTasks(spark))


@contextmanager
def started_spark(state_dir: str | None, options: dict[str, str], conf: tuple[str, ...]) -> Iterator[SparkSession]:
    """Start Spark, by default on this machine with retries of tasks."""
    from pyspark.sql import SparkSession

    from holdfast.spark_integration.java import ensure_java

    ensure_java()
    builder = SparkSession.builder.appName("holdfast").config("spark.ui.enabled", "false")
    # Spark would draw its progress bar into files, too.
    builder = builder.config("spark.ui.showConsoleProgress", str(sys.stderr.isatty()).lower())
    if state_dir is not None:
        builder = builder.config(f"{PREFIX}state.dir", state_dir)
    settings = {_MASTER: "local[*,4]"} | pairs(conf, "--conf")
    use_own_python(settings)
    for name, value in settings.items():
        builder = builder.config(name, value)
    for option, value in options.items():
        builder = builder.config(f"{STORAGE_PREFIX}{option}", value)
    log_errors_only()
    with working("starting Spark"):
        spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def log_errors_only() -> None:
    """Make Spark log only errors, unless the environment configures its logging."""
    if "SPARK_CONF_DIR" not in os.environ:
        ours = f"-Dlog4j2.configurationFile={(Path(__file__).parent / 'log4j2.properties').as_uri()}"
        os.environ["SPARK_SUBMIT_OPTS"] = f"{ours} {os.environ.get('SPARK_SUBMIT_OPTS', '')}".strip()


def use_own_python(settings: Mapping[str, str]) -> None:
    """Run local tasks in this command's Python, unless the environment names another: the PATH's may lack holdfast."""
    if settings.get(_MASTER, "").startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def pairs(given: tuple[str, ...], option: str, form: str = "NAME=VALUE") -> dict[str, str]:
    """Return an option's repeated NAME=VALUE pairs; `form` is how its help spells them."""
    found: dict[str, str] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not (name and separator and value) or name in found:
            raise InvalidArgumentError(f"{option} takes {form}, each name once", given=name)
        found[name] = value
    return found
