"""Starts `killed_program`, and sees that it is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.spark.application import start_program
from tests.spark.savepoints import killed_program

PROGRAM = Path(killed_program.__file__)


@contextmanager
def application(folder: Path, what: str, settings: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start the program, and give it once it has begun; it is gone after the context."""
    with (folder / "application.log").open("w") as log:
        arguments = (what, json.dumps(settings))
        process = start_program(
            PROGRAM, folder, *arguments, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "BEGIN\n", (folder / "application.log").read_text()[-3000:]
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
