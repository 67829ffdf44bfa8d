"""What holds for every command: operators, hints, errors, options, large directories, S3 and hostile ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from operator import setitem
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from holdfast.cli import _COMMANDS, _SAVEPOINT_COMMANDS, group
from holdfast.commands.inspect import inspect
from holdfast.commands.savepoint import savepoint
from holdfast.errors import HoldfastError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests.fuzz.forge import at, places, take_apart, with_header
from tests.model.shard_history import ShardHistory
from tests.tiers import LONG, cases
from tests.unit.holdfast.commands.conftest import age, document, files, put_record, run
from tests.unit.snapshotter.ownership.conftest import claimant, take, take_after


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        *(("gett", "get"), ("savepiont", "savepoint"), ("exprot", "export"), ("xyzzy", None)),
        *((name, f"savepoint {name}") for name in ("restore", "create")),
    ],
)
def test_a_misspelt_command_is_recognised(given: str, meant: str | None) -> None:
    """The commands are imported when they run, so click does not know their names."""
    refused = run(given, "--json")
    assert refused.exit_code == 2
    assert (f"did you mean {meant!r}?" in refused.output) == (meant is not None)
    assert repr(given) in refused.output


def test_a_command_is_found_beside_savepoints(root: Path) -> None:
    refused = run("savepoint", "clone", root)
    assert refused.exit_code == 2
    assert "no such command: 'clone'; did you mean 'holdfast clone'?" in refused.output
    assert set(savepoint.commands) - set(_COMMANDS) == _SAVEPOINT_COMMANDS


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("get totals user=ann", "give LOCATION OPERATOR COLUMN=VALUE...: the query's checkpointLocation, its operator"),
        ("history /data/app-spark", "Missing argument 'OPERATOR'"),
        ("get /data/app-spark totals user=ann --batch 41x", "'41x' is not a valid whole number"),
        ("log /data/app --shard third", "'third' is not a valid whole number"),
        ("rescale /data/app --checkpoint-location /data/new --shards 4 --rename totals", "--rename takes OLD=NEW"),
        ("rescale /data/app --checkpoint-location /data/new", "Missing option '--shards'"),
    ],
)
def test_a_mistake_in_an_argument_is_said_in_words(command: str, said: str) -> None:
    """What is wrong and what to write instead; nothing is opened."""
    refused = run(*command.split())
    assert said in f"{refused.output}{refused.exception}"


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow(1)
@pytest.mark.parametrize("package", cases(["scipy", "jsonschema"]))
def test_a_bench_without_its_packages_says_which_extra_it_needs(package: str) -> None:
    """Whether they are imported with the command or when they are needed; and the list of all commands goes on."""
    program = (
        f"import sys; sys.modules[{package!r}] = None; from holdfast.cli import main; "
        "sys.argv = ['holdfast', *sys.argv[1:]]; main()"
    )
    done = ran("-c", program, "bench", "compare", ".", ".")
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(r"holdfast: holdfast bench needs packages .*\[bench\]', missing=\S+\n", done.stderr)
    listed = ran("-c", program, "--help")
    assert listed.returncode == 0, listed.stderr
    assert "bench" in listed.stdout


@pytest.mark.slow(1)
def test_commands_where_spark_is_not_on_the_path_say_how_to_put_it_there() -> None:
    """Beside a Spark that pip did not install, only programs that Spark starts find PySpark: no traceback."""
    program = "import sys, holdfast.cli as cli\nsys.modules.update(dict.fromkeys(['pyspark', 'py4j']))\ncli.main()"
    for arguments in (["rescale", "/data/app-spark", "--shards", "2"], ["savepoint", "list", "/data"]):
        done = ran("-c", program, *arguments)
        assert done.returncode == 2, done.stdout + done.stderr
        expected = rf"holdfast: holdfast {arguments[0]} needs PySpark: .*on PYTHONPATH, missing=pyspark\n"
        assert re.fullmatch(expected, done.stderr)
    listed = ran("-c", program, "--help")
    assert listed.returncode == 0
    assert re.search(r"rescale +Not installed: needs pyspark\.", listed.stdout)


def test_one_operator_of_several(root: Path, shard: ShardHistory, storage: ObjectStorage) -> None:
    put_record(storage, "totals2")
    names = [o["operator"] for o in document("inspect", root)["operators"]]
    assert names == ["totals", "totals2"]
    (only,) = document("inspect", root, "--operator", "totals")["operators"]
    assert only["operator"] == "totals"
    refused = run("inspect", root, "--operator", "total").exception
    assert isinstance(refused, NotFoundError)
    assert "no operator of this name: check name and URL; did you mean 'totals'?" in str(refused)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([], "empty or does not exist"),
        (["notes.txt"], "holds no holdfast state; check"),
        (["operator", "shard-0001/commits/1-aa"], "this is the directory of one operator"),
        (["a/b/totals/operator"], "give .*/a/b"),
        (
            ["before/savepoint", "before/operators/totals/state/0"],
            "a directory of savepoints: `holdfast savepoint list`",
        ),
        (["savepoint", "operators/totals/state/0"], "this is a savepoint: `holdfast savepoint show`"),
    ],
)
@pytest.mark.parametrize("command", ["gc", "verify", "log", "inspect"])
def test_a_directory_that_is_none_of_ours_is_refused_with_a_hint(
    root: Path, storage: ObjectStorage, command: str, keys: list[str], said: str
) -> None:
    for key in keys:
        storage.put(key, b"?")
    before = files(root)
    result = run(command, root, *(["--dry-run"] if command == "gc" else []))
    assert isinstance(result.exception, NotFoundError)
    with pytest.raises(NotFoundError, match=said):
        raise result.exception
    assert files(root) == before


@pytest.mark.slow(1)
def test_errors_end_the_program_without_a_traceback(root: Path) -> None:
    """Also where it runs as a module."""
    done = ran("-m", "holdfast", "verify", str(root))
    assert done.returncode == 2
    assert done.stderr.startswith("holdfast: the state directory is empty")
    assert "Traceback" not in done.stderr


@pytest.mark.slow(1)
def test_the_state_directory_is_said_in_one_way() -> None:
    """Whoever has set the variable need not name the directory; benches and the demo make their own below it."""
    found = {}
    for path, command in _all_commands(group):
        if path.split()[0] in {"bench", "demo"}:
            continue
        for option in command.params:
            if "--state-dir" in option.opts:
                found[path] = option.envvar
    assert set(found.values()) == {"HOLDFAST_STATE_DIR"}, found
    assert {"get", "ui", "export", "clone", "rescale", "savepoint create", "savepoint restore"} <= found.keys()


def _all_commands(parent: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(parent)
    for name in parent.list_commands(context):
        command = parent.get_command(context, name)
        assert command is not None
        yield before + name, command
        if isinstance(command, click.Group):
            yield from _all_commands(command, f"{before}{name} ")


@pytest.mark.parametrize(
    ("option", "environment", "said"),
    [("hush-hush", {}, ""), ("anon=true", {"HOLDFAST_STORAGE_OPTIONS": "key=a hush-hush"}, "number=2")],
)
def test_an_option_that_is_none_is_refused_without_being_shown(
    root: Path, shard: ShardHistory, option: str, environment: dict[str, str], said: str
) -> None:
    """Of the variable, which is not on the command line, it says where the word is."""
    result = run("log", root, "--option", option, **environment)
    assert isinstance(result.exception, InvalidArgumentError)
    assert said in str(result.exception)
    assert ("given_by=$HOLDFAST_STORAGE_OPTIONS" in str(result.exception)) == bool(environment)
    assert "hush" not in str(result.exception)


def test_options_add_to_those_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint on the command line hides no credentials; what both name is the command line's."""

    def options(*given: str) -> dict[str, str]:
        found: dict[str, str] = inspect.make_context("inspect", ["/data/app", *given]).params["options"]
        return found

    monkeypatch.delenv("HOLDFAST_STORAGE_OPTIONS", raising=False)
    assert options() == {}
    assert options("--option", "anon=true") == {"anon": "true"}
    monkeypatch.setenv("HOLDFAST_STORAGE_OPTIONS", "key=a  spark.holdfast.storage.secret=b=c endpoint_url=here")
    assert options() == {"key": "a", "secret": "b=c", "endpoint_url": "here"}
    both = options("--option", "spark.holdfast.storage.endpoint_url=there", "--option", "anon=true")
    assert both == {"key": "a", "secret": "b=c", "endpoint_url": "there", "anon": "true"}


@pytest.mark.all
@pytest.mark.slow
def test_ten_thousand_objects_take_seconds(root: Path, shard: ShardHistory, storage: ObjectStorage) -> None:
    name = next(key for key in files(root) if "commits/5-" in key)
    folder = (root / name).parent
    for number in range(10_000):
        os.link(root / name, folder / f"{number % 9 + 1}-{number:016x}")
    age(root)
    began = time.monotonic()
    for command in (["inspect"], ["log"], ["gc", "--dry-run", "--retain", 5]):
        document(command[0], root, *command[1:])
    assert time.monotonic() - began < 20


EVERY = 1 if LONG else 61
COMMANDS = (["inspect", "--shards"], ["log"], ["verify"], ["gc", "--dry-run", "--grace", "0"])
KINDS = ("claims", "commits", "files", "operator", "snapshots")
ANYTHING: tuple[Any, ...] = (
    None, True, -1, 10**30, 1.5, "", "x", "../../etc/passwd", "\u202e\x1b[31m[red]", [], [[]], {}, {"a": {}}, [None, 7]
)  # fmt: skip


@pytest.fixture
def hostile_storage(root: Path) -> Iterator[ObjectStorage]:
    """Return a directory with a shard of four versions, a snapshot and a claim."""
    with open_storage(str(root)) as opened:
        put_record(opened)
        ShardHistory(opened).grow(None, 4, snapshot_every=2)
        take(opened, claimant("query-1"))
        take_after(opened, "r2", "r1", query="query-1")
        yield opened


def run_on(*arguments: object) -> Result:
    return CliRunner().invoke(group, [str(a) for a in arguments])


def require_an_answer(root: Path, what: object) -> None:
    """Run all commands: each ends by itself, or with an error of ours, and shows nothing to the terminal but text."""
    for command in COMMANDS:
        for as_json in ([], ["--json"]):
            result = run_on(command[0], root, *command[1:], *as_json)
            error = result.exception
            assert error is None or isinstance(error, (HoldfastError, SystemExit)), (what, command, repr(error))
            assert "\x1b" not in result.output, (what, command)
            if as_json and result.stdout:
                json.loads(result.stdout)


@pytest.mark.slow
def test_headers_that_say_anything(root: Path, hostile_storage: ObjectStorage) -> None:
    """Each place of each kind of header, with each kind of value."""
    every = {key.split("/")[-2] if "shard" in key else key.split("/")[1]: key for key in files(root)}
    assert sorted(every) == [*KINDS]
    number = 0
    for kind, key in sorted(every.items()):
        before = bytes(hostile_storage.get(key))
        header = take_apart(before).footer["header"]
        for path in places(header):
            for value in ANYTHING:
                number += 1
                if number % EVERY:
                    continue
                hostile = with_header(before, lambda header, p=path, v=value: setitem(at(header, p[:-1]), p[-1], v))
                (root / key).write_bytes(hostile)
                require_an_answer(root, (kind, path, value))
        (root / key).write_bytes(before)
    assert number > 500
    assert run_on("verify", root).exit_code == 0, "all is as it was"


@pytest.mark.slow(0.5)
@pytest.mark.parametrize("kind", KINDS)
def test_objects_of_a_terabyte(root: Path, hostile_storage: ObjectStorage, kind: str) -> None:
    """Nothing is read of what is larger than its kind can be, and ``verify`` says so."""
    folder = next(path for path in root.rglob(kind) if path.is_dir() or kind == "operator")
    planted = max(folder.iterdir()) if folder.is_dir() else folder
    os.truncate(planted, 1 << 40)  # it takes no room on the disk
    require_an_answer(root, kind)  # and what the commands import is no part of what is measured
    tracemalloc.start()
    try:
        results = [run_on(command[0], root, *command[1:]) for command in COMMANDS]
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 << 20
    (verified,) = (result for command, result in zip(COMMANDS, results, strict=True) if command[0] == "verify")
    assert verified.exit_code == 1
    found = json.loads(run_on("verify", root, "--json").stdout)["damages"]
    assert [f"size_bytes={1 << 40}" in damage["problem"] for damage in found] == [True]
    assert str(planted.relative_to(root)) in found[0]["key"]


NAMES = (
    "totals/shard-0003/commits/1-\x1b[31m",
    "totals/shard-9999/commits/99999999999999999999-aa",
    "totals/shard-\u0660\u0660\u0660\u0661/commits/1-aa",
    "totals/shard-999999999/commits/1-aa",
    "totals/shard-0003/snapshots/[red]",
    "totals/claims/99999999999999999999",
    f"totals/claims/beside@{'9' * 17}@r9@@@0123456789abcdef",
    f"totals/claims/beside@{'0' * 17}@..%2F..%2Foperator@@1@0123456789abcdef",
    "totals/claims/\u06600000000000000000001",
    "[bold]/operator",
    "a\\/operator",
    " /x",
)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_that_nobody_would_give(root: Path, hostile_storage: ObjectStorage, name: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(b"?")
    require_an_answer(root, name)


def test_names_and_times_that_only_a_file_system_allows(root: Path, hostile_storage: ObjectStorage) -> None:
    """Bytes that are no UTF-8, and moments that no calendar has."""
    with open(os.fsencode(root) + b"/totals/shard-0003/commits/1-\xff", "wb"):
        pass
    commit = next((root / ShardHistory(hostile_storage).prefix / "commits").iterdir())
    os.utime(commit, (400_000_000_000, 400_000_000_000))
    require_an_answer(root, "names and times")
    result = run_on("gc", root, "--yes", "--grace", "0", "--retain", "1")
    assert result.exception is None or isinstance(result.exception, (HoldfastError, SystemExit))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gc", "--operator", "", "--yes"], "--operator must name"),
        (["inspect", "--operator", ""], "--operator must name"),
        (["inspect", "--operator", "../durable"], ""),
        (["inspect", "--operator", "totals/shard-0003"], ""),
        *((["gc", "--grace", hours, "--yes"], "--grace must be a number") for hours in ("nan", "inf", "1e305")),
    ],
    ids=str,
)
def test_options_that_mean_nothing(root: Path, hostile_storage: ObjectStorage, arguments: list[str], said: str) -> None:
    """They are refused, and delete nothing; above all what a script's empty variable leaves."""
    age(root)
    before = files(root)
    result = run_on(arguments[0], root, *arguments[1:])
    assert isinstance(result.exception, (InvalidArgumentError, NotFoundError))
    assert said in str(result.exception)
    assert files(root) == before


@pytest.mark.parametrize(
    "url", ["", " ", "s3:/bucket", "nothing://x", "s3://", "file:///nowhere/at/all", "\x00"], ids=ascii
)
def test_urls_that_lead_nowhere(url: str) -> None:
    for command in COMMANDS:
        result = run_on(command[0], url, *command[1:])
        assert isinstance(result.exception, HoldfastError), (command, repr(result.exception))


@pytest.mark.parametrize(
    ("key", "needing"),
    [
        ("totals/operator", {"inspect", "verify", "gc"}),
        ("totals/claims/*", {"inspect", "verify", "gc"}),
        ("*/snapshots/*", {"log", "verify", "gc"}),
    ],
)
def test_what_may_not_be_read_is_said(
    root: Path, hostile_storage: ObjectStorage, key: str, needing: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A permission that is missing is no damage: no command judges without what it may not see."""

    def denied() -> InvalidArgumentError:
        return InvalidArgumentError("access denied", key=key)

    def faulty(url: str, options: dict[str, object]) -> ObjectStorage:
        return FaultyStorage(open_storage(url, options), [Fault("fail", "get", key, times=1000, error=denied)])

    monkeypatch.setattr("holdfast.commands.target.open_storage", faulty)
    before = files(root)
    for command in COMMANDS:
        result = run_on(command[0], root, *command[1:])
        assert ("access denied" in str(result.exception)) == (command[0] in needing), command
    assert files(root) == before
