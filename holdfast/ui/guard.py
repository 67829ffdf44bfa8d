"""Who may see the page, and what a browser may do with it.

* **token**: each path begins with a random token; without it every path is 404. It is compared in constant time, and
  is in no cookie and no ``Referer``.
* **host**: a request must name one of the server's own hosts, so that no other site can reach it under a name of its
  own (DNS rebinding).
* **reading**: only GET and HEAD are answered, and no request changes anything.
* **content**: the browser loads and runs only files of this server's ``static`` folder; state that holds HTML is text.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Collection

from flask import Flask, Response, abort, g, request
from werkzeug.sansio.utils import host_is_trusted

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_EVERYWHERE = {"0.0.0.0", "::", ""}  # noqa: S104  compared, not bound to


def trusted_hosts(host: str, also: Collection[str] = ()) -> list[str]:
    """Return the host names that a request may name."""
    names = {host} if host not in _EVERYWHERE else {socket.gethostname(), socket.getfqdn()}
    return sorted({"localhost", "127.0.0.1", "[::1]", *(f"[{n}]" if ":" in n else n for n in names), *also})


def guard(app: Flask, token: str, hosts: list[str]) -> None:
    """Have an application answer only requests with the token and one of these hosts, with strict headers."""

    @app.url_value_preprocessor
    def take_token(endpoint: str | None, values: dict[str, object] | None) -> None:
        g.token = str((values or {}).pop("token", ""))

    @app.before_request
    def check() -> None:
        if not host_is_trusted(request.headers.get("Host"), hosts):
            abort(400, "this server does not answer to that host name: allow it with --allow-host")
        if request.method not in ("GET", "HEAD"):
            abort(405)
        if not hmac.compare_digest(g.get("token", "").encode(), token.encode()):
            abort(404)

    @app.url_defaults
    def add_token(endpoint: str, values: dict[str, object]) -> None:
        values["token"] = token

    @app.after_request
    def add_headers(response: Response) -> Response:
        response.headers.update(_HEADERS)
        return response
