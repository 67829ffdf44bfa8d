"""Starts `killed_program`, sees that it is gone, and undoes what it has done."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast import savepoints
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


def has_ended(folder: Path) -> bool:
    """Return whether the program is through with what it was to do."""
    return (folder / killed_program.ENDED).exists()


def undo(folder: Path, what: str) -> None:
    """Remove what the program has made, so that it can be done once more."""
    (folder / killed_program.ENDED).unlink()
    if what == "restore":
        shutil.rmtree(folder / "again")
        shutil.rmtree(folder / "durable-again")
    else:
        savepoints.delete(folder / "savepoints", "one")
