"""The command line, ``holdfast``: each command lives in the module that the table names.

A command's module is imported when the command runs, so that ``holdfast --help`` is fast. An error of holdfast ends the
command with its message and exit status 2, without a traceback: 1 means that a command ran and found a problem, such as
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

# Command: the module and the click command in it.
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
# What `holdfast savepoint` alone has.
_OF_SAVEPOINTS = {"create", "delete", "from-spark", "list", "restore", "show"}
# Commands with packages that only an extra of the same name installs.
_EXTRAS = {"bench"}
# What an installation beside a Spark that came without pip leaves out, docs/deploy.md.
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
            below = f"; did you mean 'savepoint {args[0]}'?" if args[0] in _OF_SAVEPOINTS else ""
            ctx.fail(f"no such command: {args[0]!r}{below or did_you_mean(args[0], _COMMANDS)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as exc:  # of what a command imports when it needs it
            raise _needs_packages(str(ctx.invoked_subcommand), exc) from exc


def _needs_packages(name: str, missing: ModuleNotFoundError) -> InvalidArgumentError:
    """Return the error that names a command's missing packages; reraise if it should have them."""
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
    """Return a stand-in for a command that lacks packages: help lists it, and any call names them."""

    def say(**_: object) -> None:
        raise error

    missing = error.facts["missing"]
    return click.Command(
        name,
        callback=say,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
        help=f"Not installed: needs {missing if missing in _SPARK else f'{distribution.NAME}[{name}]'}.",
    )


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(distribution.VERSION, prog_name="holdfast")
def group() -> None:
    """Inspect, back up, move and repair the state of PySpark streaming queries."""


class _HarmlessLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return _harmless(super().format(record))


def main() -> None:
    """Run the command line."""
    if logging.lastResort is not None:  # prints warnings, since no command sets logging up
        logging.lastResort.setFormatter(_HarmlessLines())
    try:
        distribution.require_no_namesake()
        group(prog_name="holdfast")
    except HoldfastError as exc:
        click.echo(f"holdfast: {_harmless(str(exc))}", err=True)
        sys.exit(2)


def _harmless(text: str) -> str:
    """Return text without control characters; others may have written it."""
    from holdfast.commands.target import printable

    return "\n".join(map(printable, text.splitlines()))
