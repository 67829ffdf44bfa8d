"""``holdfast ui``: serve the page until interrupted."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import click
from rich.console import Console

from holdfast import clock
from holdfast.commands.target import new_console, printable, state_dir_option, storage_option
from holdfast.distribution import pip_install
from holdfast.errors import InvalidArgumentError
from holdfast.settings import PREFIX
from holdfast.ui.site import Site, open_site, survey_threads

PORT = 4880
_REQUESTS_AT_ONCE = 16
_PAGES_AT_ONCE = 8
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@click.command()
@click.argument("locations", nargs=-1, required=True, metavar="LOCATION…")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=PORT,
    show_default=True,
    help="The port to listen on; 0 picks a free port.",
)
@click.option(
    "--allow-host",
    "allowed",
    multiple=True,
    metavar="NAME",
    help="An additional host name that browsers may use, such as a proxy's; repeatable.",
)
@click.option(
    "--local-dir",
    metavar="PATH",
    help="spark.holdfast.local.dir of queries on this machine, to show their last micro-batches live.",
)
@state_dir_option(f"The queries' {PREFIX}state.dir, if no LOCATION is a state directory.", required=False)
@storage_option
def ui(
    locations: tuple[str, ...],
    host: str,
    port: int,
    allowed: tuple[str, ...],
    local_dir: str | None,
    state_dir: str | None,
    options: dict[str, str],
) -> None:
    """Show state as a web page, read-only, on this machine.

    LOCATION is a state directory, as in spark.holdfast.state.dir, or the checkpointLocation of a query with state in
    such a directory. Each leads to the other; if that fails, pass both to see rows, keys and history. Queries
    may be running; an empty directory appears once a query commits to it.
    """
    with ExitStack() as stack:
        requests, surveys = (
            stack.enter_context(ThreadPoolExecutor(many, f"holdfast-{name}"))
            for name, many in (("ui", _REQUESTS_AT_ONCE), ("survey", survey_threads(len(locations) + 1)))
        )
        console = Console(stderr=True, emoji=False)
        # Report wrong locations here rather than on a page.
        with console.status("listing …") if console.is_terminal else ExitStack():
            site = open_site(
                locations,
                options,
                requests,
                surveys,
                stack,
                state_dir=state_dir,
                local_dir=local_dir,
            )
        for one in site.awaited():
            console.print(printable(f"waiting for {one.location}: {one.what}"), soft_wrap=True, markup=False)
        token = clock.new_id() + clock.new_id()
        server = make_server(site, token, host, port, allowed)
        stack.callback(server.close)
        shown_host = f"[{host}]" if ":" in host else host
        new_console().print(f"http://{shown_host}:{server.effective_port}/{token}/", soft_wrap=True, markup=False)
        console.print("Press Ctrl-C to stop. Anyone with this address can read the state.")
        if host not in _LOOPBACK:
            console.print("Other machines can reach it, unencrypted: put it behind a TLS proxy.")
        server.run()


def make_server(site: Site, token: str, host: str, port: int, allowed: tuple[str, ...] = ()) -> Any:
    """Return a listening server, whose `run` serves until interrupted. Raises `InvalidArgumentError`."""
    try:
        from waitress import create_server

        from holdfast.ui.app import make_app, trusted_hosts
    except ModuleNotFoundError as exc:
        raise InvalidArgumentError(
            f"the page needs packages that are not installed: {pip_install('ui')}", missing=exc.name
        ) from exc
    app = make_app(site, token, trusted_hosts(host, allowed))
    return create_server(app, sockets=[_listening(host, port)], threads=_PAGES_AT_ONCE, ident=None)


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as exc:
        raise InvalidArgumentError(
            "cannot listen on that address: if the port is taken, choose another with --port, or 0 for any",
            host=host,
            port=port,
            reason=exc.strerror or exc,
        ) from exc
