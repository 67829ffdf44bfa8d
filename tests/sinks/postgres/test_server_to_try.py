"""What ``make postgres`` starts."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

pytestmark = pytest.mark.postgres


def test_its_password_can_be_typed() -> None:
    """The tests' own looks like a secret that got out, and has to be quoted."""
    command = [sys.executable, "-m", "tests.servers", "postgres"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as server:
        try:
            assert server.stdout is not None
            given = dict(pair.split("=", 1) for pair in shlex.split(server.stdout.readline())[1:])
            assert given["PGPASSWORD"] == "holdfast"
            options = {name.removeprefix("PG").lower(): value for name, value in given.items()}
            with psycopg.connect(dbname=options.pop("database"), **options) as connection:
                assert connection.execute("SELECT 1").fetchone() == (1,)
        finally:
            server.terminate()
