"""Which Java Spark runs on, and which Python its workers do."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import threading
import venv
from pathlib import Path

import pytest

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration import java
from holdfast.spark_integration.worker_python import problem_of


def fake_java(home: Path, version: str, *, knows_module: bool = True) -> Path:
    """Make a home whose java answers like a real one of `version`."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    refuse = "" if knows_module else f'case " $* " in *" {java.INCUBATOR_ARGUMENT} "*) exit 1;; esac\n'
    program.write_text(
        f"#!/bin/sh\n{refuse}echo '    java.home = {home}' >&2\necho '    java.specification.version = {version}' >&2\n"
    )
    program.chmod(0o700)
    return home


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Hide every Java, the one of the package included, and return a scratch folder."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("JAVA_HOME", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(java, "_java_of_package", lambda: None)
    return tmp_path


def test_java_home_wins_when_spark_supports_it(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, on_path = fake_java(bare / "named", "17"), fake_java(bare / "on path", "21")
    monkeypatch.setenv("JAVA_HOME", str(named))
    monkeypatch.setenv("PATH", str(on_path / "bin"))
    assert java.ensure_java() == named


@pytest.mark.parametrize("version", ["1.8", "11", "19", "99"])
def test_another_version_is_passed_over(bare: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    on_path = fake_java(bare / "on-path", "21")
    monkeypatch.setenv("JAVA_HOME", str(fake_java(bare / "named", version)))
    monkeypatch.setenv("PATH", str(on_path / "bin"))
    assert java.ensure_java() == on_path
    assert os.environ["JAVA_HOME"] == str(on_path)


def test_a_runtime_that_cannot_start_like_spark_is_passed(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fake_java(bare / "small", "21", knows_module=False) / "bin"))
    with pytest.raises(InvalidArgumentError, match="does not start with --add-modules"):
        java.ensure_java()


def test_without_any_java_the_error_says_what_to_do(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(bare / "gone"))
    with pytest.raises(InvalidArgumentError, match=r"install Java 17 or 21.*holdfast-spark\[java\].*has no bin/java"):
        java.ensure_java()
    assert os.environ["JAVA_HOME"] == str(bare / "gone")


def runtime_that_prints_arguments(folder: Path) -> Path:
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\nfor argument do echo "<$argument>"; done\n')
    program.chmod(0o700)
    (folder / "lib").mkdir()
    (folder / "bin" / "jcmd").touch()
    return folder


def test_wrapper_drops_one_argument_and_keeps_the_others_as_they_are(tmp_path: Path) -> None:
    home = java.wrapped_home(runtime_that_prints_arguments(tmp_path / "it's a runtime"), tmp_path / "cache")
    arguments = ["-cp", "a b:*", java.INCUBATOR_ARGUMENT, "", "--add-modules=other", "$HOME", "two\nlines", "-n"]
    done = subprocess.run([home / "bin" / "java", *arguments], capture_output=True, text=True, check=True)
    kept = [a for a in arguments if a != java.INCUBATOR_ARGUMENT]
    assert done.stdout == "".join(f"<{a}>\n" for a in kept)


def test_wrapper_is_private_complete_and_made_once(tmp_path: Path) -> None:
    """For each runtime, and again where it was half cleaned away."""
    runtime = runtime_that_prints_arguments(tmp_path / "runtime")
    home = java.wrapped_home(runtime, tmp_path / "cache")
    made = (home / "bin" / "java").stat()
    assert java.wrapped_home(runtime, tmp_path / "cache") == home
    assert (home / "bin" / "java").stat().st_ino == made.st_ino
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert stat.S_IMODE(home.parent.stat().st_mode) == 0o700
    assert (home / "lib").resolve() == runtime / "lib"
    assert (home / "bin" / "jcmd").resolve() == runtime / "bin" / "jcmd"
    assert [entry.name for entry in home.parent.iterdir()] == [home.name]
    assert java.wrapped_home(runtime_that_prints_arguments(tmp_path / "other"), tmp_path / "cache") != home
    shutil.rmtree(home / "bin")
    assert java.wrapped_home(runtime, tmp_path / "cache") == home
    assert (home / "bin" / "java").exists()


def test_wrapper_made_by_several_at_a_time_is_one(tmp_path: Path) -> None:
    runtime = runtime_that_prints_arguments(tmp_path / "runtime")
    homes: list[Path] = []
    threads = [
        threading.Thread(target=lambda: homes.append(java.wrapped_home(runtime, tmp_path / "cache"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(homes) == 8
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [homes[0].name]


def test_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    with pytest.raises(InvalidArgumentError, match="XDG_CACHE_HOME") as caught:
        java.wrapped_home(runtime_that_prints_arguments(tmp_path / "runtime"), in_the_way)
    assert caught.value.facts["path"] == str(in_the_way)


def test_cache_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(InvalidArgumentError, match="belongs to another user"):
        java.wrapped_home(runtime_that_prints_arguments(tmp_path / "runtime"), tmp_path / "cache")


def test_cache_dir_honours_xdg_only_when_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert java.cache_dir() == Path("/somewhere/holdfast")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert java.cache_dir().is_relative_to(tmp_path)


OTHER_VERSION = """#!/bin/sh
exec {python} -c '
import sys
sys.version_info = (3, 8, 1)
exec(sys.argv.pop(2))
' "$@"
"""


def environment(folder: Path, *, with_packages: bool) -> str:
    """Make a virtual environment, with this process's packages or empty, and return its Python."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python3"
    if with_packages:
        ours = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
        found = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        Path(found.stdout.strip(), "ours.pth").write_text(ours)
    return str(python)


def test_this_programs_own_python_is_good() -> None:
    assert problem_of(sys.executable) is None
    assert problem_of(os.path.join(os.path.dirname(sys.executable), "python3")) is None


@pytest.mark.parametrize("has_zip", [False, True])
def test_an_environment_without_the_packages_says_which_are_missing(
    has_zip: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual fault, an environment that is not activated, is seen before Spark starts a worker in it.

    PySpark is needed where Spark has no zip file of it to put on the workers' path.
    """
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "spark"))
    if has_zip:
        (tmp_path / "spark/python/lib").mkdir(parents=True)
        (tmp_path / "spark/python/lib/pyspark.zip").touch()
    missing = "pandas, pyarrow, holdfast" if has_zip else "pyspark, pandas, pyarrow, holdfast"
    assert problem_of(environment(tmp_path / "bare", with_packages=False)) == f"which has no {missing}"


def test_another_environment_with_the_packages_is_good(tmp_path: Path) -> None:
    assert problem_of(environment(tmp_path, with_packages=True)) is None


def test_a_python_on_the_path_is_the_one_that_spark_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark looks a bare name up on the PATH, and so does the check."""
    python = environment(tmp_path, with_packages=False)
    monkeypatch.setenv("PATH", os.path.dirname(python), prepend=os.pathsep)
    link = tmp_path / "bin" / "python-of-the-path"
    link.symlink_to(python)
    problem = str(problem_of(link.name))
    assert problem.startswith("which has no ")
    assert problem.endswith("pandas, pyarrow, holdfast")


def test_a_python_that_cannot_start_says_so(tmp_path: Path) -> None:
    """A path that is wrong, or no program, is named before Spark fails to start it."""
    assert problem_of(str(tmp_path / "nowhere")) == "which does not exist"
    broken = tmp_path / "broken"
    broken.write_text("no program")
    broken.chmod(0o700)
    assert str(problem_of(str(broken))).startswith("which does not start (")


def test_another_version_of_python_is_refused(tmp_path: Path) -> None:
    """Spark refuses to unpickle functions in another minor version; the message says so before any job."""
    other = tmp_path / "python3.8"
    other.write_text(OTHER_VERSION.format(python=sys.executable))
    other.chmod(0o700)
    ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert problem_of(str(other)) == f"which is Python 3.8 and not {ours}"
