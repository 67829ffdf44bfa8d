"""``holdfast rescale`` and ``holdfast clone``: a new query that continues from another one."""

from __future__ import annotations

import click

from holdfast.commands.own_spark import CONF, by_this_process, pairs
from holdfast.commands.savepoint import CHECKPOINT_LOCATION, CONTINUE_SINKS, PARTITIONS, RENAME, say_new_query
from holdfast.commands.target import batch_option, number_option, on_storage, state_dir_of, state_dir_option
from holdfast.settings import PREFIX
from holdfast.snapshotter.storage.options import parse_storage_options
from holdfast.spark_integration.copies.cloning import copy
from holdfast.spark_integration.copies.rescaling import rescale_with
from holdfast.spark_integration.savepoints.changes import Changes
from holdfast.spark_integration.savepoints.new_query import require_new_location

_ORIGINAL = click.argument("original", metavar="LOCATION")


@click.command()
@on_storage
@_ORIGINAL
@state_dir_option()
@CONF
@click.option("--to-state-dir", metavar="URL", help=f"The new query's {PREFIX}state.dir. Default: --state-dir.")
@CHECKPOINT_LOCATION
@number_option("--shards", required=True, text="Shards per operator.")
@PARTITIONS
@RENAME
@CONTINUE_SINKS
def rescale(
    original: str,
    state_dir: str | None,
    to_state_dir: str | None,
    checkpoint_location: str,
    shards: int,
    partitions: int | None,
    rename: tuple[str, ...],
    continue_sinks: bool,
    conf: tuple[str, ...],
    options: dict[str, str],
    as_json: bool,
) -> None:
    """Make a new query with another number of shards.

    LOCATION is the query's checkpointLocation. The query may be running; it does not change. The new query continues
    from where it stands, beginning with micro-batch 1. This process rescales; with --conf, or where only Spark can
    write a part, Spark does. If the command is interrupted, run it again.
    """
    state_dir = state_dir_of(original, state_dir, options)
    changes = Changes(shards, partitions, pairs(rename, "--rename", "OLD=NEW"), continue_sinks=continue_sinks)
    require_new_location(checkpoint_location, parse_storage_options(options))
    query_id = by_this_process(
        state_dir,
        options,
        conf,
        lambda tasks: rescale_with(tasks, original, checkpoint_location, changes, to_state_dir),
    )
    where = to_state_dir or state_dir
    done = f"{original} is rescaled to {shards} shards"
    say_new_query(done, original, query_id, checkpoint_location, where, options, as_json=as_json)


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
    """Copy a query, to run a second one beside it.

    LOCATION is the query's checkpointLocation. The query may be running; it does not change. The clone has its
    own id and continues the micro-batch numbers. The state of Spark's own operators is copied, too. Give the clone its
    own sinks: it runs beside the original, so it cannot continue them. This process copies; with --conf, Spark does. If
    the command is interrupted, run it again.
    """
    places = original, checkpoint_location
    require_new_location(checkpoint_location, parse_storage_options(options))
    query_id = by_this_process(
        state_dir_of(original, state_dir, options),
        options,
        conf,
        lambda tasks: copy(tasks, *places, to_state_dir=to_state_dir, batch_id=batch_id),
    )
    done = f"{original} is cloned"
    say_new_query(done, original, query_id, checkpoint_location, to_state_dir, options, as_json=as_json)
