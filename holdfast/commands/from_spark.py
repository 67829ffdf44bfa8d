"""``holdfast savepoint from-spark``: a savepoint of a query that ran on Spark's own operators."""

from __future__ import annotations

import json

import click

from holdfast import savepoints
from holdfast.commands.own_spark import CONF, started_spark
from holdfast.commands.target import batch_option, on_storage
from holdfast.errors import InvalidArgumentError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_storage_options
from holdfast.spark_integration.shard.timeout import TimeoutConf
from holdfast.spark_integration.spark_state.query_location import QueryLocation


@click.command("from-spark")
@on_storage
@click.argument("checkpoint_location", metavar="LOCATION")
@CONF
@click.option("--to", "target", required=True, metavar="URL", help="The directory of savepoints.")
@click.option("--name", required=True, help="The savepoint's name.")
@click.option(
    "--operator",
    "operators",
    required=True,
    multiple=True,
    metavar="[NUMBER=]NAME",
    help="The operator's name in holdfast; with Spark's number for it if there are several; repeatable.",
)
@click.option(
    "--timeout-conf",
    type=click.Choice(["ProcessingTimeTimeout", "EventTimeTimeout"]),
    help="The query's timeoutConf, if it is an applyInPandasWithState with timeouts.",
)
@batch_option()
@click.option(
    "--shards",
    type=click.IntRange(min=1),
    metavar="N",
    help="Shards per operator. Default: as many as the query has partitions.",
)
@click.option("--comment", default="", metavar="TEXT", help="A comment to show with the savepoint.")
def from_spark(
    checkpoint_location: str,
    target: str,
    name: str,
    operators: tuple[str, ...],
    timeout_conf: TimeoutConf | None,
    batch_id: int | None,
    shards: int | None,
    comment: str,
    conf: tuple[str, ...],
    options: dict[str, str],
    as_json: bool,
) -> None:
    """Save a query that runs on Spark's own operators, to continue it on holdfast.

    LOCATION is the query's checkpointLocation, which is only read. Stop the query first. Its operators must be
    applyInPandasWithState, transformWithState or transformWithStateInPandas: docs/migrate.md.
    """
    names = _names(operators)
    with open_storage(checkpoint_location, parse_storage_options(options)) as storage:
        QueryLocation(storage).query_id()  # of what is no location: Spark would first start for half a minute
    with started_spark(None, options, conf) as spark:
        made = savepoints.from_spark(
            spark,
            checkpoint_location,
            target,
            name,
            names,
            timeoutConf=timeout_conf,
            batchId=batch_id,
            shards=shards,
            comment=comment,
        )
    rows = {operator.name: operator.rows for operator in made.operators}
    if as_json:
        click.echo(json.dumps({"name": name, "batch_id": made.query.batch_id, "rows": rows}))
    else:
        click.echo(
            f"{name} is saved, as of micro-batch {made.query.batch_id}: holdfast savepoint restore makes a query from "
            "it"
        )


def _names(given: tuple[str, ...]) -> str | dict[int, str]:
    if len(given) == 1 and "=" not in given[0]:
        return given[0]
    found: dict[int, str] = {}
    for text in given:
        number, _, name = text.partition("=")
        if not number.isdecimal() or not name or int(number) in found:
            raise InvalidArgumentError("--operator takes a name, or NUMBER=NAME, each number once", given=text)
        found[int(number)] = name
    return found
