"""What the commands share: the state directory, options, and output."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.errors import HoldfastError, InvalidArgumentError, NotFoundError
from holdfast.settings import PREFIX, STORAGE_PREFIX
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import ShardListing, StateDirListing, list_state_dir

#: Shown if a state directory holds no commits; its query may still be running.
SMALL_COMMITS = "small commits stay in the query's checkpointLocation until enough have accumulated"
#: The longest value in a table, in characters.
CELL_MAX = 300
_THREADS = 16
# The width for files and pipes, for which rich would assume 80 and truncate names.
_WIDTH_ELSEWHERE = 240
_VARIABLE = "HOLDFAST_STORAGE_OPTIONS"
# Backslashes that rich would drop: before a bracket, and at the end, where a tag may follow.
_BACKSLASHES = re.compile(r"(?<!\\)(\\+)(?=\[|$)")
_Command = Callable[..., None]


@dataclass(frozen=True)
class StateDirectory:
    storage: ObjectStorage
    executor: Executor  #: For parallel requests
    listing: StateDirListing  #: All operators, or the requested one
    console: Console  #: Standard output

    def shards(self, operator: str) -> list[ShardListing]:
        return list(self.listing.operators[operator].shards.values())

    def of(self, shard: ShardListing) -> PrefixedStorage:
        return PrefixedStorage(self.storage, shard.prefix)

    def show(self, document: dict[str, Any]) -> None:
        click.echo(json.dumps({"storage": self.storage.url, **document}, indent=2))


def _named(given: Iterable[str], given_by: str) -> dict[str, str]:
    """Parse NAME=VALUE options. Raises `InvalidArgumentError`."""
    options = {}
    for position, text in enumerate(given, 1):
        name, separator, value = text.partition("=")
        if not name or not separator:  # not shown: it may be a secret
            raise InvalidArgumentError("a storage option must be NAME=VALUE", given_by=given_by, number=position)
        options[name.removeprefix(STORAGE_PREFIX)] = value
    return options


#: Adds the storage options to a command.
storage_option = click.option(
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    # With the variable's: an endpoint on the command line must not replace its secrets.
    callback=lambda _context, _option, given: (
        _named(os.environ.get(_VARIABLE, "").split(), f"${_VARIABLE}") | _named(given, "--option")
    ),
    help=f"A storage option, as in {STORAGE_PREFIX}NAME; repeatable. Keep secrets off the command line: put them in "
    f"${_VARIABLE}, separated by spaces, or where the store's own tools look. Command-line options override the "
    "variable.",
)


def with_options(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """Return a decorator that adds options to a command, in the order of its help."""

    def add(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


#: Adds the options of all commands.
on_storage = with_options(storage_option, click.option("--json", "as_json", is_flag=True, help="Print JSON."))
#: Adds the URL of a state directory and the options of all commands.
on_state_dir = with_options(
    click.argument("url"), click.option("--operator", metavar="NAME", help="Only this operator."), on_storage
)


class WholeNumber(click.IntRange):
    """An integer. Without `name`, click's errors say "not a valid integer range"."""

    name = "whole number"


def number_option(
    *names: str, text: str, least: int = 1, default: int | None = None, required: bool = False
) -> Callable[[_Command], _Command]:
    """Return a decorator that adds an integer option."""
    given: dict[str, Any] = {} if default is None else {"default": default}  # a default of None satisfies `required`
    return click.option(
        *names,
        type=WholeNumber(min=least),
        show_default=default is not None,
        required=required,
        metavar="N",
        help=text,
        **given,
    )


def state_dir_option(
    text: str = f"The query's {PREFIX}state.dir. Default: the one in its checkpoint.", *, required: bool = False
) -> Callable[[_Command], _Command]:
    """Return a decorator that adds ``--state-dir``, which an environment variable may set for all commands."""
    return click.option(
        "--state-dir",
        required=required,
        metavar="URL",
        envvar="HOLDFAST_STATE_DIR",
        show_envvar=True,
        help=text,
    )


def both_places(
    given: str, state_dir: str | None, options: Mapping[str, str], operator: str | None = None
) -> tuple[str, str]:
    """Return a query's checkpoint location and its state directory, either of which may be given alone."""
    from holdfast.spark_integration.lookup.places import places_of, require_query

    location, found = places_of(given, state_dir, options, operator)
    if state_dir is not None and location == given:  # otherwise already checked
        require_query(location, options)
    return location, found


def savepoint_place(location: str) -> tuple[str, str]:
    """Split URL/NAME into a savepoint's directory and name."""
    directory, slash, name = location.rstrip("/").rpartition("/")
    return directory or slash or ".", name


def batch_option(text: str = "The micro-batch. Default: the last committed one.") -> Callable[[_Command], _Command]:
    return number_option("--batch", "batch_id", least=0, text=text)


def retain_option(text: str) -> Callable[[_Command], _Command]:
    return number_option("--retain", text=f"{text} Default: the query's own, recorded with its state.")


@contextmanager
def opened(url: str, options: Mapping[str, str], operator: str | None) -> Iterator[StateDirectory]:
    """Open and list a state directory. Raises `InvalidArgumentError`, `NotFoundError`."""
    if operator == "":  # from an unset variable: not meant as all operators
        raise InvalidArgumentError("--operator must name an operator: omit it for all operators")
    with open_storage(url, options) as storage, request_threads() as executor:
        try:
            listing = list_state_dir(storage, operator)
        except NotFoundError:
            _require_no_location(url, options)
            raise
        yield StateDirectory(storage, executor, listing, new_console())


def _require_no_location(url: str, options: Mapping[str, str]) -> None:
    """Raise InvalidArgumentError if the URL is a query's checkpoint location instead of its state directory."""
    from holdfast.spark_integration.lookup.places import find_state_dir, query_at

    query_id = query_at(url, options)
    if query_id is None:
        return
    try:
        where = f"its state directory is {find_state_dir(url, options, query_id)}"
    except HoldfastError as exc:
        where = f"its state directory cannot be determined: {exc}"
    raise InvalidArgumentError(
        f"this is the checkpointLocation of a query, which holds only pointers to its state; {where}", query=query_id
    )


def request_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, "holdfast-command")


def new_console() -> Console:
    """Return a console on standard output without emoji: rich would replace ``:id:`` in ``user:id:42``."""
    return Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else _WIDTH_ELSEWHERE)


def table(*columns: str, right: tuple[str, ...] = (), whole: tuple[str, ...] = ()) -> Table:
    """Return a table for the terminal; `right`: columns of numbers; `whole`: columns that never wrap."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        justify = "right" if name in right else "left"
        made.add_column(name, justify=justify, overflow="fold", no_wrap=name in whole or name in right)  # type: ignore[arg-type]
    return made


def plain(text: object) -> str:
    """Escape text so that the terminal shows it literally, whatever markup or control characters it contains."""
    parts = _BACKSLASHES.split(printable(text))
    # rich halves backslashes before a tag, and drops one before any other bracket: double them, and add a tag.
    return "".join(f"{part * 2}[none][/none]" if number % 2 else escape(part) for number, part in enumerate(parts))


def printable(text: object) -> str:
    """Escape control and direction characters."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def size(size_bytes: float) -> str:
    """Format a number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" or size_bytes >= 100 else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:,.1f} TB"


def moment(at_ms: int) -> str:
    """Format a time in UTC, or as ms if it is out of range."""
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms"


def cell_text(value: object) -> str:
    """Format a value as keys are given: text unchanged, other values as JSON; cut long text."""
    found = json_value(value)
    text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
    return text if len(text) <= CELL_MAX else f"{text[:CELL_MAX]}… ({len(text):,} characters)"


def json_value(value: Any) -> Any:
    """Convert a value to JSON, with times, decimals and binaries as the text that keys accept."""
    if isinstance(value, Mapping):
        return {str(name): json_value(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(inner) for inner in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, date | time):  # and datetime
        return value.isoformat()
    if isinstance(value, float) and not float("-inf") < value < float("inf"):
        return str(value)
    return value if value is None or isinstance(value, str | int | float) else str(value)
