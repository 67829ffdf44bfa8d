"""The web application: which URL shows what. Pages are made on the server; they work without scripts.

::

    /<token>/                                       overview
    /<token>/<directory>/<operator>/                shards as a heat map, time line, growth, skew, tables
    /<token>/<directory>/<operator>/shard/<n>       one shard's versions and snapshots
    /<token>/<directory>/<operator>/rows            rows, keys and their history, after any retained micro-batch
    /<token>/<directory>/<operator>/upkeep          what gc and verify would say
    /<token>/static/…                               style, script, icon

Where a page is asked for with ``follow=1``, a script replaces its content every few seconds; without scripts the
browser loads it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flask import Flask, Response, make_response, render_template, request, send_from_directory, url_for
from jinja2 import StrictUndefined
from werkzeug.exceptions import HTTPException

from holdfast import __version__, clock
from holdfast.errors import HoldfastError, InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.ui import words
from holdfast.ui.directory import Directory
from holdfast.ui.guard import guard
from holdfast.ui.inquiry import Dated, Patience
from holdfast.ui.site import Site
from holdfast.ui.survey import OperatorSurvey, Survey
from holdfast.ui.views.heat_map import CHOICES, LEVELS, MEASURES, ROWS, Measure, Measured, heat_map, measured, skew
from holdfast.ui.views.overview import overview, troubles
from holdfast.ui.views.rows import Asked, rows_view
from holdfast.ui.views.shard import shard_view
from holdfast.ui.views.time_line import HEIGHT, WIDTH, WINDOWS, time_line
from holdfast.ui.views.upkeep import upkeep

FOLLOW_S = 5
_STATUS = ((NotFoundError, 404), (InvalidArgumentError, 400), (UnavailableError, 503))
_NUMBER_DIGITS_MAX = 12
#: What a link to the same page keeps, with a key's columns. Others could be arguments of `url_for` itself.
_KEPT = frozenset(["after", "batch", "check", "first", "follow", "last", "measure", "shard", "table", "text", "window"])


def make_app(
    site: Site,
    token: str,
    hosts: list[str],
    now_ms: Callable[[], int] = clock.now_ms,
    monotonic_ms: Callable[[], int] = clock.monotonic_ms,
) -> Flask:
    """Return the application.

    Parameters
    ----------
    site : Site
        What it shows.
    token : str
        What paths begin with.
    hosts : list of str
        Under which names it may be asked for.
    now_ms, monotonic_ms : callable
        The time.
    """
    app = Flask(__name__, static_folder=None)
    app.url_map.strict_slashes = False
    app.jinja_env.undefined = StrictUndefined
    app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True
    app.jinja_env.filters.update(words.FILTERS)
    guard(app, token, hosts)
    _answer_errors(app)
    _add_pages(app, site, now_ms, monotonic_ms)

    @app.url_defaults
    def keep_following(endpoint: str, values: dict[str, object]) -> None:
        if endpoint != "static" and request.args.get("follow") == "1":
            values.setdefault("follow", "1")

    @app.context_processor
    def shown_everywhere() -> dict[str, Any]:
        at_ms = now_ms()
        return {
            "ago": lambda then_ms: words.ago(then_ms, at_ms),
            "follow_s": FOLLOW_S,
            "follows": request.args.get("follow") == "1",
            "here": _here,
            "version": __version__,
        }

    return app


def _here(**changes: object) -> str:
    """Return the URL of this page with other parameters; None takes one away."""
    kept = {name: value for name, value in request.args.items() if name in _KEPT or name.startswith("key.")}
    assert request.endpoint is not None
    url: str = url_for(request.endpoint, **{**kept, **(request.view_args or {}), **changes})
    return url


def _answer_errors(app: Flask) -> None:
    @app.errorhandler(HoldfastError)
    def of_ours(error: HoldfastError) -> Response:
        status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
        return make_response(render_template("error.html", title="This cannot be shown", message=str(error)), status)

    @app.errorhandler(HTTPException)
    def of_http(error: HTTPException) -> Response:
        # Whoever does not know the token is not told what there is; a host of another name is told in plain text.
        text = f"{error.code} {error.name}: {error.description}\n"
        return Response(text, error.code, content_type="text/plain; charset=utf-8")


def _add_pages(app: Flask, site: Site, now_ms: Callable[[], int], monotonic_ms: Callable[[], int]) -> None:
    page = "/<token>/<int:place>/<operator>"

    @app.get("/<token>/static/<path:filename>")
    def static(filename: str) -> Response:
        return send_from_directory(f"{app.root_path}/static", filename, max_age=0)

    @app.get("/<token>/")
    def index() -> str:
        view = overview(site)
        # Whoever waits for a query need not ask for it to be followed.
        follows = request.args.get("follow", "1" if view.awaited else "0") == "1"
        return render_template("overview.html", view=view, follows=follows)

    @app.get(f"{page}/")
    def operator(place: int, operator: str) -> str:
        directory, dated, patience = _survey_of(site, place)
        found = dated.found.operator(operator)
        shown = _measured(directory, found, CHOICES[_choice("measure", CHOICES)], patience)
        window = _choice("window", WINDOWS)
        return render_template(
            "operator.html",
            directory=directory,
            dated=dated,
            operator=found,
            map=heat_map(found, shown, _number("first", 0), _number("last", None)),
            measures=CHOICES.values() if directory.queries else MEASURES.values(),
            levels=range(LEVELS + 1),
            skew=skew(found, shown),
            line=time_line(found.objects, window),
            window=window,
            windows=WINDOWS,
            growth=directory.growth.growth(found),
            troubles=troubles(directory.storage, found),
            live=site.live.of_operator(found.query_id, operator),
            width=WIDTH,
            height=HEIGHT,
        )

    @app.get(f"{page}/shard/<int:shard>")
    def shard(place: int, operator: str, shard: int) -> str:
        directory, dated, _ = _survey_of(site, place)
        found = dated.found.operator(operator)
        view = shard_view(directory.storage, directory.executor, found, shard)
        return render_template("shard.html", directory=directory, dated=dated, operator=found, view=view)

    @app.get(f"{page}/rows")
    def rows(place: int, operator: str) -> str:
        directory, dated, patience = _survey_of(site, place)
        found = dated.found.operator(operator)
        view = None
        if known := directory.query_of(operator, patience):
            query, name = known
            with query.reading() as stored:
                view = rows_view(stored, name, _asked(), monotonic_ms)
        return render_template("rows.html", directory=directory, dated=dated, operator=found, view=view)

    @app.get(f"{page}/upkeep")
    def upkeep_of(place: int, operator: str) -> str:
        directory, dated, _ = _survey_of(site, place)
        found = dated.found.operator(operator)
        check, first = _choice("check", ("gc", "verify")), _number("first", 0)
        view = upkeep(directory.storage, directory.executor, found, check, first, now_ms(), monotonic_ms)
        return render_template("upkeep.html", directory=directory, dated=dated, operator=found, view=view)


def _measured(directory: Directory, operator: OperatorSurvey, measure: Measure, patience: Patience) -> Measured:
    if measure is not ROWS:
        return measured(operator.objects, measure)
    known = directory.query_of(operator.name, patience)
    if known is None:
        raise InvalidArgumentError("rows need the query's checkpoint location: name it, too")
    query, name = known
    with query.reading() as stored:
        return directory.rows.measured(stored, name, operator.objects)


def _survey_of(site: Site, place: int) -> tuple[Directory, Dated[Survey], Patience]:
    """Return a directory and what it holds, and what is left of the view's patience."""
    patience = Patience.of_a_view()
    directory = site.directory(place, patience)
    return directory, directory.surveyor.latest(patience), patience


def _asked() -> Asked:
    """Return which rows are asked for; a key's columns are parameters such as ``key.user``."""
    given = request.args
    typed = {name.removeprefix("key."): value for name, value in given.items() if name.startswith("key.")}
    return Asked(
        batch_id=_number("batch", None),
        table=given.get("table"),
        # A form sends empty fields, too: a key begins with one that is not.
        key=typed if any(typed.values()) else {},
        shard=_number("shard", None),
        after=given.get("after"),
        contains=given.get("text", ""),
    )


def _choice(name: str, allowed: Any) -> str:
    """Return a parameter that is one of some values; the first one where it is absent.

    Raises
    ------
    InvalidArgumentError
        It is something else.
    """
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
