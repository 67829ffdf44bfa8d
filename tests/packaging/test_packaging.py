"""The wheel in an empty environment, without PySpark and beside its namesake, and its description as PyPI shows it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from readme_renderer.markdown import render

from holdfast.distribution import VERSION
from tests.packaging.conftest import ROOT, SCRIPTS, build, installed, pip, run, started
from tests.pages import shown

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def files_of(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.CRC for info in archive.infolist() if not info.filename.endswith("RECORD")}


def test_the_wheel_has_every_package_and_nothing_else(wheel: Path) -> None:
    """A folder that pyproject.toml forgets would be missing at users only."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    names = files_of(wheel)
    packages = {name.rpartition("/")[0].replace("/", ".") for name in names if name.endswith(".py")}
    assert packages == set(setuptools["packages"])
    assert "holdfast/py.typed" in names
    assert {Path(name).name for name in names if "/licenses/" in name} == {"LICENSE", "NOTICE"}
    assert not [
        name
        for name in names
        if not re.match(r"(holdfast(_spark-[0-9.]+\.dist-info)?|pyspark_holdfast(_[a-z]+)?)/", name)
    ]


def test_the_sdist_builds_the_same_wheel(dist: Path, wheel: Path, tmp_path: Path) -> None:
    """Distributions build from it, and have neither the repository nor its tests."""
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert not (source / "tests").exists()
    build(source, tmp_path / "dist", "--wheel")
    (again,) = (tmp_path / "dist").glob("*.whl")
    assert again.name == wheel.name
    assert files_of(again) == files_of(wheel)


@pytest.mark.all
@pytest.mark.spark
@pytest.mark.parametrize("declared", [False, pytest.param(True, marks=pytest.mark.all)])
def test_the_demo_runs_from_the_wheel(wheel: Path, tmp_path: Path, declared: bool) -> None:
    """As after `pip install holdfast-spark`; the libraries are those here, or those that it declares."""
    python = installed(wheel, tmp_path / "environment", declared=declared)
    home = run(python, "-c", "import holdfast; print(holdfast.__file__)", cwd=tmp_path)
    assert Path(home.strip()).is_relative_to(tmp_path)
    demo = (python.parent / "holdfast", "demo", "--no-kill", "--flights", "3000", "--batches", "4")
    shown = run(*demo, "--work-dir", tmp_path / "work", cwd=tmp_path)
    assert "equal: state and plain pandas" in shown
    assert "equal: output and plain pandas" in shown


NEEDED = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE", "holdfast/distribution.py")
SOURCE = "https://example.org/holdfast"


def metadata(source: Path, *, published: bool) -> Message:
    """Return the metadata of a distribution built from the files that decide it."""
    for name in NEEDED:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    project = (source / "pyproject.toml").read_text()
    # One package: the others would only take time.
    project = re.sub(r"(?s)^packages = \[.*?^\]", 'packages = ["holdfast"]', project, flags=re.MULTILINE)
    if published:
        project = project.replace("[project.urls]\n", f'[project.urls]\nSource = "{SOURCE}"\n')
    (source / "pyproject.toml").write_text(project)
    build(source, source / "dist", "--wheel")
    (wheel,) = (source / "dist").glob("*.whl")
    run(SCRIPTS / "twine", "check", "--strict", wheel, cwd=source)
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("published", [True, False])
def test_the_long_description_renders_and_its_links_lead_somewhere(published: bool, tmp_path: Path) -> None:
    """PyPI has none of the repository's files: a link to one leads to the repository, or is none."""
    found = metadata(tmp_path, published=published)
    assert (found["Name"], found["Version"]) == ("holdfast-spark", VERSION)
    page = render(str(found.get_payload()))
    assert page is not None
    assert page.count("<table>") == len(re.findall(r"^\|---", (ROOT / "README.md").read_text(), re.MULTILINE))
    links = re.findall(r'(?:href|src)="([^"#]+)', page)
    assert [link for link in links if not link.startswith("https://")] == []
    ours = {link for link in links if link.startswith(SOURCE)}
    assert (f"{SOURCE}/blob/v{VERSION}/docs/deploy.md" in ours) == published
    assert (f"{SOURCE}/raw/v{VERSION}/docs/throughput.svg" in ours) == published
    for link in ours:
        assert (ROOT / link.split(f"/v{VERSION}/")[1]).exists(), link


@pytest.mark.timeout(300)
def test_a_python_that_is_too_old_gets_as_far_as_its_version() -> None:
    """pip builds the metadata before it compares versions: Python 3.10, which has no tomllib, got a traceback."""
    program = (
        "import runpy, sys, setuptools.compat.py310\n"
        "sys.modules['tomllib'] = None\n"
        "sys.argv = ['setup.py', '--name']\n"
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    assert run(sys.executable, "-W", "ignore", "-c", program, cwd=ROOT).split()[-1] == "holdfast-spark"


RECORD = "holdfast-0.5.1.dist-info"


@pytest.fixture
def namesake(tmp_path: Path) -> Path:
    """Return a wheel with the name and the module that the other project's has."""
    wheel = tmp_path / "holdfast-0.5.1-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        archive.writestr("holdfast/__init__.py", '"""Another project."""\n')
        archive.writestr(f"{RECORD}/METADATA", "Metadata-Version: 2.1\nName: holdfast\nVersion: 0.5.1\n")
        archive.writestr(f"{RECORD}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{RECORD}/RECORD", f"holdfast/__init__.py,,\n{RECORD}/METADATA,,\n{RECORD}/WHEEL,,\n")
    return wheel


@pytest.mark.timeout(300)
def test_a_namesake_in_its_place_is_an_error_that_names_it(wheel: Path, namesake: Path, tmp_path: Path) -> None:
    """Without it: `module 'holdfast' has no attribute 'stream'`, or an import error inside the command line."""
    python = installed(wheel, tmp_path / "environment")
    pip(python, "install", namesake)
    told = started(python.parent / "holdfast", "--version", cwd=tmp_path)
    assert told.returncode == 2
    assert "holdfast: `import holdfast` finds another project's package, not holdfast-spark" in told.stderr
    assert "Traceback" not in told.stderr
    told = started(python, "-c", "from holdfast.spark_integration.stream import stream; stream(None)", cwd=tmp_path)
    assert "ConflictError: `import holdfast` finds another project's package" in told.stderr
    # What the message says to do.
    pip(python, "uninstall", "holdfast")
    pip(python, "install", "--force-reinstall", "--no-deps", wheel)
    assert started(python.parent / "holdfast", "--version", cwd=tmp_path).stderr == ""
    assert "stream" in run(python, "-c", "import holdfast; print(holdfast.stream)", cwd=tmp_path)


@pytest.mark.timeout(300)
def test_a_namesake_that_was_there_before_is_a_warning(wheel: Path, namesake: Path, tmp_path: Path) -> None:
    """All works, until the other one is upgraded or removed; one warning in a process."""
    python = installed(namesake, tmp_path / "environment")
    pip(python, "install", "--no-deps", wheel)
    told = started(python.parent / "holdfast", "--version", cwd=tmp_path)
    assert told.returncode == 0
    assert told.stderr.count("UserWarning: holdfast 0.5.1, another project, is installed in the folder of") == 1


STRUCK = ("aiobotocore", "s3fs")


@pytest.mark.spark
@pytest.mark.all
@pytest.mark.slow(120)
def test_the_commands_of_the_guide_install_what_runs_on_a_spark_that_pip_does_not_know(
    wheel: Path, java_home: Path, tmp_path: Path
) -> None:
    """What they install, with a Spark on the path as its own scripts put it there, runs the quickstart."""
    shutil.copy2(wheel, tmp_path)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "environment"], check=True)
    scripts, of_spark = tmp_path / "environment" / "bin", tmp_path / "spark"
    of_spark.mkdir()
    for package in ("pyspark", "py4j"):
        (of_spark / package).symlink_to(Path(sysconfig.get_path("purelib")) / package)
    here = {"PATH": f"{scripts}:/usr/bin:/bin", "JAVA_HOME": str(java_home), "SPARK_LOCAL_IP": "127.0.0.1"}
    kept = {name: value for name, value in os.environ.items() if name not in {"PYSPARK_PYTHON", "PYTHONPATH"}}

    def run(*command: str | Path, **more: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=kept | here | more, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    (block,) = [code for language, code in shown("docs/deploy.md") if language == "sh" and "needed.txt" in code]
    *first, last = block.splitlines()
    for command in first:
        run("bash", "-c", command)
    needed = (tmp_path / "needed.txt").read_text().splitlines()
    assert {"pyarrow", "s3fs"} < {line.split(">")[0] for line in needed}
    assert "pyspark" not in "".join(needed)
    (tmp_path / "needed.txt").write_text("\n".join(line for line in needed if not line.startswith(STRUCK)))
    run("bash", "-c", last)
    installed = {line.split("==")[0] for line in run(scripts / "pip", "freeze").splitlines()}
    assert not installed & {"pyspark", "py4j", "botocore", *STRUCK}
    assert "|     UA|  2| 12.0|" in run(
        scripts / "python", ROOT / "examples" / "quickstart.py", PYTHONPATH=str(of_spark)
    )
