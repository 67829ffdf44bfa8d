"""The page as a server: how it starts, who is answered, which queries it finds, and what it says of damage."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from holdfast.errors import CorruptionError, HoldfastError, NotFoundError, UnavailableError
from holdfast.snapshotter.ownership.queries import NotedLocation, note_location
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.client.connection import over_executors
from holdfast.spark_integration.client.messages import RecentBatch
from holdfast.spark_integration.spark_state.query_location import LoggedTimes
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from holdfast.ui import inquiry
from holdfast.ui.app import make_app, trusted_hosts
from holdfast.ui.inquiry import Inquiry, Patience
from holdfast.ui.overview import overview
from holdfast.ui.site import BATCHES_MAX, Directory, Site
from tests.damage import flip
from tests.model.shard_history import ShardHistory
from tests.servers.programs import wait_until
from tests.unit.holdfast.commands.conftest import put_record, run
from tests.unit.holdfast.ui.conftest import no_batches
from tests.unit.holdfast.ui.places import TOKEN, SiteOf, Stored, directory, location, opened


@pytest.mark.usefixtures("at_once")
def test_a_directory_that_does_not_answer_hides_no_other(tmp_path: Path, site_of: SiteOf) -> None:
    """A query belongs where its state is, whatever another directory says; where none has it, the page says why."""
    gone = directory(tmp_path / "other", "other")
    places = [location(tmp_path / "query"), gone, directory(tmp_path / "state")]
    stored = Stored()
    site = site_of(places, lambda _query, _home: stored)
    gone.faults.append(Fault("fail", action="get", key="totals/operator", times=None))
    assert [len(one.queries) for one in site.look()[0]] == [0, 1]
    assert site.awaited() == []
    alone = site_of([places[0], gone], lambda _query, _home: stored)
    assert [one.what for one in alone.awaited()] == [str(UnavailableError("injected fault"))]
    assert alone.directory(1).queries == ()
    gone.faults.clear()
    assert "has the operator totals" in alone.awaited()[0].what


@pytest.mark.usefixtures("at_once")
def test_a_query_that_cannot_be_read_hides_no_other(tmp_path: Path, site_of: SiteOf) -> None:
    """Of two queries in one directory one is damaged: rows of the other's operators are still found."""
    state = directory(tmp_path / "state")
    put_record(state, "sessions")
    broken, whole = Stored(), Stored({"sessions": "query-1"})
    queries = [broken, whole]
    places = [location(tmp_path / "one"), location(tmp_path / "two"), state]
    site = site_of(places, lambda query, _home: queries[query.place])
    home = site.directory(2)
    broken.error, broken.batch_id = CorruptionError("its log is damaged"), 1
    found = home.query_of("sessions", Patience.of_a_view())
    assert found is not None
    with found[0].reading() as stored:
        assert (stored, found[1]) == (whole, "sessions")
    found = home.query_of("totals", Patience.of_a_view())  # as its pointers said last; whoever reads it sees the error
    assert found is not None
    with found[0].reading() as stored:
        assert stored is broken
    with pytest.raises(CorruptionError):
        home.query_of("unknown", Patience.of_a_view())


@pytest.mark.usefixtures("at_once")
def test_a_query_without_its_commits_is_told(tmp_path: Path, site_of: SiteOf) -> None:
    """Whoever deletes them, to run micro-batches again, may look on: the page says what it waits for."""
    stored = Stored()
    site = site_of([location(tmp_path / "query"), directory(tmp_path / "state")], lambda _query, _home: stored)
    page = make_app(site, TOKEN, ["localhost"]).test_client()
    assert "Table of queries" in page.get(f"/{TOKEN}/").text
    stored.log = [LoggedTimes(5, 1_000, None)]
    wait_until(lambda: "Micro-batch 5 is running or has failed" in page.get(f"/{TOKEN}/").text, list)


@pytest.mark.usefixtures("at_once")
def test_a_location_that_is_begun_again(tmp_path: Path, site_of: SiteOf) -> None:
    """A checkpoint location that was deleted is empty; the next query there is read anew, and the one before closed."""
    opened: list[Stored] = []

    def join(_query: Directory, _home: Directory) -> Stored:
        opened.append(Stored())
        return opened[-1]

    site = site_of([location(tmp_path / "query"), directory(tmp_path / "state")], join)
    first = site.directory(1).queries[0]
    assert site.directory(1).queries[0] is first
    with first.reading():
        (tmp_path / "query/metadata").unlink()
        wait_until(lambda: ["Empty" in one.what for one in site.awaited()] == [True], list)
        assert not opened[0].is_closed.is_set()
    assert opened[0].is_closed.wait(10)
    with pytest.raises(NotFoundError, match="was deleted"), first.reading():
        pass
    location(tmp_path / "query", "query-2")
    second = site.directory(1).queries[0]
    location(tmp_path / "query", "query-3")
    wait_until(lambda: site.directory(1).queries[0] is not second, list)
    assert opened[1].is_closed.wait(10)
    assert len(opened) == 3
    assert not opened[2].is_closed.is_set()
    site.close()
    assert opened[2].is_closed.wait(10)


@pytest.mark.usefixtures("at_once")
def test_a_directory_may_become_a_query(tmp_path: Path, site_of: SiteOf) -> None:
    """What was a directory when it was listed last is what it is now."""
    site = site_of([directory(tmp_path / "a", "a"), directory(tmp_path / "state")], lambda _query, _home: Stored())
    assert len(overview(site, 0).directories) == 2
    shutil.rmtree(tmp_path / "a")
    location(tmp_path / "a")
    overview(site, 0)  # lists it
    assert [one.place for one in overview(site, 0).directories] == [1]
    assert [len(one.queries) for one in site.look()[0]] == [1]


def test_some_noted_locations_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Side by side, each takes some requests; a directory may note more than a page should wait for."""
    with open_storage(str(tmp_path / "state")) as storage:
        for number in range(20):
            put_record(storage, f"op-{number}", query=f"query-{number}")
            location(tmp_path / f"at-{number}", f"query-{number}")
            note = NotedLocation(f"query-{number}", f"query-{number}", str(tmp_path / f"at-{number}"), "host")
            note_location(storage, note)
    looked: list[str] = []
    several = threading.Event()

    def agrees(noted: NotedLocation, *_: object) -> str:
        looked.append(noted.location)
        if len(looked) == 8:
            several.set()
        assert several.wait(10)
        return noted.location

    monkeypatch.setattr("holdfast.ui.site.location_of", agrees)
    with opened(tmp_path / "state") as page:
        assert len(looked) < 16
        assert page.get(f"/{TOKEN}/").status_code == 200


@pytest.mark.usefixtures("at_once")
def test_what_a_view_costs(tmp_path: Path, site_of: SiteOf) -> None:
    """No directory is listed but the one that is looked at; pointers are read once a micro-batch, for all of them."""
    homes = [directory(tmp_path / f"state-{n}", f"operator-{n}") for n in range(4)]
    stored = Stored()
    site = site_of([location(tmp_path / "query"), *homes], lambda _query, _home: stored)
    for home in homes:
        home.operations.clear()
    site.directory(1).surveyor.latest()
    listed = [sum(one.action == "list" for one in home.operations) for home in homes]
    assert listed == [1, 0, 0, 0]
    overview(site, 0)
    assert stored.reads == 1
    stored.batch_id = 1
    overview(site, 0)
    assert stored.reads == 2


@pytest.mark.usefixtures("at_once")
@pytest.mark.slow(1)
def test_slow_places_are_awaited_together(tmp_path: Path, site_of: SiteOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that hangs holds each view up for a moment, however many empty places lie there."""
    monkeypatch.setattr(inquiry, "PATIENCE_S", 1)
    answered = threading.Event()
    slow = [FaultyStorage(open_storage(str(tmp_path / f"empty-{n}"))) for n in range(8)]
    site = site_of([*slow, directory(tmp_path / "state")], lambda _query, _home: Stored())
    for one in slow:
        one.faults.append(Fault("delay", times=None, wait=answered.wait))
    begun = time.monotonic()
    try:
        assert site.directory(8).place == 8
        assert time.monotonic() - begun < 5
        for one in slow:
            one.assert_all_hit()
    finally:
        answered.set()


PATHS = ("", "0/totals/", "0/totals/shard/3", "0/totals/upkeep", "static/page.css", "nowhere")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("token", ["x", TOKEN[:-1], TOKEN + "0", TOKEN.upper(), "%F0%9F%90%8D"])
def test_without_the_token_there_is_nothing(page: FlaskClient, token: str, path: str) -> None:
    answer = page.get(f"/{token}/{path}")
    assert answer.status_code == 404
    assert answer.text == page.get(f"/no/{path}").text
    assert "totals" not in answer.text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:4880", "localhost.evil.example", "127.0.0.2", ""])
def test_another_host_is_refused(page: FlaskClient, host: str) -> None:
    """A site whose name is pointed at this machine reads nothing, even with the token."""
    answer = page.get(f"/{TOKEN}/", headers={"Host": host})
    assert answer.status_code == 400
    assert "totals" not in answer.text


def test_the_hosts_are_those_that_it_listens_on() -> None:
    """Its own names are trusted, with those that are given; everywhere means this machine's names, not any."""
    assert trusted_hosts("127.0.0.1") == ["127.0.0.1", "[::1]", "localhost"]
    assert "[fe80::1]" in trusted_hosts("fe80::1")
    assert "state.example" in trusted_hosts("127.0.0.1", ["state.example"])
    assert "0.0.0.0" not in trusted_hosts("0.0.0.0")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "TRACE"])
def test_nothing_but_reading_is_answered(page: FlaskClient, method: str) -> None:
    assert page.open(f"/{TOKEN}/", method=method).status_code == 405


@pytest.mark.parametrize("path", PATHS)
def test_a_browser_loads_nothing_from_elsewhere(page: FlaskClient, path: str) -> None:
    answer = page.get(f"/{TOKEN}/{path}", buffered=True)
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "Set-Cookie" not in answer.headers
    if answer.content_type.startswith("text/html"):
        assert " style=" not in answer.text
        assert "<style" not in answer.text
        assert answer.text.count("<script") == 1
        assert " onclick" not in answer.text


def test_no_file_outside_of_its_folder_is_served(page: FlaskClient) -> None:
    for path in ("../app.py", "..%2fapp.py", "/etc/passwd", "%2e%2e/app.py"):
        assert page.get(f"/{TOKEN}/static/{path}").status_code == 404


def said(*arguments: object) -> str:
    result = run("ui", *arguments)
    assert result.exit_code != 0
    return str(result.exception) + result.output


@pytest.mark.slow(6)
def test_it_serves_until_it_is_interrupted(sample: Path) -> None:
    """It prints its address, on this machine alone, answers there and nowhere else, and ends by Ctrl-C."""
    # A shell that starts `make test &` has its processes ignore Ctrl-C.
    main = "import signal; signal.signal(2, signal.default_int_handler); from holdfast.cli import main; main()"
    command = [sys.executable, "-c", main, "ui", str(sample), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(address) as answer:
                assert b"totals" in answer.read()
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(address.rsplit("/", 2)[0] + "/")
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0
        finally:
            process.kill()


def test_each_start_has_a_token_of_its_own(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waitress.server.BaseWSGIServer.run", lambda _server: None)
    tokens = set()
    for _ in range(3):
        tokens.add(run("ui", sample, "--port", "0").stdout.split("/")[3])
    assert len(tokens) == 3
    assert all(len(token) == 32 for token in tokens)


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    assert "holds no holdfast state" in said(tmp_path)
    assert "this is a file: give a directory" in said(tmp_path / "file")


def test_the_location_of_a_query_alone(tmp_path: Path) -> None:
    """Before its first commit nothing tells where its state is: the error says what to name."""
    (tmp_path / "metadata").write_text(json.dumps({"id": "0f1e2d3c-0000-4000-8000-000000000001"}))
    assert "its state directory is unknown: name the state directory with --state-dir" in said(tmp_path)


def test_a_port_that_is_taken(sample: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = said(sample, "--port", port)
    assert f"port={port}" in text
    assert "choose another with --port" in text


def test_an_address_that_this_machine_does_not_have(sample: Path) -> None:
    assert "cannot listen on that address" in said(sample, "--host", "192.0.2.1", "--port", "0")


def test_a_directory_that_may_not_be_read(sample: Path, tmp_path: Path) -> None:
    """Denied access is an error of its own, not an empty directory."""
    directory(tmp_path / "state")
    if os.getuid() == 0:
        pytest.skip("root may read everything")
    (tmp_path / "state").chmod(0)
    try:
        assert "denied" in said(tmp_path / "state").lower()
    finally:
        (tmp_path / "state").chmod(0o700)


def test_a_newer_format_is_named(tmp_path: Path, open_page: object) -> None:
    directory(tmp_path)
    record = tmp_path / "totals/operator"
    data = bytearray(record.read_bytes())
    data[-26:-24] = (9).to_bytes(2, "little")
    record.write_bytes(data)
    shown = open_page(tmp_path).get(f"/{TOKEN}/0/totals/").text  # type: ignore[operator]
    assert "version" in shown
    assert "9" in shown


def test_secrets_are_not_shown(sample: Path) -> None:
    """An option that is no NAME=VALUE may be a secret: it is not repeated."""
    assert "hunter2" not in said(sample, "--option", "hunter2")


def batch(number: int, query: str = "q", **values: int) -> RecentBatch:
    return RecentBatch(query, "totals", number, 1_000 * number, 2, values)


def test_executors_are_added_up_and_lags_are_not() -> None:
    """Rows of all executors count; the largest lag is the operator's."""
    found = over_executors(
        [
            batch(7, rows=10, snapshot_lag_versions=3),
            batch(7, rows=5, snapshot_lag_versions=9, commit_us=1_500),
            batch(8, rows=1),
        ]
    )
    assert [(one.batch_id, one.shards, one.values["rows"]) for one in found] == [(8, 2, 1), (7, 4, 15)]
    assert found[1].values["snapshot_lag_versions"] == 9
    assert found[1].ms("commit") == 1.5


def test_an_operators_last_batches_are_shown() -> None:
    """Neither another query's nor another operator's."""
    told = [*(batch(n) for n in range(100)), batch(100, query="another")]
    with ThreadPoolExecutor(1) as surveys:
        site = Site((), Inquiry(lambda: told, surveys, "this machine"))
        found = site.batches_of("q", "totals", Patience.of_a_view())
        assert site.batches_of("q", "other", Patience.of_a_view()) == []
    assert [one.batch_id for one in found] == list(range(99, 99 - BATCHES_MAX, -1))


def test_a_server_that_hangs_holds_up_no_page() -> None:
    """A view has patience for all of its stores together, state servers included."""
    answers = threading.Event()

    def read() -> list[RecentBatch]:
        answers.wait()
        return [batch(7)]

    with ThreadPoolExecutor(1) as surveys:
        site = Site((), Inquiry(read, surveys, "this machine"))
        at_first = site.batches(Patience(0.01))
        answers.set()
        assert (at_first, site.batches(Patience(None))) == ([], [batch(7)])


VIEWS = ("", "0/totals/", "0/totals/?measure=lag", "0/totals/shard/3", "0/totals/rows", "0/totals/upkeep")
VERIFY = "0/totals/upkeep?check=verify"

Damage = Callable[[Path], object]


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def change_a_byte(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with one shard: four versions and two snapshots."""
    root = tmp_path_factory.mktemp("hostile") / "state"
    with open_storage(str(root)) as storage:
        put_record(storage)
        ShardHistory(storage).grow(None, 4, snapshot_every=2)
    return root


def files(root: Path) -> Iterator[Path]:
    return (path for path in sorted(root.rglob("*")) if path.is_file())


def require_answers(page: FlaskClient, what: object) -> None:
    """Open all views: each is a page, and where it is an error, one that says so."""
    for view in (*VIEWS, VERIFY):
        answer = page.get(f"/{TOKEN}/{view}")
        assert answer.content_type.startswith("text/html"), (what, view, answer.text)
        assert answer.status_code == 200 or "Cannot show this" in answer.text, (what, view)


@pytest.mark.all
@pytest.mark.slow(8)
@pytest.mark.parametrize("damage", [Path.unlink, cut_off, change_a_byte, empty, make_a_folder])
def test_each_object_may_be_damaged(
    open_page: Callable[..., FlaskClient], whole: Path, tmp_path: Path, damage: Damage
) -> None:
    """Whatever is missing or damaged, the page answers."""
    for place, victim in enumerate(files(whole)):
        root = shutil.copytree(whole, tmp_path / str(place))
        damage(root / victim.relative_to(whole))
        require_answers(open_page(root), (damage, victim.name))


@pytest.mark.slow(1)
def test_what_a_view_names_may_be_gone(open_page: Callable[..., FlaskClient], whole: Path, tmp_path: Path) -> None:
    """The listing that is shown is older than the directory: links lead to less than it says, and to no failure."""
    root = shutil.copytree(whole, tmp_path / "state")
    page = open_page(root)
    assert page.get(f"/{TOKEN}/").status_code == 200
    for victim in reversed(list(files(root))):
        victim.unlink()
        require_answers(page, victim.name)


def test_a_directory_of_foreign_files(tmp_path: Path) -> None:
    for name in (
        "totals/shard-0003/commits/17-xyz",
        "totals/shard-00003/commits/1-aa",
        "operator",
        "a/b/operator",
        "-",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"\x00" * 100)
    with open_storage(str(tmp_path)) as storage, ThreadPoolExecutor(8) as threads:
        site = Site([Directory.of(0, storage, threads, threads)], no_batches(threads))
        answer = make_app(site, TOKEN, ["localhost"]).test_client().get(f"/{TOKEN}/")
    assert answer.status_code == 200
    assert "holds no holdfast state" in answer.text
    with pytest.raises(HoldfastError), opened(tmp_path):
        pass


@pytest.mark.parametrize("text", [b"[" * 60_000, b'{"id":' * 10_000, b'{"id": ' + b"9" * 5_000 + b"}", b"\x00", b"[]"])
def test_a_file_that_looks_like_a_querys_makes_no_directory_one(whole: Path, tmp_path: Path, text: bytes) -> None:
    """Whatever stands under the name by which queries are told apart, the page starts, and shows the directory."""
    root = shutil.copytree(whole, tmp_path / "state")
    (root / "metadata").write_bytes(text)
    with opened(root) as page:
        assert "totals" in page.get(f"/{TOKEN}/").text
