"""``holdfast rescale`` and ``holdfast clone``: a new query that goes on where another one is."""

from __future__ import annotations

import click

from holdfast import savepoints
from holdfast.commands.own_spark import CONF, pairs, started_spark
from holdfast.commands.savepoint import CHECKPOINT_LOCATION, PARTITIONS, RENAME, say_new_query
from holdfast.commands.target import batch_option, on_storage, state_dir_option
from holdfast.settings import PREFIX
from holdfast.snapshotter.storage.options import parse_storage_options
from holdfast.spark_integration.lookup.state_directory import find_state_dir

_ORIGINAL = click.argument("original", metavar="LOCATION")


@click.command()
@on_storage
@_ORIGINAL
@state_dir_option()
@CONF
@click.option("--to-state-dir", metavar="URL", help=f"The new query's {PREFIX}state.dir. Default: --state-dir.")
@CHECKPOINT_LOCATION
@click.option("--shards", required=True, type=click.IntRange(min=1), metavar="N", help="Of each operator.")
@PARTITIONS
@RENAME
def rescale(
    original: str,
    state_dir: str | None,
    to_state_dir: str | None,
    checkpoint_location: str,
    shards: int,
    partitions: int | None,
    rename: tuple[str, ...],
    conf: tuple[str, ...],
    options: dict[str, str],
    as_json: bool,
) -> None:
    """Make a new query from another, with a different number of shards.

    LOCATION is the checkpointLocation of the query, which may be running and is not changed. The new one begins
    at micro-batch 1, where the other one is. If the command is stopped, run it again.
    """
    state_dir = state_dir or find_state_dir(original, parse_storage_options(options))
    with started_spark(state_dir, options, conf) as spark:
        query_id = savepoints.rescale(
            spark,
            original,
            checkpoint_location,
            shards=shards,
            partitions=partitions,
            rename=pairs(rename, "--rename"),
            to_state_dir=to_state_dir,
        )
    where = to_state_dir or state_dir
    say_new_query(original, f"rescaled to {shards} shards", query_id, checkpoint_location, where, as_json=as_json)


@click.command()
@on_storage
@_ORIGINAL
@state_dir_option()
@CONF
@click.option(
    "--to-state-dir", required=True, metavar="URL", help=f"The clone's {PREFIX}state.dir: not the original's."
)
@CHECKPOINT_LOCATION
@batch_option()
def clone(
    original: str,
    state_dir: str | None,
    to_state_dir: str,
    checkpoint_location: str,
    batch_id: int | None,
    conf: tuple[str, ...],
    options: dict[str, str],
    as_json: bool,
) -> None:
    """Copy a query as it is, to run a second one beside it.

    LOCATION is the checkpointLocation of the query, which may be running and is not changed. The clone has its
    own id and continues the micro-batch numbers. State of Spark's own operators is copied, too. If the command is
    stopped, run it again.
    """
    state_dir = state_dir or find_state_dir(original, parse_storage_options(options))
    with started_spark(state_dir, options, conf) as spark:
        query_id = savepoints.clone(spark, original, checkpoint_location, to_state_dir=to_state_dir, batchId=batch_id)
    say_new_query(original, "cloned", query_id, checkpoint_location, to_state_dir, as_json=as_json)
