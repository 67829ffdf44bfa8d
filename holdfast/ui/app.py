"""The web application and its URLs. The server renders the pages, which work without scripts.

::

    /<token>/                                       overview
    /<token>/<directory>/<operator>/                shards as a heat map, time line, growth, skew, tables
    /<token>/<directory>/<operator>/shard/<n>       one shard's versions and snapshots
    /<token>/<directory>/<operator>/rows            rows, keys and their history, after any retained micro-batch
    /<token>/<directory>/<operator>/upkeep          what gc and verify would report
    /<token>/static/…                               style, script, icon

With ``follow=1`` a script replaces the page's content every few seconds; without scripts the browser reloads it.

Access to the page, and what a browser may do with it:

* **token**: each path begins with a random token; without it every path is 404. It is compared in constant time, and
  never appears in a cookie or ``Referer``.
* **host**: a request must name one of the server's own hosts, so that no other site can reach it by resolving its own
  name to this server (DNS rebinding).
* **reading**: only GET and HEAD are answered, and no request changes anything.
* **content**: the browser loads and runs only files of this server's ``static`` folder; HTML in state is shown as text.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from flask import Flask, Response, abort, g, make_response, render_template, request, send_from_directory, url_for
from jinja2 import StrictUndefined
from werkzeug.exceptions import HTTPException
from werkzeug.sansio.utils import host_is_trusted

from holdfast import __version__, clock
from holdfast.commands.target import moment, printable, size
from holdfast.errors import HoldfastError, InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.health import ago, count, duration, percent, persisting, read_failures, tables_of, times
from holdfast.ui.inquiry import Dated, Patience
from holdfast.ui.overview import Card, card_of, overview
from holdfast.ui.rows import RowsRequest, rows_view
from holdfast.ui.shards import CHOICES, LEVELS, MEASURES, ROWS, Measure, Measured, heat_map, measured, shard_view, skew
from holdfast.ui.site import Directory, Site
from holdfast.ui.survey import OperatorSurvey, Survey
from holdfast.ui.time_line import HEIGHT, WIDTH, WINDOWS, clock_time, growth, time_line
from holdfast.ui.upkeep import upkeep

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
FOLLOW_S = 5
_STATUS = ((NotFoundError, 404), (InvalidArgumentError, 400), (UnavailableError, 503))
_NUMBER_DIGITS_MAX = 12
#: Parameters that links to the same page keep, besides a key's columns; others could be arguments of `url_for`.
_KEPT = frozenset(["after", "batch", "check", "first", "follow", "last", "measure", "shard", "table", "text", "window"])


def trusted_hosts(host: str, allowed: Collection[str] = ()) -> list[str]:
    """Return the host names that a request may use."""
    names = {host} if host not in _EVERYWHERE else {socket.gethostname(), socket.getfqdn()}
    return sorted({"localhost", "127.0.0.1", "[::1]", *(f"[{n}]" if ":" in n else n for n in names), *allowed})


def guard(app: Flask, token: str, hosts: list[str]) -> None:
    """Make an application answer only requests with the token and one of these hosts, and add strict headers."""

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


def make_app(site: Site, token: str, hosts: list[str]) -> Flask:
    """Return the application; it answers only to these host names."""
    app = Flask(__name__, static_folder=None)
    app.url_map.strict_slashes = False
    app.jinja_env.undefined = StrictUndefined
    app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True
    filters = (clock_time, count, duration, moment, percent, printable, size, times)
    app.jinja_env.filters.update({one.__name__: one for one in filters})
    guard(app, token, hosts)
    _answer_errors(app)
    _add_pages(app, site)

    @app.url_defaults
    def keep_following(endpoint: str, values: dict[str, object]) -> None:
        if endpoint != "static" and request.args.get("follow") == "1":
            values.setdefault("follow", "1")

    @app.context_processor
    def shown_everywhere() -> dict[str, Any]:
        at_ms = clock.now_ms()
        return {
            "ago": lambda then_ms: ago(then_ms, at_ms),
            "follow_s": FOLLOW_S,
            "follows": request.args.get("follow") == "1",
            "here": _here,
            "version": __version__,
        }

    return app


def _here(**changes: object) -> str:
    """Return the URL of this page with changed parameters; None removes a parameter."""
    kept = {name: value for name, value in request.args.items() if name in _KEPT or name.startswith("key.")}
    assert request.endpoint is not None
    url: str = url_for(request.endpoint, **{**kept, **(request.view_args or {}), **changes})
    return url


def _answer_errors(app: Flask) -> None:
    @app.errorhandler(HoldfastError)
    def holdfast_error(error: HoldfastError) -> Response:
        status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
        return make_response(render_template("error.html", title="Cannot show this", message=str(error)), status)

    @app.errorhandler(HTTPException)
    def http_error(error: HTTPException) -> Response:
        # Plain text: without the token or a trusted host, a client learns nothing about the page.
        text = f"{error.code} {error.name}: {error.description}\n"
        return Response(text, error.code, content_type="text/plain; charset=utf-8")


def _add_pages(app: Flask, site: Site) -> None:
    page = "/<token>/<int:place>/<operator>"

    @app.get("/<token>/static/<path:filename>")
    def static(filename: str) -> Response:
        return send_from_directory(f"{app.root_path}/static", filename, max_age=0)

    @app.get("/<token>/")
    def index() -> str:
        view = overview(site, clock.now_ms())
        # A page that awaits a query refreshes itself.
        follows = request.args.get("follow", "1" if view.awaited else "0") == "1"
        return render_template("overview.html", view=view, follows=follows)

    @app.get(f"{page}/")
    def operator(place: int, operator: str) -> str:
        look = _Look.at(site, place, operator)
        directory, found = look.directory, look.operator
        shown = _measured(directory, found, CHOICES[_choice("measure", CHOICES)], look.patience)
        window = _choice("window", WINDOWS)
        return look.render(
            "operator.html",
            map=heat_map(found, shown, _number("first", 0), _number("last", None)),
            measures=CHOICES.values() if directory.queries else MEASURES.values(),
            levels=list(range(LEVELS + 1)),
            skew=skew(found, shown),
            line=time_line(found.objects, window),
            window=window,
            windows=WINDOWS,
            growth=growth(directory.storage, directory.executor, directory.sizes, found),
            failures=read_failures(directory.storage, persisting(found.signs.reports, look.committed)),
            tables=tables_of(directory.storage, found.signs.record),
            live=site.batches_of(found.signs.query_id, operator, look.patience),
            width=WIDTH,
            height=HEIGHT,
        )

    @app.get(f"{page}/shard/<int:shard>")
    def shard(place: int, operator: str, shard: int) -> str:
        look = _Look.at(site, place, operator)
        view = shard_view(look.directory.storage, look.directory.executor, look.operator, shard, look.committed)
        return look.render("shard.html", view=view)

    @app.get(f"{page}/rows")
    def rows(place: int, operator: str) -> str:
        look = _Look.at(site, place, operator)
        view = None
        if known := look.directory.query_of(operator, look.patience):
            query, name = known
            with query.reading() as stored:
                view = rows_view(stored, name, _rows_request(), clock.monotonic_ms)
        return look.render("rows.html", view=view)

    @app.get(f"{page}/upkeep")
    def upkeep_of(place: int, operator: str) -> str:
        look = _Look.at(site, place, operator)
        check, first = _choice("check", ("gc", "verify")), _number("first", 0)
        storage, executor = look.directory.storage, look.directory.executor
        return look.render("upkeep.html", view=upkeep(storage, executor, look.operator, check, first, clock.now_ms()))


@dataclass(frozen=True)
class _Look:
    """What the views of an operator share: its directory, its survey, and its query's health."""

    directory: Directory
    dated: Dated[Survey]
    operator: OperatorSurvey
    card: Card | None
    patience: Patience

    @classmethod
    def at(cls, site: Site, place: int, operator: str) -> _Look:
        patience = Patience.of_a_view()
        directory = site.directory(place, patience)
        dated = directory.surveyor.latest(patience)
        found = dated.found.operator(operator)
        card = card_of(directory, dated.found, found, site.batches(patience), patience, clock.now_ms())
        return cls(directory, dated, found, card, patience)

    @property
    def committed(self) -> int | None:
        """The query's last micro-batch that is known to be committed."""
        return self.card.health.committed if self.card else None

    def render(self, template: str, **shown: Any) -> str:
        about = {"directory": self.directory, "dated": self.dated, "operator": self.operator, "card": self.card}
        return render_template(template, **about, **shown)


def _measured(directory: Directory, operator: OperatorSurvey, measure: Measure, patience: Patience) -> Measured:
    if measure is not ROWS:
        return measured(operator, measure)
    known = directory.query_of(operator.name, patience)
    if known is None:
        raise InvalidArgumentError("row counts need the query's checkpoint location: restart `holdfast ui` with it")
    query, name = known
    with query.reading() as stored:
        return directory.rows.measured(stored, name, operator.objects)


def _rows_request() -> RowsRequest:
    """Parse the request for rows; a key's columns are parameters such as ``key.user``."""
    given = request.args
    typed = {name.removeprefix("key."): value for name, value in given.items() if name.startswith("key.")}
    return RowsRequest(
        batch_id=_number("batch", None),
        table=given.get("table"),
        # A form also sends empty fields, which do not make a key.
        key=typed if any(typed.values()) else {},
        shard=_number("shard", None),
        after=given.get("after"),
        contains=given.get("text", ""),
    )


def _choice(name: str, allowed: Any) -> str:
    """Return a parameter that must be one of these values; the first if it is absent."""
    value = request.args.get(name, next(iter(allowed)))
    if value not in allowed:
        raise InvalidArgumentError(f"{name} must be one of {', '.join(allowed)}", given=value[:40])
    return value


def _number(name: str, default: Any) -> Any:
    value = request.args.get(name)
    if value is None:
        return default
    if not (value.isascii() and value.isdigit() and len(value) <= _NUMBER_DIGITS_MAX):
        raise InvalidArgumentError(f"{name} must be a whole number", given=value[:40])
    return int(value)
