"""Other stream processors on the same files, beside holdfast and Spark."""

from __future__ import annotations

from typing import Any

import click

from holdfast.benches.commands.single import compare, console, engines_option, options_of
from holdfast.benches.peers.engines import PEERS, from_files
from holdfast.benches.peers.job import FromFiles

_DEFAULT = f"{from_files('holdfast-rocksdb')},flink-sql-rocksdb-mini-batch,pathway"


@click.command("peers")
@engines_option(FromFiles, _DEFAULT)
@options_of(FromFiles(), repeats=1, without="variable")
def peers(engines: str, **options: Any) -> None:
    """Flink, Pathway, Bytewax and Quix Streams on files: each is installed on its first use, up to 1.6 GB from PyPI."""
    for environment in dict.fromkeys(PEERS[name].program.environment for name in engines.split(",") if name in PEERS):
        environment.install(console.print)
    compare("peers", FromFiles(), engines, options)


COMMANDS = (peers,)
