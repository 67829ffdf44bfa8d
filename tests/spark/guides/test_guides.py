"""What README and the guides show to type runs as it is printed, in a world like the one that they speak of.

A run is some blocks of one page, one after the other. Two things differ from what is printed: `/data` is a folder of
the test's, and an S3 server on this machine has the bucket.
"""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.pages import FENCE, ROOT, blocks, shown
from tests.spark.guides import world

if TYPE_CHECKING:
    from tests.servers.s3 import Moto


class Run(NamedTuple):
    """Blocks of a page, by number, counting those in `sh`, `python` and `diff`."""

    page: str
    blocks: tuple[int, ...]
    #: ``query``; ``fresh``, which is the same without the savepoint `before-upgrade`; ``spark``; or ``empty``.
    world: str = "query"
    #: Python that says what the page takes for granted.
    before: str = ""
    #: Python that checks what a changed program shows in its first micro-batch.
    shows: str = "assert {row['user']: row['n'] for row in found[1]} == {'ann': 5, 'dan': 1}, found"


#: The exit status of `holdfast savepoint diff`, as the page says.
DIFFERS = 1
A_QUERY = """
spark.conf.set("spark.holdfast.state.dir", "/data/app")
feed(ROOT, BATCHES, 1)
query = totals_of(events_of(spark, ROOT)).writeStream.outputMode("update").option(
    "checkpointLocation", "/data/app-spark"
).format("noop").start()
query.processAllAvailable()
"""
A_START = """
import threading
spark.conf.set("spark.holdfast.state.dir", "/data/app")
feed(ROOT, BATCHES, 1)
totals = totals_of(events_of(spark, ROOT))

def show(rows, batch):
    assert rows.collect()
    threading.Timer(1, lambda: [query.stop() for query in spark.streams.active]).start()
"""
RUNS = [
    Run("docs/deploy.md", (2,), "fresh", A_QUERY),
    Run("docs/deploy.md", (3, 4)),
    Run("docs/lookups.md", (0,)),
    Run("docs/lookups.md", (1,)),
    Run("docs/metrics.md", (0, 1), before="spark.conf.set('spark.holdfast.metrics.inProgress', 'true')" + A_QUERY),
    Run("docs/migrate.md", (0, 2, 3), "spark"),
    Run("docs/migrate.md", (1,), "spark"),
    Run(
        "docs/migrate.md",
        (4, 5),
        "spark",
        "from tests.spark.guides.world import timed_of\ntimed = timed_of(spark, ROOT)",
        "assert {(row['user'], row['n'], str(row['total'])) for row in found[1]} == "
        "{('ann', 3, '2.50'), ('bob', 1, '1.50')}, found",
    ),
    Run("docs/operations.md", (0,)),
    Run("docs/operations.md", (1,), before=A_QUERY + "query.stop()"),
    Run("docs/operations.md", (2,), before=A_START),
    Run("docs/operations.md", (4,)),
    Run("docs/savepoints.md", (0,), "fresh"),
    Run("docs/savepoints.md", (1,), "fresh"),
    Run("docs/savepoints.md", (2,)),
    Run("docs/savepoints.md", (3,), before="spark.conf.set('spark.holdfast.state.dir', '/data/app')"),
    Run("docs/savepoints.md", (4, 5, 6, 8)),
    Run(
        "docs/savepoints.md",
        (7,),
        "empty",
        "pq.write_table(pa.table({'user': ['ann', 'bob'], 'n': [1, 2]}), 'totals.parquet')\n"
        "spark.conf.set('spark.holdfast.state.dir', '/data/app')",
    ),
    Run("docs/state-tables.md", (0, 1, 2, 3)),
    Run("docs/state-tables.md", (4,)),
]

# What stands on a page and does not run here, and why.
ELSEWHERE = {
    "README.md": {
        "git clone": "there is no public repository yet; tests/packaging builds and installs what is cloned",
        '"""Flights': "tests/spark/programs/test_demo.py",
        "make demo    ": "tests/spark/programs/test_demo.py runs what make demo runs; make test runs this test",
        "make s3": "serves until Ctrl-C; tests/spark/programs/test_demo.py kills S3 under the demo",
    },
    "docs/backends.md": {
        'spark.conf.set("spark.holdfast.backend"': "tests/spark/queries/test_documents.py",
        "from holdfast.backends.base": "tests/test_shown_code.py",
        "import pytest": "tests/test_shown_code.py",
    },
    "docs/deploy.md": {
        "pip install --no-deps": "tests/packaging/test_packaging.py",
        "python -m venv": "needs a cluster: packs an environment for spark-submit",
    },
    "docs/file-sinks.md": {"": "tests/spark/sinks/test_pages.py"},
    "docs/kafka-sink.md": {"": "tests/spark/sinks/test_pages.py"},
    "docs/operations.md": {"pip uninstall": "tests/packaging/test_packaging.py, with a wheel in place of PyPI"},
    "docs/operators.md": {
        "rows_by_key = ": "a line of a function; tests/unit has reductions of one's own",
        "from pathlib import Path": "tests/test_shown_code.py",
        "": "tests/spark/queries/test_documents.py",
    },
    "docs/performance.md": {"holdfast bench": "ten minutes; tests/spark/programs/test_benches.py runs a tiny one"},
    "docs/postgres-sink.md": {"": "tests/spark/sinks/test_pages.py"},
    "docs/sinks.md": {
        "class TestMySink": "tests/contract runs the contract of each sink",
        "": "tests/spark/sinks/test_pages.py",
    },
    "docs/state-schema.md": {"": "tests/spark/queries/test_documents.py"},
    "docs/testing.md": {"": "tests/test_shown_code.py"},
    "docs/transform-with-state.md": {"": "tests/spark/queries/test_documents.py"},
    "docs/tutorial.md": {"": "tests/spark/guides/test_guides.py"},
    "docs/ui.md": {"pip install": "serves until Ctrl-C; tests/spark/page opens it in a browser"},
}


def test_each_block_of_each_page_runs_or_says_why_not() -> None:
    """A command that is added to a page is run, or somebody decides that it cannot be."""
    for page in ["README.md", *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))]:
        run = {number for run in RUNS if run.page == page for number in run.blocks}
        for number, (_, code) in enumerate(shown(page)):
            why = [why for start, why in ELSEWHERE.get(page, {}).items() if code.lstrip().startswith(start)]
            assert (number in run) != bool(why), f"{page}, block {number}:\n{code}"
        assert not [code for language, code in FENCE.findall((ROOT / page).read_text()) if not language], page


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives a world as it was made, each at one place: paths in it stay right."""
    root = tmp_path_factory.mktemp("worlds")

    def world_of(which: str) -> Path:
        folder, kept = root / which, root / f"{which}-as-it-was-made"
        if not kept.exists():
            folder.mkdir()
            program(Path(world.__file__), folder, which, str(folder))
            (folder / "data").rename(kept)
        shutil.rmtree(folder / "data", ignore_errors=True)  # all but local state, which state servers clean up
        shutil.copytree(kept, folder / "data")
        return folder

    return world_of


def program(path: Path, folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    command = [sys.executable, str(path), *arguments]
    variables = {**os.environ, **(environment or {}), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    return done.stdout


@pytest.mark.spark
@pytest.mark.s3
@pytest.mark.all
@pytest.mark.slow(120)
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.page}-{'-'.join(map(str, run.blocks))}")
def test_what_a_page_shows_runs(run: Run, made: Callable[[str], Path], moto: Moto, tmp_path: Path) -> None:
    root = tmp_path if run.world == "empty" else made("spark" if run.world == "spark" else "query")
    if run.world == "fresh":
        shutil.rmtree(root / "data" / "savepoints" / "before-upgrade")
    upload(root, moto)
    environment = moto.environment() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    code: list[str] = []
    for number in run.blocks:
        language, block = shown(run.page)[number]
        block = block.replace("/data/", f"{root}/data/")
        if language == "sh":
            for command in commands(block):
                type_in(command, root, environment, DIFFERS if " savepoint diff " in command else 0)
        else:
            code.append(block if language == "python" else changed(block, run.shows))
    if code:
        before = run.before.replace("/data/", f"{root}/data/")
        (root / "page.py").write_text("\n".join([PRELUDE.format(root=root), before, *code, "spark.stop()\n"]))
        program(root / "page.py", root, environment=environment)


PRELUDE = """
from pathlib import Path
import pandas as pd, pyarrow as pa, pyarrow.compute as pc, pyarrow.parquet as pq
import holdfast
from holdfast import savepoints
from tests.spark.guides.world import BATCHES, count, events_of, feed, session, totals_of

ROOT = Path("{root}")
(ROOT / "data" / "events").mkdir(parents=True, exist_ok=True)
spark = session(ROOT)
events = events_of(spark, ROOT)
"""


def commands(block: str) -> list[str]:
    """Return the commands of a block: in one where prompts tell them from output, those behind prompts."""
    lines = block.replace("\\\n", " ").splitlines()
    prompted = [line[2:] for line in lines if line.startswith("$ ")]
    exports = [line for line in prompted if line.startswith("export ")]
    return [
        "\n".join([*exports, command])
        for command in prompted or lines
        if command.strip() and not command.startswith("export ")
    ]


def type_in(command: str, folder: Path, environment: Mapping[str, str], exits: int) -> None:
    """Run a command as somebody does who sits at a terminal, and says yes."""
    keyboard, terminal = pty.openpty()
    os.write(keyboard, b"y\n")
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, **environment},
        stdin=terminal,
        capture_output=True,
        text=True,
        check=False,
    )
    os.close(keyboard)
    os.close(terminal)
    assert done.returncode == exits, f"{command}\n{done.stdout}{done.stderr[-5000:]}"


def changed(diff: str, shows: str) -> str:
    """Return the program after a change that a page shows, run on what there is to read."""
    lines = [line[1:] for line in diff.splitlines() if not line.startswith("-")]
    kept = "def store(rows, batch):\n    found[batch] = rows.collect()\n\nfound = {}\nfeed(ROOT, 3, 1)\n"
    return "\n".join([kept, *lines, "query.processAllAvailable()", shows])


def upload(root: Path, moto: Moto) -> None:
    """Give the bucket what the pages say is there: the same query, its location and its savepoints."""
    with moto.client() as client:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket="bucket"):
            for found in page.get("Contents", ()):
                client.delete_object(Bucket="bucket", Key=found["Key"])
        for local, prefix in (("app", "app"), ("app-spark", "queries/totals"), ("savepoints", "savepoints")):
            folder = root / "data" / local
            if (root / "data" / "app").is_dir():
                for path in (path for path in folder.rglob("*") if path.is_file()):
                    client.upload_file(str(path), "bucket", f"{prefix}/{path.relative_to(folder).as_posix()}")


PAGE = "docs/tutorial.md"
LIMIT_S = 180


@contextmanager
def running(program: str, folder: Path, ends_by: signal.Signals) -> Iterator[Path]:
    """Run `counts.py` until it has served; give the file with what it prints."""
    (folder / "counts.py").write_text(program)
    printed = folder / "printed.txt"
    with printed.open("w") as out, (folder / "log.txt").open("a") as log:
        process = subprocess.Popen([sys.executable, "counts.py"], cwd=folder, stdout=out, stderr=log)
        try:
            yield printed
            assert process.poll() is None, (folder / "log.txt").read_text()[-5000:]
        finally:
            process.send_signal(ends_by)
            process.wait(timeout=60)


def newest_of_user_0(printed: Path, at_least: int = 1) -> list[int]:
    """Return user 0's newest row, once its count has come so far."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        rows = re.findall(r"^\| +0\|([ \d|]+)\|$", printed.read_text(), re.MULTILINE)
        if rows and int(rows[-1].split("|")[0]) >= at_least:
            return [int(cell) for cell in rows[-1].split("|")]
        time.sleep(0.2)
    raise AssertionError(printed.read_text())


@pytest.mark.spark
@pytest.mark.all
@pytest.mark.slow(120)
@pytest.mark.timeout(900)
def test_the_tutorial_is_true(java_home: Path, tmp_path: Path) -> None:
    """No number is lost or counted twice by a kill, an upgrade and a restore, and each command does what it says."""
    program, upgrade = (block.replace("/tmp/tutorial", str(tmp_path)) for block in blocks(PAGE, "python"))
    shown = "\n".join(blocks(PAGE, "sh")).replace("\\\n", " ").replace("/tmp/tutorial", str(tmp_path))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def type_in(beginning: str) -> str:
        (command,) = [line for line in shown.splitlines() if re.sub(" +", " ", line).startswith(beginning)]
        done = subprocess.run(
            ["bash", "-c", command], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    with running(program, tmp_path, signal.SIGKILL) as printed:
        (before,) = newest_of_user_0(printed, 5)
        assert "counts" in type_in("holdfast inspect")
        assert "state:" in type_in("holdfast get")
        assert type_in("holdfast history")
    with running(program, tmp_path, signal.SIGINT) as printed:
        newest_of_user_0(printed, before + 1)
        type_in("holdfast savepoint create")
        assert "counts" in type_in("holdfast savepoint show")
    old_line = re.search(r"^counts = .*\n", program, re.MULTILINE)
    assert old_line
    with running(program.replace(old_line[0], upgrade), tmp_path, signal.SIGINT) as printed:
        upgraded, newest = newest_of_user_0(printed, before + 2)
        assert upgraded == newest // 3 + 1
    told = type_in("holdfast savepoint restore")
    restored = program.replace(f"{tmp_path}/app", f"{tmp_path}/app-2").replace(
        f"{tmp_path}/spark", f"{tmp_path}/spark-2"
    )
    assert f"{tmp_path}/app-2" in told
    assert f"{tmp_path}/spark-2" in told
    with running(restored, tmp_path, signal.SIGINT) as printed:
        (again,) = newest_of_user_0(printed, before + 1)
        assert again > before
