"""The command line, ``holdfast``.

A command's module is imported on demand, so that a command does not load the packages of others. A `HoldfastError` ends
the command with its message and exit status 2, without a traceback; status 1 means that it found a problem, such as
damage.
"""

from __future__ import annotations

import importlib
import logging
import sys

import click

from holdfast import distribution
from holdfast.backends.options import did_you_mean
from holdfast.errors import HoldfastError, InvalidArgumentError

# The module and click command of each command.
_COMMANDS = {
    "bench": "holdfast.benches.command:bench",
    "clone": "holdfast.commands.savepoint:clone",
    "demo": "holdfast.examples.flights.command:demo",
    "diff": "holdfast.commands.lookup:diff",
    "export": "holdfast.commands.export:export",
    "gc": "holdfast.commands.gc:gc",
    "get": "holdfast.commands.lookup:get",
    "history": "holdfast.commands.lookup:history",
    "inspect": "holdfast.commands.inspect:inspect",
    "log": "holdfast.commands.log:log",
    "rescale": "holdfast.commands.savepoint:rescale",
    "savepoint": "holdfast.commands.savepoint:savepoint",
    "ui": "holdfast.ui.command:ui",
    "verify": "holdfast.commands.verify:verify",
}
# Subcommands that only `holdfast savepoint` has.
_SAVEPOINT_COMMANDS = {"create", "delete", "from-spark", "list", "restore", "show"}
# Commands that need the extra of the same name.
_EXTRAS = {"bench"}
# Missing if pip did not install Spark: docs/deploy.md.
_SPARK = {"pyspark", "py4j"}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[name].partition(":")
        try:
            command: click.Command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as exc:
            return _not_installed(name, _needs_packages(name, exc))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _COMMANDS and args[0][:1].isalpha():
            below = f"; did you mean 'savepoint {args[0]}'?" if args[0] in _SAVEPOINT_COMMANDS else ""
            ctx.fail(f"no such command: {args[0]!r}{below or did_you_mean(args[0], _COMMANDS)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as exc:  # from an import inside a command
            raise _needs_packages(str(ctx.invoked_subcommand), exc) from exc


def _needs_packages(name: str, missing: ModuleNotFoundError) -> InvalidArgumentError:
    """Return the error that says how to install a missing package; raise `missing` if no extra provides it."""
    package = (missing.name or "").partition(".")[0]
    if package in _SPARK:
        return InvalidArgumentError(
            f"holdfast {name} needs PySpark: pip install pyspark; or, if pip did not install your Spark, "
            "put both $SPARK_HOME/python and the py4j-….zip in its folder lib on PYTHONPATH",
            missing=package,
        )
    if name not in _EXTRAS:
        raise missing
    return InvalidArgumentError(
        f"holdfast {name} needs packages that are not installed: {distribution.pip_install(name)}", missing=missing.name
    )


def _not_installed(name: str, error: InvalidArgumentError) -> click.Command:
    """Return a placeholder for a command with missing packages: help lists it, and running it raises `error`."""

    def fail(**_: object) -> None:
        raise error

    missing = error.facts["missing"]
    return click.Command(
        name,
        callback=fail,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
        help=f"Not installed: needs {missing if missing in _SPARK else f'{distribution.NAME}[{name}]'}.",
    )


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(distribution.VERSION, prog_name="holdfast")
def group() -> None:
    """Inspect, back up, move and repair the state of PySpark streaming queries."""


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return _printable(super().format(record))


def main() -> None:
    """Run the command line."""
    if logging.lastResort is not None:  # prints warnings, since commands do not configure logging
        logging.lastResort.setFormatter(_PrintableFormatter())
    try:
        distribution.require_no_namesake()
        group(prog_name="holdfast")
    except HoldfastError as exc:
        click.echo(f"holdfast: {_printable(str(exc))}", err=True)
        sys.exit(2)


def _printable(text: str) -> str:
    """Escape control characters, which text from a storage may contain."""
    from holdfast.commands.target import printable

    return "\n".join(map(printable, text.splitlines()))
