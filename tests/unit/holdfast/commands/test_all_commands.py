"""What holds for every command: one operator, hints, errors, options, large directories, S3."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from holdfast.cli import group
from holdfast.commands.inspect import inspect
from holdfast.errors import InvalidArgumentError, NotFoundError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from tests.model.shard_history import ShardHistory
from tests.tiers import cases
from tests.unit.holdfast.commands.state_dir import age, document, files, put_record, run


@pytest.mark.parametrize(
    ("given", "meant"), [("gett", "get"), ("savepiont", "savepoint"), ("exprot", "export"), ("xyzzy", None)]
)
def test_a_misspelt_command_is_recognised(given: str, meant: str | None) -> None:
    """The commands are imported when they run, so click does not know their names."""
    refused = run(given, "--json")
    assert refused.exit_code == 2
    assert (f"did you mean {meant!r}?" in refused.output) == (meant is not None)
    assert repr(given) in refused.output


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


@pytest.mark.slow(1)
@pytest.mark.parametrize("package", cases(["scipy", "jsonschema"]))
def test_a_bench_without_its_packages_says_which_extra_it_needs(package: str) -> None:
    """Whether they are imported with the command or when they are needed; and the list of all commands goes on."""
    program = (
        f"import sys; sys.modules[{package!r}] = None; from holdfast.cli import main; "
        "sys.argv = ['holdfast', *sys.argv[1:]]; main()"
    )

    def said(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)

    done = said("bench", "compare", ".", ".")
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(r"holdfast: holdfast bench needs packages .*\[bench\]', missing=\S+\n", done.stderr)
    listed = said("--help")
    assert listed.returncode == 0, listed.stderr
    assert "bench" in listed.stdout


@pytest.mark.slow(1)
def test_commands_where_spark_is_not_on_the_path_say_how_to_put_it_there() -> None:
    """Beside a Spark that pip did not install, only programs that Spark starts find PySpark: no traceback."""
    program = "import sys, holdfast.cli as cli\nsys.modules.update(dict.fromkeys(['pyspark', 'py4j']))\ncli.main()"
    for arguments in (["rescale", "/data/app-spark", "--shards", "2"], ["savepoint", "list", "/data"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2, done.stdout + done.stderr
        expected = rf"holdfast: holdfast {arguments[0]} needs PySpark: .*on PYTHONPATH, missing=pyspark\n"
        assert re.fullmatch(expected, done.stderr)
    listed = subprocess.run(
        [sys.executable, "-c", program, "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert listed.returncode == 0
    assert re.search(r"rescale +Not installed: needs pyspark\.", listed.stdout)


def test_one_operator_of_several(root: Path, shard: ShardHistory, storage: ObjectStorage) -> None:
    """Also where the name of one begins another's."""
    put_record(storage, "totals2")
    names = [o["operator"] for o in document("inspect", root)["operators"]]
    assert names == ["totals", "totals2"]
    (only,) = document("inspect", root, "--operator", "totals")["operators"]
    assert only["operator"] == "totals"
    refused = run("inspect", root, "--operator", "total").exception
    assert isinstance(refused, NotFoundError)
    assert "no operator of this name: check name and URL; did you mean 'totals'?" in str(refused)
    assert shard


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([], "empty or does not exist"),
        (["notes.txt"], "holds no holdfast state; check"),
        (["operator", "shard-0001/commits/1-aa"], "this is the directory of one operator"),
        (["a/b/totals/operator"], "give .*/a/b"),
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
    script = "from holdfast.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "verify", str(root)], capture_output=True, text=True, check=False
    )
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


def test_an_option_that_is_none_is_refused_without_being_shown(root: Path, shard: ShardHistory) -> None:
    result = run("log", root, "--option", "hush-hush")
    assert isinstance(result.exception, InvalidArgumentError)
    assert "hush" not in str(result.exception)
    assert shard


def test_a_word_of_the_variable_that_is_none_is_refused_without_being_shown(root: Path, shard: ShardHistory) -> None:
    """It says where the word is, which is not on the command line."""
    result = run("log", root, "--option", "anon=true", HOLDFAST_STORAGE_OPTIONS="key=a hush-hush")
    assert isinstance(result.exception, InvalidArgumentError)
    assert "given_by=$HOLDFAST_STORAGE_OPTIONS number=2" in str(result.exception).replace(",", "")
    assert "hush" not in str(result.exception)
    assert shard


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
    assert options("--option", "spark.holdfast.storage.endpoint_url=there", "--option", "anon=true") == {
        "key": "a",
        "secret": "b=c",
        "endpoint_url": "there",
        "anon": "true",
    }


@pytest.mark.all
@pytest.mark.slow
def test_ten_thousand_objects_take_seconds(root: Path, shard: ShardHistory, storage: ObjectStorage) -> None:
    """Attempts of a shard that was restarted over and over; nothing is read but what decides."""
    name = next(key for key in files(root) if "commits/5-" in key)
    folder = (root / name).parent
    for number in range(10_000):
        os.link(root / name, folder / f"{number % 9 + 1}-{number:016x}")
    age(root)
    began = time.monotonic()
    for command in (["inspect"], ["log"], ["gc", "--dry-run", "--retain", 5]):
        document(command[0], root, *command[1:])
    assert time.monotonic() - began < 20
    assert shard
    assert storage
