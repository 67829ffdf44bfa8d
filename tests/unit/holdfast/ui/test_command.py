"""``holdfast ui`` from the command line: how it starts and ends, and what it says where it cannot."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from holdfast.snapshotter.storage.opening import open_storage
from tests.unit.holdfast.commands.state_dir import put_record, run


def said(*arguments: object) -> str:
    """Return the error that a command ends with."""
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
    """A token cannot be guessed from another one."""
    monkeypatch.setattr("waitress.server.BaseWSGIServer.run", lambda _server: None)
    tokens = set()
    for _ in range(3):
        tokens.add(run("ui", sample, "--port", "0").stdout.split("/")[3])
    assert len(tokens) == 3
    assert all(len(token) == 32 for token in tokens)


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    """Before it serves, it says what is wrong with a location."""
    (tmp_path / "file").write_text("hello")
    assert "holds no holdfast state" in said(tmp_path)
    assert "this is a file: give a directory" in said(tmp_path / "file")


def test_the_location_of_a_query_alone(tmp_path: Path) -> None:
    """Before its first commit nothing tells where its state is: the error says what to name."""
    (tmp_path / "metadata").write_text(json.dumps({"id": "0f1e2d3c-0000-4000-8000-000000000001"}))
    assert "nothing tells its state directory: name the state directory with --state-dir" in said(tmp_path)


def test_a_port_that_is_taken(sample: Path) -> None:
    """It says which, and how to choose another."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = said(sample, "--port", port)
    assert f"port={port}" in text
    assert "choose one with --port" in text


def test_an_address_that_this_machine_does_not_have(sample: Path) -> None:
    """It cannot listen there, and says so."""
    assert "cannot listen there" in said(sample, "--host", "192.0.2.1", "--port", "0")


def test_a_directory_that_may_not_be_read(sample: Path, tmp_path: Path) -> None:
    """Denied access is an error of its own, not an empty directory."""
    with open_storage(str(tmp_path / "state")) as storage:
        put_record(storage)
    if os.getuid() == 0:
        pytest.skip("root may read everything")
    (tmp_path / "state").chmod(0)
    try:
        assert "denied" in said(tmp_path / "state").lower()
    finally:
        (tmp_path / "state").chmod(0o700)


def test_a_newer_format_is_named(tmp_path: Path, open_page: object) -> None:
    """A record of a later release is not damage: the page says which version it has."""
    with open_storage(str(tmp_path)) as storage:
        put_record(storage)
    record = tmp_path / "totals/operator"
    data = bytearray(record.read_bytes())
    data[-26:-24] = (9).to_bytes(2, "little")
    record.write_bytes(data)
    shown = open_page(tmp_path).get("/0123456789abcdef/0/totals/").text  # type: ignore[operator]
    assert "version" in shown
    assert "9" in shown


def test_secrets_are_not_shown(sample: Path) -> None:
    """An option that is no NAME=VALUE may be a secret: it is not repeated."""
    assert "hunter2" not in said(sample, "--option", "hunter2")
