"""``holdfast rescale`` and ``holdfast clone``: a new query that goes on where another one is."""

from __future__ import annotations

import click

from holdfast import savepoints
from holdfast.commands.own_spark import CONF, pairs, started_spark
from holdfast.commands.savepoint import PARTITIONS, QUERY_CHECKPOINT, RENAME, say_new_query
from holdfast.commands.target import batch_option, checkpoint_dir_option, on_storage
from holdfast.settings import PREFIX

_ORIGINAL = click.argument("original", metavar="QUERY_CHECKPOINT")


@click.command()
@on_storage
@_ORIGINAL
@checkpoint_dir_option()
@CONF
@click.option(
    "--to-checkpoint-dir", metavar="URL", help=f"The new query's {PREFIX}checkpoint.dir. Default: --checkpoint-dir."
)
@QUERY_CHECKPOINT
@click.option("--shards", required=True, type=click.IntRange(min=1), metavar="N", help="Of each operator.")
@PARTITIONS
@RENAME
def rescale(
    original: str,
    checkpoint_dir: str,
    to_checkpoint_dir: str | None,
    query_checkpoint: str,
    shards: int,
    partitions: int | None,
    rename: tuple[str, ...],
    conf: tuple[str, ...],
    options: dict[str, str],
    as_json: bool,
) -> None:
    """Make a new query from another, with a different number of shards.

    QUERY_CHECKPOINT is the checkpointLocation of the query, which may be running and is not changed. The new one begins
    at micro-batch 1, where the other one is. If the command is stopped, run it again.
    """
    with started_spark(checkpoint_dir, options, conf) as spark:
        query_id = savepoints.rescale(
            spark,
            original,
            query_checkpoint,
            shards=shards,
            partitions=partitions,
            rename=pairs(rename, "--rename"),
            to_checkpoint_dir=to_checkpoint_dir,
        )
    where = to_checkpoint_dir or checkpoint_dir
    say_new_query(original, f"rescaled to {shards} shards", query_id, query_checkpoint, where, as_json=as_json)


@click.command()
@on_storage
@_ORIGINAL
@checkpoint_dir_option()
@CONF
@click.option(
    "--to-checkpoint-dir", required=True, metavar="URL", help=f"The clone's {PREFIX}checkpoint.dir: not the original's."
)
@QUERY_CHECKPOINT
@batch_option()
def clone(
    original: str,
    checkpoint_dir: str,
    to_checkpoint_dir: str,
    query_checkpoint: str,
    batch_id: int | None,
    conf: tuple[str, ...],
    options: dict[str, str],
    as_json: bool,
) -> None:
    """Copy a query as it is, to run a second one beside it.

    QUERY_CHECKPOINT is the checkpointLocation of the query, which may be running and is not changed. The clone has its
    own id and continues the micro-batch numbers. State of Spark's own operators is copied, too. If the command is
    stopped, run it again.
    """
    with started_spark(checkpoint_dir, options, conf) as spark:
        query_id = savepoints.clone(
            spark, original, query_checkpoint, to_checkpoint_dir=to_checkpoint_dir, batchId=batch_id
        )
    say_new_query(original, "cloned", query_id, query_checkpoint, to_checkpoint_dir, as_json=as_json)
