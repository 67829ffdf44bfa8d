"""``holdfast savepoint``, ``holdfast rescale`` and ``holdfast clone``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click

from holdfast import savepoints
from holdfast.commands.own_spark import CONF, in_process_or_spark, pairs, started_spark
from holdfast.commands.target import (
    batch_option,
    both_places,
    json_value,
    moment,
    new_console,
    number_option,
    on_storage,
    plain,
    size,
    state_dir_option,
    table,
    with_options,
)
from holdfast.errors import InvalidArgumentError, NotFoundError
from holdfast.health import counted
from holdfast.savepoints import Listed, Savepoint, TableDifference
from holdfast.settings import PREFIX
from holdfast.snapshotter.savepoints.savepoints import find_objects, require_free
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_url
from holdfast.spark_integration.copies import copy, rescale_with
from holdfast.spark_integration.lookup.places import require_query
from holdfast.spark_integration.savepoints.changes import Changes
from holdfast.spark_integration.savepoints.creating import save
from holdfast.spark_integration.savepoints.from_spark import require_sparks_own
from holdfast.spark_integration.savepoints.new_query import require_new_location, shards_to_set
from holdfast.spark_integration.savepoints.restoring import Restorable, restore_with
from holdfast.spark_integration.shard.timeout import TimeoutConf
from holdfast.spark_integration.spark_state.query_location import QueryLocation

_saves = with_options(
    on_storage,
    click.argument("checkpoint_location", metavar="LOCATION"),
    CONF,
    click.option("--to", "target", required=True, metavar="URL", help="The directory of savepoints."),
    click.option("--name", required=True, help="The savepoint's name."),
    batch_option(),
    click.option("--comment", default="", metavar="TEXT", help="A comment to show with the savepoint."),
)
_on_savepoint = with_options(on_storage, click.argument("url"), click.argument("name"))
CHECKPOINT_LOCATION = click.option(
    "--checkpoint-location", required=True, metavar="URL", help="The new query's checkpointLocation."
)
PARTITIONS = number_option("--partitions", text="Shuffle partitions. Default: --shards, else the savepoint's.")
CONTINUE_SINKS = click.option(
    "--continue-sinks",
    is_flag=True,
    help="Take over the saved query's sinks, and end that query for good; no row appears twice.",
)
RENAME = click.option("--rename", multiple=True, metavar="OLD=NEW", help="Rename an operator; repeatable.")
_ORIGINAL = click.argument("original", metavar="LOCATION")


class _Group(click.Group):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        above = ctx.find_root().command
        if args[0] not in self.commands and isinstance(above, click.Group) and args[0] in above.list_commands(ctx):
            ctx.fail(f"no such command: {args[0]!r}; did you mean 'holdfast {args[0]}'?")
        return super().resolve_command(ctx, args)


@click.group(cls=_Group)
def savepoint() -> None:
    """Make and manage savepoints: your own copies of a query's state."""


@savepoint.command("from-spark")
@_saves
@click.option(
    "--operator",
    "operators",
    required=True,
    multiple=True,
    metavar="[NUMBER=]NAME",
    help="Name to give the operator; if there are several, prefix Spark's operator number, as in 0=totals; repeatable.",
)
@click.option(
    "--timeout-conf",
    type=click.Choice(["ProcessingTimeTimeout", "EventTimeTimeout"]),
    help="The query's timeoutConf, if it is an applyInPandasWithState with timeouts.",
)
@click.option(
    "--aggregate",
    "aggregates",
    multiple=True,
    metavar="[NUMBER.]COLUMN=FUNCTION",
    help="An aggregation's column and its function, such as n=count; repeat in the order of agg()'s arguments.",
)
@click.option(
    "--window",
    "windows",
    multiple=True,
    metavar="[NUMBER=]DURATIONS",
    help="The durations passed to window(): '1 hour', or '1 hour, 5 minutes'.",
)
@number_option("--shards", text="Shards per operator. Default: as many as the query has partitions.")
def from_spark(
    checkpoint_location: str,
    target: str,
    name: str,
    operators: tuple[str, ...],
    timeout_conf: TimeoutConf | None,
    aggregates: tuple[str, ...],
    windows: tuple[str, ...],
    batch_id: int | None,
    shards: int | None,
    comment: str,
    conf: tuple[str, ...],
    options: dict[str, str],
    as_json: bool,
) -> None:
    """Save a query that runs on Spark's own operators, to continue it on holdfast.

    LOCATION is the query's checkpointLocation, which is left unchanged. Stop the query first. Its operators must be
    functions or processors in Python, dropDuplicates, or aggregations by key, window or session: docs/migrate.md.
    """
    names, functions, durations = _names(operators), _aggregates(aggregates), _windows(windows)
    # Check the locations before starting Spark, which takes half a minute.
    require_query(checkpoint_location, options)
    with open_storage(checkpoint_location, options) as storage:
        _require_free(target, name, options)
        require_sparks_own(storage, QueryLocation(storage).batch(batch_id).batch_id)
    with started_spark(None, options, conf) as spark:
        made = savepoints.from_spark(
            spark,
            checkpoint_location,
            target,
            name,
            names,
            timeoutConf=timeout_conf,
            aggregates=functions,
            window=durations,
            batchId=batch_id,
            shards=shards,
            comment=comment,
        )
    rows = {operator.name: operator.rows for operator in made.operators}
    if as_json:
        click.echo(json.dumps({"name": name, "batch_id": made.query.batch_id, "rows": rows}))
    else:
        click.echo(
            f"{name} is saved, as of micro-batch {made.query.batch_id}; holdfast savepoint restore makes a query of it"
        )


def _require_free(target: str, name: str, options: dict[str, str]) -> None:
    """Raise ConflictError if the savepoint exists, before Spark starts."""
    with open_storage(target, options) as storage:
        require_free(storage, name)


def _names(given: tuple[str, ...]) -> str | dict[int, str]:
    found = _by_number(given, "=", "--operator")
    if any(len(names) > 1 or not names[0] or "=" in names[0] for names in found.values()):
        raise InvalidArgumentError("--operator takes a name, or NUMBER=NAME, each number once", given=" ".join(given))
    if None in found:
        return found[None][0]
    return {number: name for number, (name,) in found.items() if number is not None}


def _aggregates(given: tuple[str, ...]) -> dict[str, str] | dict[int, dict[str, str]] | None:
    found: dict[Any, dict[str, str]] = {}
    for number, texts in _by_number(given, ".", "--aggregate").items():
        functions = [(column, function) for column, _, function in (text.rpartition("=") for text in texts)]
        found[number] = dict(functions)
        if len(found[number]) < len(texts) or not all(map(all, functions)):
            raise InvalidArgumentError("--aggregate takes COLUMN=FUNCTION, each column once", given=" ".join(texts))
    return found.get(None, found or None)


def _windows(given: tuple[str, ...]) -> list[str] | dict[int, list[str]] | None:
    found: dict[Any, list[str]] = {}
    for number, texts in _by_number(given, "=", "--window").items():
        if any("=" in text for text in texts):
            raise InvalidArgumentError("--window takes durations, or NUMBER=DURATIONS", given=" ".join(texts))
        found[number] = [one.strip() for one in texts[-1].split(",")]
    return found.get(None, found or None)


def _by_number(given: tuple[str, ...], separator: str, option: str) -> dict[int | None, list[str]]:
    """Group an option's values by operator number, or under None if they have no numbers."""
    found: dict[int | None, list[str]] = {}
    for text in given:
        number, is_behind, value = text.partition(separator)
        known, value = (int(number), value) if is_behind and number.isdecimal() else (None, text)
        found.setdefault(known, []).append(value)
    if None in found and len(found) > 1:
        raise InvalidArgumentError(
            f"{option}: give an operator number with each value, or with none", given=" ".join(given)
        )
    return found


@savepoint.command()
@_saves
@state_dir_option()
@click.option("--without", multiple=True, metavar="OPERATOR", help="Leave out this operator; repeatable.")
def create(
    checkpoint_location: str,
    state_dir: str | None,
    target: str,
    name: str,
    batch_id: int | None,
    without: tuple[str, ...],
    comment: str,
    conf: tuple[str, ...],
    options: dict[str, str],
    as_json: bool,
) -> None:
    """Save the state of a query, running or not.

    LOCATION is the query's checkpointLocation or state directory. This process saves the state, several shards at a
    time; with --conf, Spark does.
    """
    checkpoint_location, state_dir = both_places(checkpoint_location, state_dir, options)
    if conf:
        _require_free(target, name, options)
    places = checkpoint_location, target, name
    made = in_process_or_spark(
        state_dir,
        options,
        conf,
        lambda tasks: save(tasks, *places, batch_id=batch_id, without=without, comment=comment),
    )
    _print(made, as_json)


@savepoint.command()
@_on_savepoint
@state_dir_option(f"The new query's {PREFIX}state.dir.", required=True)
@CONF
@CHECKPOINT_LOCATION
@number_option("--shards", text="Shards per operator. Default: the savepoint's.")
@PARTITIONS
@RENAME
@click.option("--skip", multiple=True, metavar="OPERATOR", help="Skip an operator the new query lacks; repeatable.")
@click.option("--reset", multiple=True, metavar="OPERATOR", help="Start this operator without state; repeatable.")
@click.option(
    "--sources",
    type=click.Choice(["saved", "fresh"]),
    default="saved",
    show_default=True,
    help="Where sources start: at the saved positions, or where their own options say.",
)
@CONTINUE_SINKS
def restore(
    url: str,
    name: str,
    state_dir: str,
    checkpoint_location: str,
    shards: int | None,
    partitions: int | None,
    rename: tuple[str, ...],
    skip: tuple[str, ...],
    reset: tuple[str, ...],
    sources: savepoints.Sources,
    continue_sinks: bool,
    conf: tuple[str, ...],
    options: dict[str, str],
    as_json: bool,
) -> None:
    """Make a new query's checkpointLocation and state from a savepoint.

    Start the query with both, and with operators of the same names. It continues from the savepoint, beginning with
    micro-batch 1, and no longer needs the savepoint. If the command is interrupted, run it again.
    This process restores, several shards at a time; Spark does if you pass --conf, or if only Spark can write
    this state.
    """
    names = pairs(rename, "--rename", "OLD=NEW"), frozenset(skip), frozenset(reset)
    changes = Changes(shards, partitions, *names, sources, {}, continue_sinks)
    saved = Restorable.read(url, name, options, changes)
    require_new_location(checkpoint_location, options)  # before starting Spark
    query_id = in_process_or_spark(
        state_dir, options, conf, lambda tasks: restore_with(tasks, saved, checkpoint_location)
    )
    print_new_query(f"{name} is restored", name, query_id, checkpoint_location, state_dir, options, as_json=as_json)


def print_new_query(
    done: str,
    name: str,
    query_id: str,
    checkpoint_location: str,
    state_dir: str,
    options: Mapping[str, str],
    *,
    as_json: bool,
) -> None:
    """Print how to start the new query."""
    shards = shards_to_set(state_dir, options, query_id)
    if as_json:
        places = {"checkpoint_location": checkpoint_location, "state_dir": state_dir, "shards_to_set": shards}
        click.echo(json.dumps({"name": name, "query_id": query_id, **places}))
        return
    home, location = parse_url(state_dir), parse_url(checkpoint_location).for_spark
    lines = [f'spark.conf.set("{PREFIX}state.dir", {json.dumps(str(home))})  # before the query is defined']
    if shards is not None:
        lines.append(f'spark.conf.set("{PREFIX}shards", "{shards}")')
    lines.append(f'df.writeStream.option("checkpointLocation", {json.dumps(str(location))})')
    click.echo(f"{done}, as query {query_id}: start it with the same operators, by name, and\n")
    click.echo("\n".join(f"    {line}" for line in lines))


@savepoint.command("list")
@on_storage
@click.argument("url")
def list_(url: str, options: dict[str, str], as_json: bool) -> None:
    """List a directory's savepoints, including unfinished and damaged savepoints."""
    found = savepoints.listed(url, options)
    if not found:
        raise NotFoundError(
            "there are no savepoints here: check the URL, which must be the one passed as --to", url=url
        )
    if as_json:
        click.echo(json.dumps({"savepoints": [_listed(one) for one in found]}, indent=2))
        return
    shown = table("name", "made", "batch", "size", "", right=("batch", "size"), whole=("name", "made"))
    for one in found:
        made = one.savepoint
        shown.add_row(
            plain(one.name),
            moment(made.created_ms) if made else "",
            f"{made.query.batch_id}" if made else "",
            size(one.size_bytes),
            plain(made.comment if made else one.damage or "unfinished: delete it, or make it again"),
        )
    new_console().print(shown)


@savepoint.command()
@_on_savepoint
def show(url: str, name: str, options: dict[str, str], as_json: bool) -> None:
    """Show a savepoint's operators, sources and sinks."""
    _print(savepoints.read(url, name, options), as_json)


@savepoint.command()
@_on_savepoint
def verify(url: str, name: str, options: dict[str, str], as_json: bool) -> None:
    """Read a whole savepoint. The exit status is 1 if something is damaged or missing.

    Also lists harmless objects in its folder that are not part of it.
    """
    damages, leftovers = savepoints.verify(url, name, options), savepoints.leftovers(url, name, options)
    if as_json:
        click.echo(json.dumps({"name": name, "damages": damages, "leftovers": leftovers}, indent=2))
    else:
        console = new_console()
        for damage in damages:
            console.print(plain(damage), style="red")
        if not damages:
            console.print(f"{plain(name)} is intact")
        for key in leftovers:
            console.print(f"leftover of a retried task or a failed attempt: {plain(key)}", soft_wrap=True)
    if damages:
        sys.exit(1)


@savepoint.command()
@_on_savepoint
@click.argument("other")
@number_option("--keys", least=0, default=0, text="How many keys of each kind to show.")
def diff(url: str, name: str, other: str, keys: int, options: dict[str, str], as_json: bool) -> None:
    """Show how the savepoint OTHER differs from NAME. The exit status is 1 if it does."""
    compare_savepoints(url, name, other, keys, options, as_json)


def compare_savepoints(
    url: str,
    name: str,
    other: str,
    keys: int,
    options: dict[str, str],
    as_json: bool,
    *,
    other_url: str | None = None,
) -> None:
    """Print how two savepoints differ, and exit with 1 if they do."""
    facts, tables = savepoints.diff(url, name, other, options, keys=keys, other_target=other_url)
    if as_json:
        found = {"facts": facts, "tables": [json_value(asdict(one)) for one in tables]}
        click.echo(json.dumps(found, indent=2))
    else:
        _show_diff(facts, tables)
    if facts or any(one.differs for one in tables):
        sys.exit(1)


def _show_diff(facts: list[str], tables: list[TableDifference]) -> None:
    console = new_console()
    for line in facts:
        console.print(plain(line))
    counts = ("equal", "added", "removed", "changed")
    shown = table("operator", "table", *counts, "", right=counts, whole=("operator", "table"))
    for one in tables:
        numbers = (f"{getattr(one, kind):,}" for kind in counts)
        shown.add_row(plain(one.operator), plain(one.table), *numbers, plain(one.columns))
    console.print(shown)
    for one in tables:
        for kind, rows in one.keys.items():
            for row in rows:
                console.print(f"{kind} in {plain(one.operator)}/{plain(one.table)}: {plain(row)}")


@savepoint.command()
@_on_savepoint
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def delete(url: str, name: str, yes: bool, options: dict[str, str], as_json: bool) -> None:
    """Delete a savepoint, or the remains of one that was never finished."""
    if not yes and as_json:
        raise InvalidArgumentError("cannot ask for confirmation here: pass --yes to delete")
    if not yes:
        with open_storage(url, options) as storage:
            held = len(find_objects(storage, name))
        if held:
            click.confirm(f"Delete the savepoint {name} in {url}, {counted(held, 'object')}?", abort=True)
    objects = savepoints.delete(url, name, options)
    click.echo(
        json.dumps({"name": name, "objects": objects}) if as_json else f"{name}: {counted(objects, 'object')} deleted"
    )


def _listed(one: Listed) -> dict[str, Any]:
    facts = {"name": one.name, "objects": one.objects, "size_bytes": one.size_bytes, "damage": one.damage or None}
    made = one.savepoint
    return facts | {
        "finished": made is not None or bool(one.damage),
        "created_ms": made and made.created_ms,
        "batch_id": made and made.query.batch_id,
        "comment": made and made.comment,
    }


def _document(made: Savepoint) -> dict[str, Any]:
    return {
        "name": made.name,
        "comment": made.comment,
        "created_ms": made.created_ms,
        "size_bytes": made.size_bytes,
        "versions": dict(made.versions),
        "query_id": made.query.query_id,
        "batch_id": made.query.batch_id,
        "next_watermark_ms": made.query.next_watermark_ms,
        "sources": [asdict(source) for source in made.query.sources],
        "planned": made.query.planned and asdict(made.query.planned),
        "sinks": [asdict(sink) for sink in made.query.sinks],
        "operators": [
            {
                "name": operator.name,
                "host": operator.host,
                "shards": operator.shards,
                "rows": operator.rows,
                "size_bytes": operator.size_bytes,
                "pieces": [piece.key for piece in operator.pieces],
            }
            for operator in made.operators
        ],
        "left_out": list(made.left_out),
    }


def _print(made: Savepoint, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(_document(made), indent=2))
        return
    console = new_console()
    comment = f": {plain(made.comment)}" if made.comment else ""
    console.print(f"[bold]{plain(made.name)}[/], {moment(made.created_ms)}, {size(made.size_bytes)}{comment}")
    watermark = f", watermark {moment(made.query.next_watermark_ms)}" if made.query.next_watermark_ms else ""
    if made.query.query_id:
        console.print(f"query {plain(made.query.query_id)} after micro-batch {made.query.batch_id}{watermark}")
    else:
        console.print("initial state of a query that has not started")
    shown = table("operator", "shards", "table", "rows", right=("shards", "rows"), whole=("operator",))
    for operator in made.operators:
        for name, rows in operator.rows.items():
            shown.add_row(plain(operator.name), f"{operator.shards}", plain(name), f"{rows:,}")
        if operator.is_unnamed:
            shown.add_row(plain(operator.name), "", "no rows yet: name it with --rename", "")
    console.print(shown)
    for source in made.query.sources:
        console.print(f"source {plain(source.name)} at {plain(source.offset)}")
    for sink in made.query.sinks:
        decided = "has decided nothing" if sink.batch_id < 0 else f"has decided micro-batch {sink.batch_id}"
        is_saved = sink.batch_id <= made.query.batch_id
        more = "" if is_saved else ", which is not saved: restore with --continue-sinks, or its rows appear twice"
        console.print(f"sink {plain(sink.sink)} {decided}{more}")
    if made.left_out:
        console.print(f"not saved: {plain(', '.join(made.left_out))}")


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
    """Make a new query with a different number of shards.

    LOCATION is the query's checkpointLocation or state directory. The query may be running and is left unchanged. The
    new query continues from its state, beginning with micro-batch 1. This process rescales; Spark does if you pass
    --conf, or if only Spark can write this state. If the command is interrupted, run it again.
    """
    changes = Changes(shards, partitions, pairs(rename, "--rename", "OLD=NEW"), continue_sinks=continue_sinks)
    original, state_dir = both_places(original, state_dir, options)
    require_new_location(checkpoint_location, options)
    query_id = in_process_or_spark(
        state_dir,
        options,
        conf,
        lambda tasks: rescale_with(tasks, original, checkpoint_location, changes, to_state_dir),
    )
    where = to_state_dir or state_dir
    done = f"{original} is rescaled to {shards} shards"
    print_new_query(done, original, query_id, checkpoint_location, where, options, as_json=as_json)


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

    LOCATION is the query's checkpointLocation or state directory. The query may be running and is left unchanged. The
    clone has its own id and continues the micro-batch numbers. The state of Spark's own operators is copied, too. Give
    the clone its own sinks: it runs beside the original, so it cannot continue them. This process copies; with --conf,
    Spark does. If the command is interrupted, run it again.
    """
    require_new_location(checkpoint_location, options)
    original, state_dir = both_places(original, state_dir, options)
    places = original, checkpoint_location
    query_id = in_process_or_spark(
        state_dir,
        options,
        conf,
        lambda tasks: copy(tasks, *places, to_state_dir=to_state_dir, batch_id=batch_id),
    )
    done = f"{original} is cloned"
    print_new_query(done, original, query_id, checkpoint_location, to_state_dir, options, as_json=as_json)
